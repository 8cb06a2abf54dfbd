"""How tensors, pools and caches show themselves in notebooks."""

from __future__ import annotations

import importlib


class Drawn:
    """An object that notebooks draw."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """``text/plain`` and ``text/html``, for IPython."""
        # By name: only notebooks need it, and it stands on all that it draws.
        drawn: dict[str, str] = importlib.import_module("vtensor._pictures.html").bundle(self)
        return drawn

    def _repr_html_(self) -> str:
        return self._repr_mimebundle_()["text/html"]

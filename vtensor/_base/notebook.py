"""The hook through which tensors, pools and caches draw themselves in notebooks.

vtensor/__init__.py registers the function that draws, so only notebooks import the drawing code.
"""

from __future__ import annotations

from collections.abc import Callable

Draw = Callable[[object], dict[str, str]]

_draw: Draw


def draw_with(draw: Draw) -> None:
    """Makes :func:`bundle` call ``draw``."""
    global _draw
    _draw = draw


def bundle(shown: object) -> dict[str, str]:
    """``text/plain`` and ``text/html``, for IPython's ``_repr_mimebundle_``."""
    return _draw(shown)


class Drawn:
    """An object that notebooks draw."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return bundle(self)

    def _repr_html_(self) -> str:
        return bundle(self)["text/html"]

"""What notebooks show of an object: its class asks here, and vtensor/__init__.py says what draws it.

So tensors, pools and caches know nothing of pictures, which only notebooks import.
"""

from __future__ import annotations

from collections.abc import Callable

Draw = Callable[[object], dict[str, str]]

_draw: Draw


def draw_with(draw: Draw) -> None:
    """Has :func:`bundle` ask ``draw``."""
    global _draw
    _draw = draw


def bundle(shown: object) -> dict[str, str]:
    """``text/plain`` and ``text/html``, for IPython's ``_repr_mimebundle_``."""
    return _draw(shown)

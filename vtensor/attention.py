"""K and V as an attention kernel gets them.

:func:`views` is one call of C++, because each function in Python takes microseconds after a kernel, which
leaves the interpreter's memory cold.
"""

from __future__ import annotations

from vtensor._core import attention_views as views

__all__ = ["views"]

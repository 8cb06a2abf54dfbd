"""What an attention kernel demands of query, key and value, known at a glance.

For what launches kernels. Checks in Python take microseconds, and ten times as long behind a kernel that has
left the interpreter's memory cold; so they are for explaining what is wrong, once :func:`suit` has said that
something may be. ``Demands.plain`` takes what a kernel is given besides, where that suits.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from vtensor._core import Demands

__all__ = ["Demands", "Unknown", "suit"]


def suit(demands: Demands, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether they meet the demands.

    Args:
        demands: of the kernel; make them once.
        query, key, value: in the kernel's layout, ``[B, S, H, D]`` or another of ``demands.rank`` dimensions;
            what is no tensor does not suit.

    Returns:
        False where they may not: also of tensors that DLPack cannot describe, with torch before 2.10, and to
        a compiler, which sees through checks in Python and not into this.
    """
    return not is_compiling() and demands.met(query, key, value)


class Unknown:
    """In the place of ``Demands`` for a compiler, which sees through checks in Python and not into
    those: whatever is asked, something may not suit."""

    def met(self, *given: object) -> bool:
        return False

    def plain(self, *given: object) -> None:
        return None

    def room(self, *given: object) -> None:
        return None

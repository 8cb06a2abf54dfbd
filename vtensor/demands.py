"""What an attention kernel demands of query, key and value, known at a glance.

For what launches kernels. Checks in Python take microseconds, and ten times as long behind a kernel that has
left the interpreter's memory cold; so they are for explaining what is wrong, once :func:`suit` has said that
something may be.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from vtensor._core import Demands

__all__ = ["Demands", "demands", "suit"]


def demands(
    rank: int, heads_dim: int, *, same_rows: bool = True, grouped: bool = True, aligned: bool = False
) -> Demands:
    """One device, one dtype, the key's head size for the query, as many positions of key and value, and more.

    Args:
        rank: of all three.
        heads_dim: from the front.
        same_rows: dimension 0 is a row, and the query has one for each of the key's.
        grouped: the query may have a multiple of the key's heads, not only as many.
        aligned: float16 or bfloat16 of head sizes up to 256, in steps of 16 bytes everywhere: laid out as
            FlashAttention takes K and V without a copy.
    """
    return Demands(rank=rank, heads_dim=heads_dim, same_rows=same_rows, grouped=grouped, aligned=aligned)


def suit(demands: Demands, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether they meet the demands. False says that they may not: also of tensors that DLPack cannot
    describe, with torch before 2.10, and to a compiler, which sees through Python and not into this."""
    return not is_compiling() and demands.met(query, key, value)

"""Which tokens of a :class:`~vtensor.KVCache` a tensor shows: all views of its layers know their cache.

For what launches kernels over ``cache[layer]``: what :meth:`~vtensor.KVCache.step` has not made ready must be
neither read nor written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from vtensor import _core
from vtensor.errors import Closed

if TYPE_CHECKING:
    from vtensor.kv import KVCache

__all__ = ["CacheRows", "rows_of"]


class CacheRows(NamedTuple):
    """Rows of a tensor that are slots of a cache, or parts of slots."""

    cache: KVCache
    slots: list[int]
    """Of each row, the slot whose tokens it shows."""
    first: int
    """The token that each row begins with."""
    step: int
    """Tokens from one position of a row to the next."""

    def tokens(self, positions: int) -> int:
        """Tokens that a slot must have for the first ``positions`` of a row to be there."""
        return self.first + (positions - 1) * self.step + 1 if positions else 0


def rows_of(t: torch.Tensor, positions_dim: int) -> CacheRows | None:
    """What ``t`` shows of a cache, with rows along dimension 0 and a row's positions along ``positions_dim``;
    one row where that is 0.

    Returns:
        None where ``t`` is over other memory, or not rows of this kind (as a view of one slot is whose
        dimension 0 counts tokens).

    Raises:
        Closed: the cache is closed, or gone.
    """
    try:
        of = _core.SlotRange.of(t)
    except RuntimeError:  # torch.func's wrappers have no storage
        return None
    if of is None:
        return None
    cache = cast("KVCache | None", of.cache)
    if cache is None or cache.closed:
        raise Closed("[KVCache] the cache whose layer this is has been closed: make a new one")
    item = t.element_size()
    found = of.rows(int(t.storage_offset()) * item, item, t.shape, t.stride(), positions_dim)
    return None if found is None else CacheRows(cache, *found)

"""Which tokens of a :class:`~vtensor.KVCache` a tensor shows: all views of its layers know their cache.

For what launches kernels over ``cache[layer]``: what :meth:`~vtensor.KVCache.step` has not made ready must be
neither read nor written.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from vtensor.errors import Closed

if TYPE_CHECKING:
    from vtensor.kv import KVCache

__all__ = ["CacheRows", "rows_of"]

_MARK = "_vtensor_kv_range"  # of a storage: torch keeps one Python object for it, and every view has that


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


class _Range(NamedTuple):
    cache: weakref.ref[KVCache]
    slots: int
    row_bytes: int  # of a slot; row r of slot s is the (r * slots + s)-th
    item_bytes: int  # of a token in a row


def mark(memory: torch.Tensor, cache: KVCache, row_bytes: int, item_bytes: int) -> None:
    """Notes whose memory this is, for all tensors over it. Keeps nothing alive."""
    of = _Range(weakref.ref(cache), cache.max_batch, row_bytes, item_bytes)
    setattr(memory.untyped_storage(), _MARK, of)


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
        of: _Range | None = getattr(t.untyped_storage(), _MARK, None)
    except RuntimeError:  # torch.func's wrappers have no storage
        return None
    if of is None:
        return None
    cache = of.cache()
    if cache is None or cache.closed:
        raise Closed("[KVCache] the cache whose layer this is has been closed: make a new one")
    item, strides, sizes = t.element_size(), t.stride(), t.shape
    row, inside = divmod(int(t.storage_offset()) * item, of.row_bytes)
    apart, odd = divmod(strides[0] * item, of.row_bytes) if positions_dim and sizes[0] > 1 else (0, 0)
    step, askew = divmod(strides[positions_dim] * item, of.item_bytes)
    if sizes[positions_dim] < 2:
        step, askew = 1, 0
    if odd or askew:
        return None
    count = sizes[0] if positions_dim else 1
    slots = [(row + b * apart) % of.slots for b in range(count)]
    return CacheRows(cache, slots, inside // of.item_bytes, step)

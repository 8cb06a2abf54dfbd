"""What a KV cache says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from vtensor import _core
from vtensor._layout import Layout
from vtensor.pool import Pool

__all__ = ["FREE", "SWAPPED", "USED", "KVCacheStats", "count"]

FREE, USED, SWAPPED = range(3)
"""What the core says of a slot."""


@dataclass(frozen=True)
class KVCacheStats:
    """A KVCache at one moment. Pages, unless the name says otherwise.

    ``pages_mapped == pages_active + pages_prefetched + pages_parked + pages_pinned`` (I4).
    """

    page_size: int
    """Bytes of one page."""
    slots_used: int
    """Slots of requests whose pages are here."""
    slots_free: int
    """Slots that :meth:`KVCache.alloc` can give."""
    slots_swapped: int
    """Slots of requests whose pages are in host memory."""
    slots_lost: int
    """Of the free slots, those given up after a driver call that could not be undone (I8)."""
    tokens: int
    """Tokens of the slots in use."""
    unit: int
    """Tokens of the smallest prefix that requests can share."""
    page_tokens: int
    """Tokens that one page holds; of the largest rows, where they differ."""
    ranges: int
    """Rows of a slot: it takes a page in each for each ``page_tokens`` tokens."""
    nbytes_live: int
    """Bytes of K and V that the tokens of the slots in use need, shared ones counted in each."""
    nbytes_mapped: int
    """``pages_mapped`` in bytes."""
    nbytes_swapped: int
    """Bytes of host memory that swapped slots take."""
    pages_used: int
    """Page handles that slots have mapped, each counted once."""
    pages_shared: int
    """Of these, mapped in several slots or kept by the prefix index."""
    pages_mapped: int
    """Mapped pages, counted once for each slot."""
    pages_active: int
    """Of the mapped, what lengths need."""
    pages_prefetched: int
    """Of the mapped, what was prepared ahead of need."""
    pages_parked: int
    """Of the mapped, what freed slots keep for the next request."""
    pages_pinned: int
    """Of the mapped, what waits to be unmapped."""
    prefix_tokens: int
    """Tokens that the prefix index keeps."""
    prefix_queries: int
    """Tokens that requests asked the index for."""
    prefix_hits: int
    """Tokens that it had."""
    prefix_evictions: int
    """Units that it gave up for want of memory."""
    waste: float
    """Bytes needed beyond the live ones, over the live ones: what pages round up."""
    driver_calls: dict[str, dict[str, int]]
    """Of the pool: calls made by ``"caller"`` and ``"mapper"``, each from a call's name to a count."""


def count(core: _core.CacheCore, layout: Layout, pool: Pool) -> KVCacheStats:
    """A cache's counts of this moment."""
    counts = core.counts()
    states, lengths = core.states, core.lengths
    pages, size = counts.pages, pool.page_size
    live = sum(layout.nbytes(n, core.begins(slot)) for slot, n in enumerate(lengths) if n)
    return KVCacheStats(
        page_size=size,
        slots_used=states.count(USED),
        slots_free=states.count(FREE),
        slots_swapped=states.count(SWAPPED),
        slots_lost=counts.lost,
        tokens=sum(lengths),
        unit=core.unit,
        page_tokens=layout.page_tokens(size),
        ranges=layout.ranges,
        nbytes_live=live,
        nbytes_mapped=pages.mapped * size,
        nbytes_swapped=counts.swapped_bytes,
        pages_used=counts.distinct,
        pages_shared=counts.shared,
        pages_mapped=pages.mapped,
        pages_active=pages.needed,
        pages_prefetched=pages.ahead,
        pages_parked=pages.parked,
        pages_pinned=pages.held,
        prefix_tokens=counts.prefix_units * core.unit,
        prefix_queries=counts.prefix_queries,
        prefix_hits=counts.prefix_hits,
        prefix_evictions=counts.prefix_evictions,
        waste=(pages.needed * size - live) / live if live else 0.0,
        driver_calls=pool.stats().driver_calls,
    )

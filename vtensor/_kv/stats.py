"""The statistics of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtensor import _core
from vtensor._kv.layout import CacheLayout
from vtensor.pool import Pool


@dataclass(frozen=True)
class KVCacheStats:
    """Counts of a KVCache at one moment, in pages unless the name says otherwise. Its ``repr`` shows eight of
    them.

    ``pages_mapped == pages_active + pages_prefetched + pages_cached + pages_pinned`` (I4).

    Attributes:
        page_size: bytes of one page.
        slots_used: slots of requests whose pages are here.
        slots_free: slots that :meth:`KVCache.alloc` can give.
        slots_swapped: slots of requests whose pages are in host memory.
        tokens: tokens of the slots in use.
        unit: tokens of the smallest prefix that requests can share.
        page_tokens: tokens in one page; those of the largest tokens, if they differ.
        ranges: rows of a slot: it takes a page in each for each ``page_tokens`` tokens.
        nbytes_live: bytes of K and V that the tokens of the slots in use need; shared ones count in each.
        nbytes_mapped: ``pages_mapped`` in bytes.
        nbytes_swapped: bytes of host memory that swapped slots take.
        pages_used: page handles that slots have mapped, each counted once.
        pages_shared: used pages that are mapped in several slots or kept by the prefix index.
        pages_mapped: mapped pages, counted once for each slot.
        pages_active: mapped pages that lengths need.
        pages_prefetched: mapped pages ahead of need: prepared, or taken over from the last owner.
        pages_cached: mapped pages that freed slots keep for the next request.
        pages_pinned: mapped pages that wait to be unmapped.
        prefix_tokens: tokens that the prefix index keeps.
        prefix_queries: tokens that requests asked the index for.
        prefix_hits: tokens of these that it had.
        prefix_evictions: units that it gave up because memory was short.
        waste: needed bytes beyond the live ones, over the live ones: what pages round up.
        driver_calls: calls of the pool, by thread (``"caller"`` and ``"mapper"``) and name.
    """

    page_size: int = field(repr=False)
    slots_used: int
    slots_free: int
    slots_swapped: int
    tokens: int
    unit: int = field(repr=False)
    page_tokens: int = field(repr=False)
    ranges: int = field(repr=False)
    nbytes_live: int
    nbytes_mapped: int
    nbytes_swapped: int
    pages_used: int = field(repr=False)
    pages_shared: int = field(repr=False)
    pages_mapped: int = field(repr=False)
    pages_active: int = field(repr=False)
    pages_prefetched: int = field(repr=False)
    pages_cached: int = field(repr=False)
    pages_pinned: int = field(repr=False)
    prefix_tokens: int
    prefix_queries: int = field(repr=False)
    prefix_hits: int = field(repr=False)
    prefix_evictions: int = field(repr=False)
    waste: float = field(repr=False)
    driver_calls: dict[str, dict[str, int]] = field(repr=False)


def count(core: _core.CacheCore, layout: CacheLayout, pool: Pool) -> KVCacheStats:
    counts = core.counts()
    pages, size, live = counts.pages, pool.page_size, counts.live_bytes
    return KVCacheStats(
        page_size=size,
        slots_used=counts.used,
        slots_free=counts.free,
        slots_swapped=counts.swapped,
        tokens=counts.tokens,
        unit=core.unit,
        page_tokens=layout.page_tokens(size),
        ranges=layout.ranges,
        nbytes_live=live,
        nbytes_mapped=pages.mapped * size,
        nbytes_swapped=counts.swapped_bytes,
        pages_used=counts.distinct,
        pages_shared=counts.shared,
        pages_mapped=pages.mapped,
        pages_active=pages.active,
        pages_prefetched=pages.prefetched,
        pages_cached=pages.cached,
        pages_pinned=pages.pinned,
        prefix_tokens=counts.prefix_units * core.unit,
        prefix_queries=counts.prefix_queries,
        prefix_hits=counts.prefix_hits,
        prefix_evictions=counts.prefix_evictions,
        waste=(pages.active * size - live) / live if live else 0.0,
        driver_calls=pool._core.driver_calls(),
    )

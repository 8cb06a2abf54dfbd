"""Bands of a KVCache's layers: they grow, leave and come back apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import vtensor
from kv_support import (
    PAGE,
    SHAPES,
    UNIT,
    filled,
    grown,
    lengths_with,
    make_cache,
    options_of,
)
from machines import case
from support import calls, calls_since, open_pool
from vtensor.testing.cache_machine import BUDGET_PAGES, CacheMachine, which
from vtensor.testing.kv_model import check_contents, write
from vtensor.testing.strategies import failures, growths

BANDED = {"layers": 2, "windows": 4, "uneven groups": 2, "two sizes": 2}  # shapes, and their bands
LAYERS = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 32}


def banded(pool, bands: int = 4, **options) -> vtensor.KVCache:
    """Four layers; 16 tokens fill a page, so a band of one has two rows."""
    return make_cache(pool, "layers", **LAYERS, bands=bands, **options)


@pytest.fixture
def cache(pool_factory, kind):
    with banded(pool_factory(kind, 200)) as cache:
        yield cache


def to(cache, slot: int, length: int, bands) -> bool:
    """A step of one slot."""
    return cache.step(lengths_with(cache, slot, length), bands=bands)


# --- random programs --------------------------------------------------------------------------------------


@dataclass
class Apart:
    """A request whose bands differ: ``values`` of the longest, of which each has the first."""

    values: list[int]
    lengths: list[int]
    away: set[int] = field(default_factory=set)


some_bands = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)


class BandMachine(CacheMachine):
    """Requests whose bands differ beside those whose bands are alike."""

    kind = "host"

    def open_pool(self) -> vtensor.Pool:
        self.apart: dict[int, Apart] = {}
        return open_pool(self.kind, BUDGET_PAGES, page_size=PAGE, prefetch=0)

    def in_use(self) -> list[int]:
        return [slot for slot in super().in_use() if slot not in self.apart]

    def any_slot(self, index: int) -> int:
        slots = super().in_use()
        return slots[index % len(slots)]

    def bands(self, named: list[int]) -> list[int]:
        return list(dict.fromkeys(band % len(self.cache.bands) for band in named))

    def parted(self, slot: int) -> Apart:
        """As the slot is, whether its bands differ or not."""
        values = self.requests[slot].values
        return self.apart.get(slot) or Apart(list(values), [len(values)] * len(self.cache.bands))

    def settle(self, slot: int, apart: Apart) -> None:
        self.apart[slot] = apart
        request = self.requests[slot]
        length = min(apart.lengths)
        request.values = apart.values[:length]
        request.known = min(request.known, length)
        if len(set(apart.lengths)) == 1 and not apart.away:
            del self.apart[slot]

    @precondition(lambda self: CacheMachine.in_use(self))
    @rule(index=which, named=some_bands, by=growths(), fail=failures(12))
    def step_bands(self, index: int, named: list[int], by: int, fail: int | None) -> None:
        slot = self.any_slot(index)
        apart = self.parted(slot)
        bands = [band for band in self.bands(named) if band not in apart.away]
        if not bands:
            return
        length = min(self.cache.max_len, max(apart.lengths[band] for band in bands) + by)
        target = self.cache.lengths  # the others stay as they are
        target[slot] = length
        fits = self.cache.fits([length if at == slot else 0 for at in range(len(target))], bands=bands)
        done = self.attempt(lambda: self.cache.step(target, bands=bands), fail)
        assert done == fits
        if not done:
            return
        fresh = [next(self.own_values) for _ in range(length - len(apart.values))]
        apart.values += fresh
        for band in bands:
            before, apart.lengths[band] = apart.lengths[band], length
            write(self.cache, slot, before, apart.values[before:length], self.cache.bands[band])
        self.settle(slot, apart)

    @precondition(lambda self: CacheMachine.in_use(self))
    @rule(index=which, named=some_bands, fail=failures(12))
    def bands_out(self, index: int, named: list[int], fail: int | None) -> None:
        slot = self.any_slot(index)
        apart = self.parted(slot)
        bands = [band for band in self.bands(named) if band not in apart.away]
        if not bands:
            return
        self.attempt(lambda: self.cache.swap_out(slot, bands=bands), fail)
        self.cache.wait(slot)  # so that equal steps give equal counts
        apart.away |= set(bands)
        self.settle(slot, apart)

    @precondition(lambda self: any(apart.away for apart in self.apart.values()))
    @rule(index=which, named=some_bands, fail=failures(12))
    def bands_in(self, index: int, named: list[int], fail: int | None) -> None:
        slots = [slot for slot, apart in self.apart.items() if apart.away]
        slot = slots[index % len(slots)]
        apart = self.apart[slot]
        bands = [band for band in self.bands(named) if band in apart.away] or [min(apart.away)]
        length = max(apart.lengths[band] for band in bands)
        lengths = [length if at == slot else 0 for at in range(self.cache.max_batch)]
        fits = self.cache.fits(lengths, bands=bands)
        done = self.attempt(lambda: self.cache.swap_in(slot, bands=bands), fail)
        assert done >= fits  # which counts that all of them have as many tokens
        assert done == fits or len({apart.lengths[band] for band in bands}) > 1
        if not done:
            return
        self.cache.wait(slot)
        apart.away -= set(bands)
        self.settle(slot, apart)

    @precondition(lambda self: self.apart)
    @rule(index=which, percent=st.integers(0, 100))
    def truncate_apart(self, index: int, percent: int) -> None:
        slot = list(self.apart)[index % len(self.apart)]
        apart = self.apart[slot]
        length = min(apart.lengths) * percent // 100
        try:
            self.cache.truncate(slot, length)
        except vtensor.InvalidArgument:
            assert self.windows
            return
        self.settle(slot, Apart(apart.values[:length], [length] * len(apart.lengths), apart.away))

    @precondition(lambda self: self.apart)
    @rule(index=which, by=growths(), fail=failures(12))
    def bring_together(self, index: int, by: int, fail: int | None) -> None:
        """A step that names no bands."""
        slot = list(self.apart)[index % len(self.apart)]
        apart = self.apart[slot]
        length = min(self.cache.max_len, max(apart.lengths) + by)
        try:
            done = self.attempt(lambda: grown(self.cache, slot, length), fail)
        except vtensor.InvalidArgument:
            assert apart.away and length > min(apart.lengths)
            return
        assert not apart.away or length == min(apart.lengths)
        if not done or length == min(apart.lengths):
            return
        apart.values += [next(self.own_values) for _ in range(length - len(apart.values))]
        for band, before in enumerate(apart.lengths):
            write(self.cache, slot, before, apart.values[before:length], self.cache.bands[band])
        self.settle(slot, Apart(apart.values, [length] * len(apart.lengths)))

    @precondition(lambda self: self.apart)
    @rule(index=which, operation=st.sampled_from(["fork", "publish", "swap_out", "reorder"]))
    def what_takes_whole_requests(self, index: int, operation: str) -> None:
        slot = list(self.apart)[index % len(self.apart)]
        calls = {
            "fork": lambda: self.cache.fork(slot, 0),
            "publish": lambda: self.cache.publish(slot, []),
            "swap_out": lambda: self.cache.swap_out(slot),
            "reorder": lambda: self.cache.reorder([slot], [slot]),
        }
        with pytest.raises(vtensor.InvalidArgument, match=r"bands? "):
            calls[operation]()

    @precondition(lambda self: self.requests)
    @rule(index=which)
    def free(self, index: int) -> None:
        super().free(index)
        self.apart = {slot: apart for slot, apart in self.apart.items() if slot in self.requests}

    def check(self) -> None:
        whole = self.requests
        self.requests = {slot: request for slot, request in whole.items() if slot not in self.apart}
        try:
            self.check_together(len(whole))
        finally:
            self.requests = whole
        for slot, apart in self.apart.items():
            assert self.cache.length(slot) == self.cache.lengths[slot] == min(apart.lengths)
            assert set(self.cache.bands_away(slot)) == apart.away
            for band, length in enumerate(apart.lengths):
                assert self.cache.length(slot, band) == length
                if band not in apart.away:
                    values = apart.values[:length]
                    check_contents(self.cache, slot, values, self.windows, self.cache.bands[band])

    def check_together(self, requests: int) -> None:
        self.expected_requests = requests
        super().check()

    def check_counts(self) -> None:
        stats = self.cache.stats()
        assert stats.slots_used + stats.slots_swapped == self.expected_requests
        assert stats.pages_pinned == 0
        if not self.windows:
            assert stats.pages_active == self.needed_pages()

    def needed_pages(self) -> int:
        size, pages = self.pool.page_size, super().needed_pages()
        for apart in self.apart.values():
            for group in self.cache._layout.row_groups:
                length = 0 if group.band in apart.away else apart.lengths[group.band]
                pages += group.rows * -(-length * group.item_bytes // size)
        return pages


for _kind in ("host", "simcuda"):
    for _shape in BANDED:
        _fixed = {"kind": _kind, "options": options_of(_shape, bands=BANDED[_shape])}
        _banded = type(f"Bands{_kind}{_shape}".replace(" ", ""), (BandMachine,), _fixed)
        globals()[f"Test{_kind}{_shape}".replace(" ", "_")] = case(_banded, 30, 40)


# --- contents and memory ----------------------------------------------------------------------------------


def test_a_band_that_comes_back_empty_begins_anew(pool_factory, kind):
    """Its window had given back the positions that the slot's next request has first."""
    windows = SHAPES["windows"]["windows"]
    with make_cache(pool_factory(kind, 200), "windows", bands=4) as cache:
        slot = filled(cache, 60)
        assert grown(cache, slot, 61)
        cache.swap_out(slot, bands=[1])
        cache.truncate(slot, 0)
        assert cache.swap_in(slot, bands=[1])
        assert grown(cache, slot, 30)
        write(cache, slot, 0, range(30))
        check_contents(cache, slot, range(30), windows)


@pytest.mark.exact
def test_bands_that_are_alike_again_cost_nothing(cache):
    slot = filled(cache, 20)
    cache.swap_out(slot, bands=[1, 2])
    assert cache.stats().nbytes_live == 20 * 2 * 2 * PAGE // UNIT  # K and V of two layers
    assert cache.swap_in(slot, bands=[2, 1])
    cache.wait(slot)
    before = calls(cache.pool)
    for length in range(21, 2 * UNIT + 1):
        assert grown(cache, slot, length)
    assert calls_since(cache.pool, before) == {}  # I15
    assert [cache.length(slot, band) for band in range(4)] == [2 * UNIT] * 4


@pytest.mark.exact
def test_fits_counts_all_that_comes_back(pool_factory, kind):
    with banded(pool_factory(kind, 10)) as cache:
        slot = cache.alloc()
        assert to(cache, slot, 4 * UNIT, [0])  # 8 pages
        cache.swap_out(slot, bands=[0])
        cache.wait(slot)
        other = cache.alloc()
        assert to(cache, other, UNIT, [1, 2])
        lengths = lengths_with(cache, slot, 4 * UNIT)
        assert not cache.fits(lengths, bands=[0]) and not cache.swap_in(slot, bands=[0])
        cache.truncate(slot, 0)
        lengths[slot] = UNIT
        assert cache.fits(lengths, bands=[0]) and cache.swap_in(slot, bands=[0])
        cache.swap_out(slot, bands=[1])
        lengths[slot] = 0
        assert cache.fits(lengths, bands=[1])  # which leaves it out
    with banded(pool_factory(kind, 64)) as cache:
        slot = filled(cache, 4 * UNIT)
        cache.swap_out(slot)
        cache.wait(slot)
        other = filled(cache, 6 * UNIT)
        lengths = lengths_with(cache, slot, 4 * UNIT)
        assert not cache.fits(lengths, bands=[0]) and not cache.swap_in(slot)
        cache.free(other)
        lengths[other] = 0
        assert cache.fits(lengths, bands=[0]) and cache.swap_in(slot)
    with banded(pool_factory(kind, 16)) as cache:
        slot = filled(cache, 1)
        assert to(cache, slot, 4 * UNIT, [0])
        cache.swap_out(slot, bands=[0])
        cache.wait(slot)
        assert to(cache, cache.alloc(), UNIT, [1, 2])
        # The slot's own length is shorter than what the band comes back with.
        assert not cache.fits(lengths_with(cache, slot, 1), bands=[0]) and not cache.swap_in(slot, bands=[0])


def test_bands_are_neighbouring_layers(pool_factory):
    with make_cache(pool_factory("host", 100), "layers", **LAYERS | {"num_layers": 7}, bands=3) as cache:
        assert cache.bands == [range(2), range(2, 4), range(4, 7)]
    with make_cache(
        pool_factory("host", 100), "layers", **LAYERS | {"num_layers": 7}, bands=2, layer_group=2
    ) as cache:
        assert cache.bands == [range(4), range(4, 7)]


def test_attention_over_a_band(cache):
    """A shim takes what the band has: more than the slot's length, or nothing while it is away."""
    from vtensor.integrations.sdpa import scaled_dot_product_attention as attend

    slot = filled(cache, 20)
    assert to(cache, slot, 24, [0])
    write(cache, slot, 20, range(20, 24), cache.bands[0])
    cache.swap_out(slot, bands=[3])
    q = torch.randn(1, 2, 1, 32)

    def keys(layer: int, length: int):
        return [side[slot : slot + 1, :length].transpose(1, 2) for side in cache[layer]]

    assert attend(q, *keys(0, 24)).isfinite().all()
    with pytest.raises(vtensor.InvalidArgument, match="slot"):
        attend(q, *keys(1, 24))
    with pytest.raises(vtensor.InvalidArgument, match="slot"):
        attend(q, *keys(3, 20))

"""The mapper: what is prepared, looked ahead to, overtaken, given back and refused (I4, I8, I10, I15)."""

from __future__ import annotations

import errno
import itertools
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import vtensor
from support import (
    PER_PAGE,
    calls,
    calls_since,
    check_sums,
    eventually,
    filled,
    mapper_calls,
    quarter,
    simcuda_disarm,
    sometimes,
)
from vtensor import testing

PAGE = 4096
# What is mapped ahead is a share of what is stored, or so many pages (I4).
LEAST = 256  # pages: 1 MiB
SHARE = 16


@pytest.fixture
def ahead(pool_factory):
    """1,200 host pages; each tensor may have 16 pages ahead."""
    return pool_factory("host", pages=1200, prefetch=16 * PAGE, cache=0)


def ones(t, n, value=1):
    return torch.full((*t.shape[: t.grow_dim], n, *t.shape[t.grow_dim + 1 :]), value, dtype=t.dtype)


# --- prepare ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(), (3,)])
def test_what_was_prepared_costs_the_caller_no_driver_call(host, rows):
    t = filled(host, 2, 9, rows=rows)
    assert t.prepare(18) is t
    host.wait_idle()
    rows = max(1, t.shape[0] if t.grow_dim else 1)
    stats = check_sums(host)
    assert (stats.pages_active, stats.pages_prefetched) == (rows, 4 * rows)  # 20 quarters are 5 pages
    before, by_mapper = calls(host), mapper_calls(host)
    assert by_mapper["mmap"] >= 1 and by_mapper["madvise"] >= 1  # mapped and populated there
    for n in (5, 1, 12):
        t.extend(n)
    t.append(ones(t, 0))
    assert calls_since(host, before) == {} and mapper_calls(host) == by_mapper
    assert check_sums(host).pages_prefetched == 0 and host.stats().growths_ready == 2
    assert t.narrow(t.grow_dim, 0, 2).eq(9).all() and not t.narrow(t.grow_dim, 2, 18).any()


@pytest.mark.alone
def test_prepare_returns_before_the_pages_are_there(pool_factory):
    pool = pool_factory("host", pages=8192)
    t = quarter(pool, capacity=4 * 8192)
    began = time.perf_counter()
    t.prepare(4 * 8000)
    asked = time.perf_counter() - began
    pool.wait_idle(20)
    assert asked < (time.perf_counter() - began) / 2
    assert pool.stats().pages_prefetched == 8000


def test_more_than_the_budget_is_prepared_as_far_as_it_goes(host):
    t = filled(host, 1, capacity=1000)
    t.prepare(999)
    host.wait_idle()
    stats = check_sums(host)
    assert stats.pages_used == 64 == stats.pages_active + stats.pages_prefetched
    t.extend(63 * PER_PAGE)  # what is there
    with pytest.raises(vtensor.OutOfPages):
        t.extend(PER_PAGE)
    assert t.length == 63 * PER_PAGE + 1


# --- looking ahead ----------------------------------------------------------------------------------------


def test_a_long_append_loop_makes_no_driver_call(ahead):
    """I15: 4,096 steps cross 1,024 pages; where the mapper has time, the calls are its."""
    t = quarter(ahead, capacity=4096)
    x = ones(t, 1)
    for _ in range(2 * PER_PAGE + 1):
        t.append(x)
    ahead.wait_idle()
    before = calls(ahead)
    for step in range(2 * PER_PAGE + 1, 4096):
        x.fill_(step % 251)
        t.append(x)
        ahead.wait_idle()
    assert calls_since(ahead, before) == {}
    assert mapper_calls(ahead)["mmap"] > 10
    stats = check_sums(ahead)
    assert stats.pages_active == 1024 and stats.growths_mapped <= 3
    assert stats.growths_ready >= 1020
    expected = (torch.arange(2 * PER_PAGE + 1, 4096) % 251).to(torch.uint8)
    assert t[2 * PER_PAGE + 1 :].eq(expected[:, None]).all() and t[: 2 * PER_PAGE + 1].eq(1).all()


@pytest.mark.parametrize("rows", [(), (3,), (7,), (20,)])
def test_the_bound_in_bytes_holds(ahead, rows):
    """16 pages a tensor, in whole slots of all its rows."""
    t = quarter(ahead, rows=rows, capacity=160)
    count = max(1, torch.Size(rows).numel())
    most = 0
    for _ in range(40):
        t.append(ones(t, 4))
        most = max(most, check_sums(ahead).pages_prefetched)
        if _ % 5 == 0:
            ahead.wait_idle()
            most = max(most, check_sums(ahead).pages_prefetched)
    assert most <= 16 // count * count
    assert most > 0 or count > 16


def test_look_ahead_follows_what_the_calls_ask_for(ahead):
    """One more call like the last ones; a prompt says nothing of the steps after it."""
    t = quarter(ahead, 40 * PER_PAGE, capacity=800)
    ahead.wait_idle()
    assert ahead.stats().pages_prefetched == 0
    t.extend(2 * PER_PAGE)
    ahead.wait_idle()
    assert 2 <= ahead.stats().pages_prefetched <= 16


def test_the_mapper_is_woken_for_twice_what_must_be_ready(ahead):
    """A slow growth has four positions ready; the mapper is woken where there are fewer, and makes eight."""
    pages = 12
    t = quarter(ahead, 1, capacity=800)
    with vtensor.trace.record() as recording:
        for _ in range(pages * PER_PAGE):
            time.sleep(0.042)  # less than four positions within the farthest horizon
            t.extend(1)
            ahead.wait_idle()
            stats = check_sums(ahead)
            ready = (stats.pages_active + stats.pages_prefetched) * PER_PAGE - t.length
            assert t.length == 2 or 4 <= ready < 8 + PER_PAGE
    batches = [e for e in recording.events() if (e.role, e.what) == ("mapper", "map")]
    assert pages // 2 <= len(batches) <= pages // 2 + 2


@pytest.mark.alone
def test_a_mapper_that_may_not_look_far_is_not_woken_for_each_page():
    page, pages, most = 64 << 10, 400, 32
    with vtensor.Pool("cpu", page_size=page, prefetch=most * page) as pool:
        t = vtensor.empty(0, page // 4, grow_dim=0, capacity=4 * pages, dtype=torch.uint8, pool=pool)
        with vtensor.trace.record() as recording:
            for _ in range(4 * pages):
                until = time.perf_counter() + 0.0002  # in 40 ms grow 50 pages
                while time.perf_counter() < until:
                    pass
                t.extend(1)
                assert pool.stats().pages_prefetched <= most
        maps = [e for e in recording.events() if (e.role, e.what) == ("mapper", "map")]
    assert len(maps) < pages / 4


def test_tensors_that_want_pages_are_served_in_turn():
    """So no tensor waits for its first page until another has its second."""
    large = 1 << 20  # bytes: a step of the mapper, or several

    def both_wait() -> bool:
        with vtensor.Pool("cpu", page_size=large) as pool:
            both = [
                vtensor.empty(0, grow_dim=0, capacity=64 * large, dtype=torch.uint8, pool=pool) for _ in "kv"
            ]
            with vtensor.trace.record() as recording:
                for t in both:
                    t.prepare(32 * large)
                pool.wait_idle(30)
            served = [e.tensor for e in recording.events() if (e.role, e.what) == ("mapper", "map")]
            first = served.index(both[1].address)
            assert len(served) == 64
            # From the moment that both are known.
            assert all(a != b for a, b in itertools.pairwise(served[first - 1 : first + 2 * (32 - first)]))
            return first < 24

    assert sometimes(both_wait)


def test_a_refused_mapper_tries_again_and_less_and_less_often(sim, stream_pool):
    pool = stream_pool(prefetch=16 * PAGE, device_reserve=PAGE)
    t = quarter(pool, 1, capacity=400)
    pool.wait_idle()
    before = sim.calls("cuMemGetInfo")
    sim.fail("cuMemGetInfo", 0, 1_000_000)
    t.prepare(PER_PAGE)
    time.sleep(0.5)
    eventually(lambda: sim.calls("cuMemGetInfo") - before >= 2)
    tries = sim.calls("cuMemGetInfo") - before
    simcuda_disarm()
    assert tries < 40
    eventually(lambda: pool.stats().pages_prefetched == 1)


def mappers() -> set[Path]:
    """The mappers of this process. One that has ended is still among them for a moment."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if (task / "comm").read_text() == "vtensor-mapper\n":
                found.add(task)
    return found


def sleeps_of_mappers() -> int:
    """How often the mappers of this process went to sleep so far."""
    total = 0
    for mapper in mappers():
        with suppress(OSError):  # it ends just now
            status = (mapper / "status").read_text()
            total += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


def test_where_nothing_is_left_the_mapper_is_not_woken(pool_factory):
    pool = pool_factory("host", pages=12, prefetch=16 * PAGE, cache=0)
    t = vtensor.empty(0, 8, grow_dim=0, capacity=13 * 512, dtype=torch.uint8, pool=pool)
    t.extend(11 * 512)
    t.extend(8)
    pool.wait_idle()
    assert pool.stats().pages_free == 0
    before = sleeps_of_mappers()
    for _ in range(400):
        t.extend(1)
    assert sleeps_of_mappers() - before < 40


def test_a_shrink_that_is_taken_back_costs_the_caller_no_driver_call(ahead):
    t = quarter(ahead, capacity=400)
    for _ in range(8):
        t.extend(2 * PER_PAGE)
    t.fill_(5)
    ahead.wait_idle()
    before = calls(ahead)
    for _ in range(10):
        t.shrink(2 * PER_PAGE)
        t.extend(2 * PER_PAGE)
    assert calls_since(ahead, before) == {}
    assert t.eq(5).all()  # its own bytes


def test_pages_are_given_back_by_the_mapper(ahead):
    t = filled(ahead, 100 * PER_PAGE, capacity=800)
    view = t[:PER_PAGE]
    before = calls(ahead)
    t.shrink(90 * PER_PAGE, front=True)
    assert check_sums(ahead).pages_pinned == 90  # by the view's generation
    view = None
    eventually(lambda: ahead.stats().pages_mapped == 10)
    assert calls_since(ahead, before) == {} and mapper_calls(ahead)["munmap"] >= 1
    assert view is None and t.eq(1).all()


def test_growth_as_fast_as_memory_allows(pool_factory):
    pool = pool_factory("host", 16384, prefetch=64 << 20)
    tensors = [
        vtensor.empty(0, PAGE, grow_dim=0, capacity=8192, dtype=torch.uint8, pool=pool) for _ in range(2)
    ]
    rows = torch.ones(64, PAGE, dtype=torch.uint8)
    most = 0
    for _ in range(100):
        for t in tensors:
            t.append(rows)
            assert t.nbytes_mapped // PAGE <= t.length + max(LEAST, t.length // SHARE)
        most = max(most, pool.stats().pages_prefetched)
    assert most > 0
    stored = sum(t.length for t in tensors)
    assert pool.stats().pages_prefetched <= max(2 * LEAST, stored // SHARE)


def test_a_large_tensor_gets_its_share(pool_factory):
    """More than the least: its growth is fast, and a sixteenth of it is."""
    pool = pool_factory("host", 40000, prefetch=64 << 20)
    t = vtensor.empty(0, PAGE, grow_dim=0, capacity=20000, dtype=torch.uint8, pool=pool)
    rows = torch.ones(2000, PAGE, dtype=torch.uint8)
    for _ in range(8):
        t.append(rows)
    eventually(lambda: pool.stats().pages_prefetched > LEAST)
    assert pool.stats().pages_prefetched <= t.length // SHARE


# --- errors (I10) -----------------------------------------------------------------------------------------


def raised_by(t, seconds=10.0):
    """The error that some operation of `t` raises; one that makes no driver call is tried till then."""

    def attempt():
        try:
            t.extend(0)
        except vtensor.DriverError as error:
            return error

    return eventually(attempt, seconds)


@pytest.mark.parametrize("skip", [0, 1])  # the mapping, the populating
def test_what_the_mapper_met_is_raised_once_by_the_tensor_it_worked_for(host, skip):
    t, other = filled(host, 2, 3), filled(host, 2, 4)
    with testing.fail_after(host, skip, 1):
        t.prepare(20)
        eventually(lambda: mapper_calls(host).get("mmap", 0) + mapper_calls(host).get("madvise", 0) > skip)
        other.extend(0)
        error = raised_by(t)
    assert error.call == ("mmap", "madvise")[skip]
    assert (error.code, error.name) == (errno.ENOMEM, "ENOMEM") and "refused" in str(error)
    host.wait_idle()
    stats = check_sums(host)
    assert stats.pages_mapped == stats.pages_active == 2  # I8
    t.extend(0)
    t.extend(20)  # usable
    assert t[:2].eq(3).all() and not t[2:].any() and other.eq(4).all()
    host.wait_idle()


def test_a_refused_unmap_stays_held_and_is_raised_by_wait_idle(ahead):
    t = filled(ahead, 20 * PER_PAGE, capacity=400)
    with testing.fail_after(ahead, 0, 1000):
        t.shrink(10 * PER_PAGE)
        eventually(lambda: mapper_calls(ahead).get("munmap"))
        with pytest.raises(vtensor.DriverError) as refused:
            ahead.wait_idle()
        stats = check_sums(ahead)
        assert stats.pages_mapped == 20 == stats.pages_active + stats.pages_pinned + stats.pages_prefetched
    assert refused.value.call == "munmap"
    t.extend(4 * PER_PAGE)
    assert t.eq(1).all()
    ahead.wait_idle()
    assert check_sums(ahead).pages_pinned == 0


# --- threads ----------------------------------------------------------------------------------------------


def test_one_thread_a_pool_that_ends_with_it(pool_factory):
    before = mappers()

    def made() -> int:
        return len(mappers() - before)

    pool = pool_factory("host", prefetch=16 * PAGE)
    eventually(lambda: made() == 1)
    t = quarter(pool)
    t.prepare(8)
    t.extend(8)
    pool.close()
    eventually(lambda: made() == 0)
    quiet = pool_factory("host")  # prefetch=0: no mapper before the first prepare()
    u = quarter(quiet, 8).truncate(0)  # the caller's own calls
    assert made() == 0
    u.prepare(8)
    eventually(lambda: made() == 1)

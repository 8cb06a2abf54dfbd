"""A broken pool: replaced pages could not be put back (I8). Every operation says so, every wait ends, what
was mapped stays readable and counted, other pools go on, and the pool's end gives everything back."""

from __future__ import annotations

import contextlib
import os
import re
import time

import pytest
import torch

import vtensor
from kv_support import filled as filled_slot
from kv_support import make_cache, options_of
from operations import NAMES, OPERATIONS
from support import (
    beside,
    calls,
    calls_since,
    check_sums,
    eventually,
    filled,
    memfds,
    quarter,
    run_snippet,
    simcuda_control,
    simcuda_disarm,
    sometimes,
)
from vtensor import testing

ROWS = 2


def to_break(pool):
    """Tensors whose pages a refused operation of `breaks` leaves replaced in part."""
    t = quarter(pool, 9, rows=(ROWS,))
    t[0].fill_(1)
    t[1].fill_(2)
    return t, t.fork()


def breaks(pool, tensors):
    """Breaks the pool: some page is replaced, and then every replacement is refused, the undoing's too."""
    for skip in range(100):
        if pool.device.type == "cpu":
            refused, operate = testing.fail_after(pool, skip, 1_000_000), lambda: tensors[1].reindex([1, 0])
        else:
            refused, operate = no_more_maps(skip), lambda: tensors[1].unshare(0, 9)
        with refused, contextlib.suppress(vtensor.DriverError):
            operate()
        if pool.broken is not None:
            return
    raise AssertionError("no refusal broke the pool")


@contextlib.contextmanager
def no_more_maps(skip):
    assert simcuda_control().simcuda_fail(b"cuMemMap", skip, 1_000_000, 999) == 0
    yield
    simcuda_disarm()


# What reads no page, or ends what it is done to.
ANSWERED = re.compile(
    r"close|pages\(|stats|mapped|length|holds|whole|begin_step|tensor$|cache\[0\]|vtensor.(zeros|default_|Pool)"
)


def test_every_operation_raises_the_first_cause(pool_factory, kind):
    pool = pool_factory(kind)
    t, tensors = filled(pool, 5, 7, rows=(2,), when_full="move"), to_break(pool)
    shared, view = t.fork(), t[:, 1:3]
    cache, arena = make_cache(pool, max_batch=2), vtensor.Arena(1 << 16, pool=pool)
    slot, blocks = filled_slot(cache, 20), vtensor.Blocks(arena, 16, [(0, 4096, 4096)])
    blocks.hold([0])
    breaks(pool, tensors)
    assert "could not be undone" in pool.broken and "broken" in repr(pool)
    names = NAMES | {"t": t, "shared": shared, "cache": cache, "slot": slot, "arena": arena, "blocks": blocks}
    names |= {"pool": pool, "x": torch.zeros(2, 1, 1024, dtype=torch.uint8), "kv": torch.zeros(2, 1, 2, 32)}
    names["shape"] = options_of("layers")
    before = check_sums(pool)
    for code in ("t.extend(20)", *(code for code in OPERATIONS if not ANSWERED.search(code))):
        with pytest.raises(vtensor.DriverError) as raised:
            eval(code, names)
        assert str(raised.value) == pool.broken, code
        assert raised.value.call in ("mmap", "cuMemMap") and raised.value.code != 0
        del raised  # its traceback keeps what it went through alive
        assert t.length == 5 and t.eq(7).all() and view.eq(7).all(), code
        assert cache.lengths == [20, 0] and blocks.mapped == 1, code
    after = check_sums(pool)
    testing.check_invariants(pool)
    assert (after.pages_used, after.pages_mapped) == (before.pages_used, before.pages_mapped)
    assert after.tensors == before.tensors
    assert after.driver_calls["mapper"] == before.driver_calls["mapper"]
    pool.close()


def test_leaks_are_found_beside_it(pool_factory, kind):
    pool, other = pool_factory(kind), pool_factory(kind)
    beside, tensors = filled(pool, 5, 7), to_break(pool)
    view = beside[1:3]
    breaks(pool, tensors)
    for end in (lambda: None, pool.close):
        end()
        with testing.assert_no_leaks():
            filled(other, 3).close()
        with pytest.raises(AssertionError, match="1 tensors"), testing.assert_no_leaks():
            t = filled(other, 3)
        t.close()
    assert view.eq(7).all()


def test_what_is_closed_stays_counted_and_goes_with_the_last_view(pool_factory, kind):
    descriptors = memfds()
    pool = pool_factory(kind)
    beside, tensors = filled(pool, 5, 7), to_break(pool)
    view = beside[1:3]
    breaks(pool, tensors)
    used, mapped = pool.stats().pages_used, pool.stats().pages_mapped
    for t in (beside, *tensors):
        t.close()
    stats = check_sums(pool)
    assert (stats.pages_used, stats.pages_mapped, stats.tensors) == (used, mapped, 0)
    assert stats.pages_pinned == stats.pages_orphaned == mapped
    pool.close()
    assert pool.broken is not None and view.eq(7).all()
    assert pool.stats().pages_used == used  # of the budget, as long as the driver lives
    pool.close()
    del view, t, beside, tensors
    eventually(lambda: pool.stats().pages_used == 0 and memfds() == descriptors)


def test_the_mapper_rests(pool_factory, kind):
    """Of a pool that looks ahead: it neither maps what is wanted nor unmaps what was given back."""
    pool = pool_factory(kind, prefetch=1 << 18, cache=1 << 18)
    beside, tensors = filled(pool, 9, 7), to_break(pool)
    freed = filled(pool, 20, capacity=30)
    pool.wait_idle()
    breaks(pool, tensors)
    freed.close()
    beside[:1].clone()

    def rests() -> bool:
        made = pool.stats().driver_calls["mapper"]
        time.sleep(0.6)  # longer than a refused unmapping waits
        return pool.stats().driver_calls["mapper"] == made

    assert sometimes(rests, 2)  # it may have been at work
    check_sums(pool)
    assert beside.eq(7).all()
    pool.close()


def test_every_wait_ends(pool_factory, sim):
    """Of threads that wait for pages on their way out, behind a stream that is held."""
    pool = pool_factory("simcuda", pages=32, patience=60)
    stream = sim.stream()
    tensors = to_break(pool)
    used = filled(pool, 40)
    sim.hold(stream)
    sim.kernel(stream, used)
    used.record_stream(stream)
    used.close()  # its pages wait for the stream
    growing = quarter(pool, 1, capacity=200)  # in need of more than is free
    waits = [beside(pool.wait_idle, 60), beside(growing.extend, 80)]
    time.sleep(0.05)
    breaks(pool, tensors)
    raised = [wait.exception(30) for wait in waits]
    sim.release(stream)
    assert all(isinstance(error, vtensor.DriverError) for error in raised)
    assert {str(error) for error in raised} == {pool.broken}  # at once: else they would go on for longer
    pool.close()


def test_other_pools_of_a_shared_budget_are_answered(pool_factory, kind):
    name = f"broken-{kind}-{os.getpid()}"
    pool = pool_factory(kind, pages=32, shared_budget=name)
    other = pool_factory(kind, pages=32, shared_budget=name)
    tensors = to_break(pool)
    filled(pool, 20).close()  # pages that it could give up if it were whole
    breaks(pool, tensors)
    held = pool.stats().nbytes_held
    t = quarter(other, capacity=200)

    def answered() -> bool:
        began = time.monotonic()
        with pytest.raises(vtensor.OutOfPages):
            t.extend(32 * 4)
        return time.monotonic() - began < 0.9  # a pool that says nothing is waited for 1 s

    assert sometimes(answered)
    assert other.stats().nbytes_held_by_others == pool.stats().nbytes_held == held
    t.extend(4 * (32 - held // pool.page_size))
    del tensors
    pool.close()
    eventually(lambda: other.stats().nbytes_held_by_others == 0)
    t.extend(4 * held // pool.page_size)
    t.close()


@pytest.mark.parametrize(
    "end", ["first.close(); assert t.closed", "breaks(first, to_break(first)); assert not t.any()"]
)
def test_the_default_pool_is_made_anew(end):
    """Also where it was closed."""
    run_snippet(
        f"""
        from test_broken_pool import breaks, to_break
        first = vtensor.default_pool()
        t = vtensor.zeros(3, 8, grow_dim=0, capacity=10)
        {end}
        second = vtensor.default_pool()
        assert second is not first and second is vtensor.default_pool() and second.broken is None
        u = vtensor.zeros(3, 8, grow_dim=0, capacity=10)
        assert t.pool is first and u.pool is second and not u.any()
        """
    ).check()


def asleep(pool):
    pool.sleep(contents="host")


@pytest.mark.parametrize(
    ("begin", "operate"),
    [(lambda pool: None, asleep), (asleep, lambda pool: pool.wake())],
    ids=["sleep", "wake"],
)
def test_a_sleep_that_cannot_be_undone(pool_factory, kind, begin, operate):
    """Each driver call and all after it refused: some break the pool; else all is as before, and works."""
    broke = 0
    for skip in range(400):
        pool = pool_factory(kind)
        t = filled(pool, 8, 3)
        fork = t.fork()
        begin(pool)
        before = sum(pool.stats().driver_calls["caller"].values())
        with testing.fail_after(pool, skip, 1_000_000):
            try:
                operate(pool)
            except (vtensor.DriverError, vtensor.TimedOut):
                failed = True
            else:
                failed = False
        testing.check_invariants(pool)
        reached = sum(check_sums(pool).driver_calls["caller"].values()) - before > skip
        if pool.broken is None:
            if failed:
                operate(pool)
            pool.wake()
            assert t.eq(3).all() and fork.eq(3).all()
        else:
            broke += 1
            for code in ("t.extend(20)", "pool.wake()", "asleep(pool)"):
                made = calls(pool)
                with pytest.raises(vtensor.DriverError, match="broken"):
                    eval(code)
                assert not calls_since(pool, made).keys() & {"mmap", "cuMemMap"}, code
        t.close()
        fork.close()
        pool.close()
        del t, fork
        assert pool.stats().pages_used == 0
        if not reached:
            assert broke
            return
    raise AssertionError("400 driver calls")

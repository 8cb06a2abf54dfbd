"""Every operation, with every driver call that it makes refused in turn (I8), and its undoing too."""

from __future__ import annotations

import contextlib
import traceback

import pytest

import vtensor
from scenes import OPERATIONS, PAGE, TABLE, Tensors, prepared
from support import (
    SHAPE_OF_A_MESSAGE,
    every,
    filled,
    open_pool,
    quarter,
    run_snippet,
    same_bytes,
)
from vtensor import testing


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [0, 8 * PAGE], ids=["caller", "worker"])
@pytest.mark.parametrize("name", TABLE)
def test_one_refused_call(pool_factory, kind, name, ahead):
    refuse_each(pool_factory, kind, name, ahead)


def refuse_each(pool_factory, kind, name, ahead, **options):
    """With the n-th call refused, of either thread: an error and nothing changed, or done all the same.
    Returns the calls that were refused."""
    make, run = TABLE[name]
    calls = set()
    step = 1 if make is Tensors and not ahead else every(3 if ahead and kind == "simcuda" else 1)
    for n in (*range(0, 60, step), *range(60, 5000, 13 * step)):
        pool = pool_factory(kind, pages=make.PAGES, prefetch=ahead, **options)
        scene = make(pool)
        scene.exact = not ahead
        before, error = scene.state(), None
        with testing.fail_after(pool, n) as refused:
            try:
                run(scene)
            except (vtensor.DriverError, vtensor.OutOfPages) as caught:
                error = str(caught)
        assert pool.broken is None
        testing.check_invariants(pool)
        if error is not None:
            assert SHAPE_OF_A_MESSAGE.match(error), error
            assert scene.state() == before, (n, error)  # I8
            scene.check()
            run(scene)  # the next call works
        with contextlib.suppress(vtensor.DriverError) if ahead else contextlib.nullcontext():
            pool.wait_idle()  # what the worker met is raised once
        pool.wait_idle()
        testing.check_invariants(pool)
        stats = pool.stats()
        assert stats.pages_pinned == 0  # I4
        assert stats.pages_recycled < 2**32 and stats.pages_fresh < 2**32  # nor did they pass 0
        assert ahead or stats.pages_mapped == sum(
            (stats.pages_active, stats.pages_prefetched, stats.pages_cached)
        )
        scene.end(name)
        pool.close()
        assert pool.stats().pages_used == 0
        if not refused:
            return calls
        calls |= refused.calls.keys()
    raise AssertionError("more than 5000 driver calls")


def undo_refused(kind, name, refuse):
    """The body of the test below, for one operation. Returns how often the pool broke."""
    broken = 0
    for n in range(200):
        pool = open_pool(kind, 80)
        beside = filled(pool, 3, 7)
        tensors = prepared(pool)
        before = [(t.length, t.clone()) for t in tensors]
        calls_before = sum(pool.stats().driver_calls["caller"].values())
        failed = False
        with testing.fail_after(pool, n, refuse):
            try:
                OPERATIONS[name](pool, *tensors)
            except vtensor.VTensorError:
                failed = True
        stats = pool.stats()
        reached = sum(stats.driver_calls["caller"].values()) - calls_before > n
        assert stats.pages_used + stats.pages_free == 80  # I5
        assert stats.pages_mapped == stats.pages_active + stats.pages_pinned  # I4
        testing.check_invariants(pool)
        if failed:
            assert all(not t.closed for t in tensors)
        if failed and pool.broken is None:
            for t, (length, data) in zip(tensors, before, strict=True):
                assert t.length == length and same_bytes(t, data), n
            OPERATIONS[name](pool, *tensors)  # now it works
        if pool.broken is None:
            fresh = quarter(pool, 12)
            assert not fresh.any()  # I7
            fresh.close()
        else:
            broken += 1
            with pytest.raises(vtensor.DriverError, match="broken"):
                quarter(pool, 12)
        assert beside.eq(7).all()
        for t in (*tensors, beside):
            t.close()
        if pool.broken is None:
            pool.wait_idle()
            stats = pool.stats()
            assert stats.pages_used == stats.pages_mapped == 0
        assert pool.stats().tensors == 0
        pool.close()
        del t, beside, tensors
        stats = pool.stats()  # of the end: all memory goes with the last view (I14)
        assert stats.pages_used == stats.pages_mapped == stats.nbytes_reserved == 0
        if not reached:
            break
    return broken


def undo_each(kind, refuse):
    """Likewise for every operation. Prints what came of it."""
    for name in OPERATIONS:
        print(name, end=": ", flush=True)
        try:
            print(undo_refused(kind, name, refuse), flush=True)
        except BaseException as error:
            print(type(error).__name__)
            traceback.print_exc()


PARTS = {"append_shared", "extend_shared", "fill_shared", "unshare"}  # these replace pages by copies


@pytest.mark.parametrize("refuse", [2, 1000])
def test_undoing_refused_too(kind, refuse):
    """Pages that came and cannot go stay mapped, and go later. If replaced pages cannot be put back, the pool
    is broken: what it had stays readable, counted and closable, and all goes at its end. In a process of
    its own: what is wrong here is a read of unmapped memory."""
    code = f"from test_failing_calls import undo_each\nundo_each({kind!r}, {refuse})"
    finished = run_snippet(code, timeout=100)
    assert finished.code == 0, f"exit code {finished.code} after {finished.out}{finished.err}"
    said = dict(line.split(": ") for line in finished.out.splitlines())
    assert list(said) == list(OPERATIONS) and all(map(str.isdigit, said.values())), (said, finished.err)
    broke = {name for name, times in said.items() if int(times)}
    assert broke <= PARTS
    if kind == "simcuda":
        assert {"unshare", "append_shared"} <= broke

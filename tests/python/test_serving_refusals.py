"""One refusal at every call in turn, over runs that admit, share, fork, swap, preempt and fail: each request
ends once, as it would have, and nothing is left (I8, I9)."""

from __future__ import annotations

from itertools import count

import pytest

from serving_support import GROUPS, LEAVING, SINGLES, SLOTS, alone, eager, engine_over, opened
from support import all_calls, every
from vtensor import DriverError, NoFreeSlot, OutOfPages, TimedOut, VTensorError
from vtensor.serving import Request, Status
from vtensor.testing import fail_after

REFUSALS = (VTensorError, MemoryError)
MIXES = {"groups": GROUPS, "singles": SINGLES, "leaving": LEAVING}  # the last with promises
FEWEST_MET = {"groups": 20, "singles": 20, "leaving": 4}
CALLS = ("alloc", "step", "free", "fork", "reorder", "publish", "swap_out", "swap_in", "length")


def engine_of(mix: str, cache):
    ticks = count()
    promised = {"promises": eager(), "clock": lambda: next(ticks) * 0.01} if mix == "leaving" else {}
    return engine_over(cache, token_budget=16, **promised)


def serve(engine, requests) -> list[BaseException]:
    """Runs requests to their ends, through refusals, which it returns."""
    refusals, ends = [], []
    for request in requests:
        engine.submit(request)
    for _ in range(400):
        try:
            ends += engine.step()
        except REFUSALS as error:
            refusals.append(error)
            assert len(refusals) < 20, "the same refusal again and again"
            engine.forward.store.check()
        if not engine.scheduler.unfinished:
            break
    assert sorted(end.id for end in ends) == sorted(request.id for request in requests)
    for request in requests:
        (end,) = (end for end in ends if end.id == request.id)
        if request.id == "never":
            assert "larger budget" in end.error
        else:
            assert end.tokens == alone(request) and not end.error
    assert engine.scheduler.cache.stats().slots_free == SLOTS
    engine.forward.store.check()
    return refusals


class Refusing:
    """A cache one call of which is refused."""

    def __init__(self, cache, call: int, error: BaseException | None) -> None:
        self._cache, self._call, self._error = cache, call, error
        self.calls = 0

    def __getattr__(self, name):
        value = getattr(self._cache, name)
        if name not in CALLS:
            return value

        def call(*args, **kw):
            self.calls += 1
            if self.calls == self._call:
                raise self._error
            return value(*args, **kw)

        return call


def give(scheduler, cache) -> None:
    """Puts another cache, or one that wraps it, in the place of a scheduler's."""
    scheduler.cache = scheduler._books.cache = cache


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", [DriverError, OutOfPages, NoFreeSlot, TimedOut, MemoryError])
def test_any_error_of_any_call_of_the_cache(mix, kind):
    budget, requests = MIXES[mix]

    def run(call):
        with opened("host", budget, SLOTS) as cache:
            engine = engine_of(mix, cache)
            refusing = Refusing(cache, call, kind("refused"))
            give(engine.scheduler, refusing)
            return refusing.calls, serve(engine, requests), refusing.calls

    calls = run(0)[2]
    met = sum(bool(run(call)[1]) for call in range(1, calls + 1))
    assert met > calls // (6 if mix == "leaving" else 2)


def run_with_refusal(kind, mix, call):
    """Serves with one driver call refused; returns how many there were, and the refusals that came out."""
    budget, requests = MIXES[mix]
    with opened(kind, budget, SLOTS) as cache:
        engine = engine_of(mix, cache)
        before = all_calls(cache.pool)
        with fail_after(cache.pool, call):
            refusals = serve(engine, requests)
        return all_calls(cache.pool) - before, refusals


@pytest.mark.thorough
@pytest.mark.parametrize("mix", MIXES)
def test_any_refused_driver_call(kind, mix):
    calls, none = run_with_refusal(kind, mix, 1 << 30)
    assert not none
    met = 0
    for call in range(0, calls, every(1 if kind == "host" else 7)):  # CUDA's runs make ten times as many
        try:
            met += bool(run_with_refusal(kind, mix, call)[1])
        except BaseException as error:
            error.add_note(f"driver call {call} was refused")
            raise
    assert met > FEWEST_MET[mix] // every(1)


class Full:
    """A cache without memory for what is shared, where the system does not say which pages the kernel copied:
    none to publish, and to fork only while no more slots than ``forks_beside`` are in use."""

    def __init__(self, cache, forks_beside: int) -> None:
        self._cache, self._forks_beside = cache, forks_beside

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def publish(self, slot, tokens, *, salt=""):
        raise OutOfPages("refused")

    def fork(self, slot, n=1):
        if self._cache.stats().slots_used > self._forks_beside:
            raise OutOfPages("refused")
        return self._cache.fork(slot, n)


@pytest.mark.parametrize("promises", [None, eager()])
@pytest.mark.parametrize("forks_beside", [0, 1])
def test_memory_that_sharing_lacks_is_that_of_the_latest(promises, forks_beside):
    early, group, late = (
        Request("early", [1] * 6, 3),
        Request("group", [0] * 6, 6, samples=2),
        Request("late", [2] * 6, 9),
    )
    for requests in ([early, group, late], [early, late, group]):
        with opened("host", 60, SLOTS) as cache:
            engine = engine_over(cache, promises=promises)
            give(engine.scheduler, Full(cache, forks_beside))
            done = engine.run(requests)
            for request in (early, late, *[group] * forks_beside):
                assert done[request.id].tokens == alone(request) and not done[request.id].error
            assert forks_beside or "larger budget" in done["group"].error
            assert cache.stats().slots_free == SLOTS


@pytest.mark.parametrize("error", [DriverError, TimedOut])
@pytest.mark.parametrize("status", [Status.WAITING, Status.RUNNING, Status.SWAPPED])
def test_a_cancel_that_is_refused_can_be_called_again(error, status):
    first, group = Request("first", [1] * 14, 30), Request("group", [0] * 6, 14, samples=3)
    for call in range(1, 4):
        with opened("host", 30, SLOTS) as cache:
            engine = engine_over(cache)
            engine.submit(first)
            engine.submit(group)
            held = engine.scheduler.waiting[1]
            while held.status is not status:
                engine.step()
            give(engine.scheduler, Refusing(cache, call, error("refused")))
            refused = 0
            while held.status is not Status.CANCELLED:
                try:
                    engine.scheduler.cancel("group")
                except error:
                    refused += 1
                    assert engine.scheduler.unfinished == 2
            assert refused == (call <= {Status.WAITING: 0, Status.RUNNING: 1, Status.SWAPPED: 3}[status])
            give(engine.scheduler, cache)
            done = engine.run()
            assert set(done) == {"first", "group"} and done["first"].tokens == alone(first)
            assert done["group"].error == "cancelled"
            assert cache.stats().slots_free == SLOTS


def test_the_running_go_on_where_the_cache_has_lost_slots():
    """A cache that could not undo a refused call has fewer slots than it was made with."""
    with opened("host", 200, SLOTS) as cache:
        lost = cache.alloc()
        engine = engine_over(cache)
        requests = [Request(i, [i] * 6, 4) for i in range(6)]
        done = engine.run(requests)
        assert all(done[request.id].tokens == alone(request) for request in requests)
        cache.free(lost)

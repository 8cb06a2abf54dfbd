"""Exceptions from outside, before every bytecode of the scheduler and the engine (I17): no request, token or
slot is lost, and none is there twice."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from itertools import count

import pytest

import vtensor.serving
from interrupts import at_every_bytecode, moment, place
from serving_support import (
    GROUPS,
    LEAVING,
    SINGLES,
    SLOTS,
    alone,
    check_books,
    choose,
    eager,
    engine_over,
    opened,
)
from support import every
from vtensor import InvalidArgument
from vtensor.serving import Request, Status
from vtensor.serving.engine import _completion


class Run:
    """An engine on its way, and the ends that it has returned."""

    def __init__(self, budget: int, requests: list[Request], steps: int = 0, promised: bool = False) -> None:
        self.requests = requests
        self.resources = ExitStack()
        self.cache = self.resources.enter_context(opened("host", budget, SLOTS))
        ticks = count()
        options = {"promises": eager() if promised else None, "clock": lambda: next(ticks) * 0.001}
        self.engine = engine_over(self.cache, token_budget=16, **options)
        self.scheduler = self.engine.scheduler
        self.ends = []
        for request in requests:
            self.engine.submit(request)
        for _ in range(steps):
            self.ends += self.engine.step()

    def finish(self, cancelled: tuple = ()) -> None:
        """It goes on to the end that it would have had."""
        check_books(self.scheduler)
        assert self.engine.unfinished == len(self.requests) - len(self.ends)
        for _ in range(200):
            self.ends += self.engine.step()
            if not self.engine.unfinished:
                break
        wanted = [request for request in self.requests if request.id not in cancelled]
        ends = {end.id: end for end in self.ends}
        assert len(ends) == len(self.ends) and set(ends) == {request.id for request in self.requests}
        assert all(ends[name].error == "cancelled" for name in cancelled)
        for request in wanted:
            if request.id == "never":
                assert "larger budget" in ends["never"].error
            else:
                assert ends[request.id].tokens == alone(request) and not ends[request.id].error
        stats = self.scheduler.stats
        assert (stats.finished, stats.failed) == (len(wanted) - 1, 1)
        assert self.cache.stats().slots_free == SLOTS
        self.engine.forward.store.check()
        self.resources.close()


def steps_of(mix, **options) -> int:
    run, steps = Run(*mix, **options), 0
    while run.scheduler.unfinished:
        run.ends += run.engine.step()
        steps += 1
    run.finish()
    return steps


def interrupt(setup, operation, check, **options) -> int:
    options = {"within": vtensor.serving, "each": place} | options
    return at_every_bytecode(setup, operation, check, **options)


@pytest.mark.thorough
def test_step():
    """Each iteration of two runs in turn: the ends come from this step, or from a later one."""
    seen = set()

    def check(run, outcome):
        run.ends += outcome.result or []
        run.finish()

    for mix, promised in ((GROUPS, False), (SINGLES, False), (LEAVING, True)):
        for steps in range(steps_of(mix, promised=promised)):
            setup = partial(Run, *mix, steps, promised)
            interrupt(setup, lambda run: run.engine.step(), check, stride=every(6), seen=seen)
    assert len(seen) > 1500


def test_run():
    def check(run, outcome):
        run.ends += (outcome.result or {}).values()
        run.finish()

    tried = interrupt(lambda: Run(*GROUPS), lambda run: run.engine.run(), check, each=moment, stride=997)
    assert tried > 20


def test_ends_that_are_all_that_is_left():
    """Of a request that does not fit and of one that was cancelled, for a loop over unfinished ones."""
    first, never = GROUPS[1][0], GROUPS[1][2]

    def prepared():
        run = Run(GROUPS[0], [first, never])
        run.engine.cancel("first")
        return run

    def check(run, outcome):
        run.ends += outcome.result or []
        assert run.engine.unfinished == 2 - len(run.ends)
        while run.engine.unfinished:
            run.ends += run.engine.step()
        assert sorted(end.id for end in run.ends) == ["first", "never"]
        run.resources.close()

    assert interrupt(prepared, lambda run: run.engine.step(), check) > 100


def cut_completions(mix, *, abandoned: bool, stride: int, **options) -> set:
    """Cuts complete() off, wherever it is, and completes the iteration again, or abandons it. Whatever it had
    done; where it had done all, the plan says what ended."""

    def prepared(steps):
        run = Run(*mix, steps, **options)
        run.plan = run.scheduler.plan()
        work = run.engine.forward(run.plan)
        run.tokens = [choose(work[i], sequence) for i, sequence in run.plan.sampled]
        return run

    def check(run, outcome):
        plan, scheduler = run.plan, run.scheduler
        check_books(run.scheduler)
        assert (scheduler.planned is None) == (plan.ended is not None)
        if scheduler.planned is None:
            with pytest.raises(InvalidArgument, match="under way"):
                scheduler.complete(plan, run.tokens)
        elif abandoned:
            scheduler.abandon(plan)
        else:
            scheduler.complete(plan, run.tokens)
        if plan.ended is not None:
            run.ends += map(_completion, plan.failed + plan.ended)
        run.finish()

    seen: set = set()
    for steps in range(steps_of(mix, **options)):
        interrupt(
            partial(prepared, steps),
            lambda run: run.scheduler.complete(run.plan, run.tokens),
            check,
            stride=stride,
            seen=seen,
        )
    return seen


@pytest.mark.thorough
@pytest.mark.seconds(300)
@pytest.mark.parametrize("abandoned", [False, True])
def test_an_iteration_can_be_completed_again_or_abandoned(abandoned):
    cut_completions(GROUPS, abandoned=abandoned, stride=every(2))
    cut_completions(LEAVING, abandoned=abandoned, stride=every(2), promised=True)


@pytest.mark.thorough
@pytest.mark.parametrize("status", [Status.WAITING, Status.RUNNING, Status.SWAPPED])
def test_cancel(status):
    def group_of(run):
        scheduler = run.scheduler
        groups = [*scheduler.waiting, *scheduler.running, *scheduler.swapped]
        return next(group for group in groups if group.request.id == "group")

    def prepared():
        run = Run(*GROUPS)
        while group_of(run).status is not status:
            run.ends += run.engine.step()
        run.group = group_of(run)
        return run

    def check(run, outcome):
        check_books(run.scheduler)
        if run.group.status is not Status.CANCELLED:
            assert outcome.interrupted
            run.scheduler.cancel("group")
        with pytest.raises(InvalidArgument, match="no request 'group'"):
            run.scheduler.cancel("group")
        run.finish(cancelled=("group",))

    tried = interrupt(prepared, lambda run: run.scheduler.cancel("group"), check, stride=every(1))
    assert tried > 50 // every(1)


@pytest.mark.thorough
def test_add():
    *others, last = GROUPS[1]

    def check(run, outcome):
        run.requests = GROUPS[1]
        if run.scheduler.unfinished == len(others):
            run.engine.submit(last)
        with pytest.raises(InvalidArgument, match="there already"):
            run.engine.submit(last)
        run.finish()

    setup = partial(Run, GROUPS[0], others)
    assert interrupt(setup, lambda run: run.engine.submit(last), check, stride=every(1)) > 50 // every(1)


@pytest.mark.thorough
def test_reorder():
    """The beams are those of before, or go on with their sources; FakeModel checks what they read."""
    sources = [1, 1, 0]

    def prepared(steps):
        run = Run(60, [Request("beams", [1, 0, 1, 1, 0], 8, samples=3)], steps)
        (run.group,) = run.scheduler.running
        run.steps, run.before = steps, [sequence.tokens for sequence in run.group.live]
        return run

    def reorder(run):
        run.scheduler.reorder("beams", sources)

    def check(run, outcome):
        after = [run.before[source] for source in sources]
        check_books(run.scheduler)
        if [sequence.tokens for sequence in run.group.live] != after:
            assert outcome.interrupted and [sequence.tokens for sequence in run.group.live] == run.before
            reorder(run)
        assert [sequence.tokens for sequence in run.group.live] == after
        (end,) = run.engine.run().values()
        assert [tokens[: run.steps] for tokens in end.tokens] == [tokens[5:] for tokens in after]
        assert run.cache.stats().slots_free == SLOTS

    for steps in (1, 3):
        assert interrupt(partial(prepared, steps), reorder, check, stride=every(1)) > 50 // every(1)


class Name:
    """An id whose hash and comparison are Python, and may be interrupted."""

    def __init__(self, name) -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other) -> bool:
        return self.name == other.name


def test_ids_whose_hash_is_interrupted():
    requests = [Request(Name(i), [i] * 6, 3) for i in range(3)]

    def prepared():
        run = Run(60, requests)
        run.seen = run.engine.step()
        return run

    def serve(run):
        run.engine.submit(Request(Name(3), [3] * 6, 3))
        run.scheduler.cancel(Name(1))
        return run.engine.run()

    def check(run, outcome):
        check_books(run.scheduler)
        done = run.seen
        done += (outcome.result or {}).values()
        while run.scheduler.unfinished:
            done += run.engine.step()
        done += run.engine.step()
        names = [end.id.name for end in done]
        assert len(set(names)) == len(names) and {0, 2} <= set(names) <= {0, 1, 2, 3}
        assert run.cache.stats().slots_free == SLOTS
        for name in range(4):  # all are free again
            run.engine.submit(Request(Name(name), [1], 1))

    here = sys.modules[__name__]
    assert interrupt(prepared, serve, check, within=here, each=moment) > 30

"""Requests that wait in host memory while a prompt has their room: each gets the tokens it has alone, none
starves, and none leaves where that helps no other."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_support import (
    LEAVING,
    PAGE_TOKENS,
    RANGES,
    SLOTS,
    alone,
    check_books,
    eager,
    engine_over,
    opened,
    serve,
)
from support import draws
from vtensor import testing
from vtensor.serving import Request, Scheduler

MAX_LEN = 64
STEP = 0.01  # seconds


def promised_engine(cache, promises, **options):
    ticks = count()
    return engine_over(cache, promises=promises, clock=lambda: next(ticks) * STEP, **options)


def check(scheduler) -> None:
    testing.check_invariants(scheduler.cache.pool)
    check_books(scheduler)
    assert all(group.left_at is None for group in scheduler.running + scheduler.waiting)


def most_iterations(requests) -> int:
    """In which any requests end that are there from the first iteration on: each leaves at most once, so the
    oldest of those that may still go on is computed by at least a token in each iteration."""
    longest = max(request.prompt_tokens + request.max_new_tokens for request in requests)
    return 2 * len(requests) * (SLOTS + 1) * (longest + 1)


# --- the same tokens as alone -----------------------------------------------------------------------------

EARLY, LONG = Request("early", [2] * 3, 3), Request("long", [1] * 12, 24)  # the account fills; LONG leaves
prompts = st.integers(1, 12).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=n, max_size=n))
shapes = st.tuples(
    st.sampled_from([2, 4, 6, 8, 10]), prompts, st.sampled_from([1, 2, 4, 24]), st.sampled_from([1, 1, 1, 2])
)


@pytest.mark.thorough
def test_each_request_as_if_alone(kind):
    """What can be served alone in the same memory is served, with the same tokens."""
    left, examples = [], draws(300 if kind == "host" else 75)

    @given(
        shapes=st.lists(shapes, min_size=4, max_size=7),
        budget=st.sampled_from([22, 20, 24, 18, 26]),
        token_budget=st.sampled_from([SLOTS, 16, 64]),
        tpot=st.sampled_from([4 * STEP, 40 * STEP, 1e6]),
        slower=st.sampled_from([0.05, 1e6, 1e6]),
        host_pages=st.sampled_from([8, None, None]),
        cancels=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), max_size=3),
    )
    @settings(max_examples=examples)
    def serve_them(shapes, budget, token_budget, tpot, slower, host_pages, cancels):
        arrivals = [(0, EARLY), (0, LONG)]
        arrivals += [(at, Request(i, *shape)) for i, (at, *shape) in enumerate(shapes)]
        with opened(kind, budget, SLOTS, MAX_LEN, host_pages) as cache:
            engine = promised_engine(cache, eager(tpot, slower=slower), token_budget=token_budget)
            most = max(at for at, _ in arrivals) + most_iterations([wanted for _, wanted in arrivals])
            done = serve(engine, arrivals, cancels, most=most, check=lambda: check(engine.scheduler))
            left.append(engine.scheduler.stats.left)
            stats = cache.stats()
            assert stats.slots_free == SLOTS and stats.slots_swapped == stats.nbytes_swapped == 0
        assert set(done) == {wanted.id for _, wanted in arrivals}
        for _, wanted in arrivals:
            completion, whole = done[wanted.id], alone(wanted)
            if completion.error == "cancelled":
                assert all(whole[i][: len(got)] == got for i, got in enumerate(completion.tokens))
                continue
            with opened(kind, budget, SLOTS, MAX_LEN, host_pages) as cache:
                by_itself = promised_engine(cache, None, token_budget=token_budget).run([wanted])[wanted.id]
            if not by_itself.error:
                assert not completion.error
                assert completion.tokens == by_itself.tokens == whole

    serve_them()
    assert sum(map(bool, left)) >= examples // 20, "in too few of the runs a request left"


@pytest.mark.thorough
def test_a_long_answer_among_short_requests_without_end():
    """It leaves once, and those that follow cannot keep it away: what they cost is in the account."""
    left = []

    @given(
        long=st.tuples(st.integers(4, 16), st.integers(8, 24)),
        short=st.tuples(st.integers(4, 14), st.integers(1, 6)),
        each=st.integers(1, 2),
        more_pages=st.integers(0, 8),
        slower=st.sampled_from([0.05, 1.0]),
    )
    @settings(max_examples=draws(30))
    def serve_it(long, short, each, more_pages, slower):
        budget = RANGES * -(-sum(long) // PAGE_TOKENS) + more_pages
        with opened("host", max(budget, 12), SLOTS, MAX_LEN) as cache:
            engine = promised_engine(cache, eager(40 * STEP, slower=slower), token_budget=16)
            names = count()
            wanted = Request("long", [1, 0] * (long[0] // 2), long[1])
            for iteration in range(6000):
                for _ in range(each if engine.unfinished < 3 * SLOTS else 0):
                    name = next(names)
                    engine.submit(Request(name, [name % 5] * short[0], short[1]))
                if iteration == 4:
                    engine.submit(wanted)
                ended = [completion for completion in engine.step() if completion.id == "long"]
                if ended:
                    break
            else:
                raise AssertionError("the long answer starves")
            assert ended[0].tokens == alone(wanted) and not ended[0].error
            left.append(engine.scheduler.stats.left)

    serve_it()
    assert any(left)


# --- which one leaves, when -------------------------------------------------------------------------------


def run_mix(promises, token_seconds=0.0, late=0.0, token_budget=16, requests=LEAVING[1]):
    """LEAVING, by a clock that the work moves. Returns the scheduler's counts, which requests made room, and
    which were away before the plan with which each began."""
    now, left, away = 0.0, [], {}
    with opened("host", LEAVING[0], SLOTS) as cache:
        scheduler = Scheduler(cache, token_budget=token_budget, promises=promises, clock=lambda: now)
        for request in requests:
            scheduler.add(request)
        now += late
        while scheduler.unfinished:
            swapped = [group.request.id for group in scheduler.swapped]
            plan = scheduler.plan()
            assert plan.tokens <= token_budget
            left += [group.request.id for group in plan.preempted]
            away |= {group.request.id: swapped for group in plan.admitted}
            now += STEP + token_seconds * plan.tokens
            scheduler.complete(plan, [1] * len(plan.sampled))
        return scheduler.stats, left, away


@pytest.mark.parametrize(
    ("wanted", "prompt_tokens"),
    [
        (Request("samples", [1], 2, samples=4), [1, 0]),
        # Its two generated tokens are computed again. The prompt was published.
        (Request("again", [1, 0, 1, 0], 4), [4, 0, 2, 0]),
    ],
)
def test_the_pace_is_of_the_tokens_that_are_no_decode_step(wanted, prompt_tokens):
    noted, promises = [], eager()
    promises.pace.note = lambda tokens, *rest: noted.append(tokens)
    with opened("host", 20, SLOTS) as cache:
        scheduler = Scheduler(cache, token_budget=SLOTS, promises=promises)
        group = scheduler.add(wanted)
        while scheduler.unfinished:
            if len(noted) == 2:
                scheduler._books.settled = False  # as after an interrupted operation
                scheduler._books.changing.append(group)
            plan = scheduler.plan()
            scheduler.complete(plan, [1] * len(plan.sampled))
    assert noted == prompt_tokens


@pytest.mark.parametrize("token_budget", [16, 8])
def test_one_with_a_long_answer_leaves_for_a_prompt(token_budget):
    stats, left, _ = run_mix(eager(), token_budget=token_budget)
    assert stats.left == 1 and left[-1] == "first"
    assert stats.swapped == len(left) and stats.recomputed == 0, "nothing is computed again"


def test_one_that_has_left_stays_away_for_the_next_prompt_too():
    prompts = [Request("third", [0] * 4, 2), Request("fourth", [1] * 4, 2)]
    _, _, away = run_mix(eager(), requests=LEAVING[1][:-1] + prompts)
    assert away["fourth"] == ["first", "other"]


@pytest.mark.parametrize(
    ("promises", "options"),
    [
        pytest.param(None, {}, id="nothing was promised"),
        pytest.param(eager(slower=0.0), {}, id="the account is empty"),
        pytest.param(eager(tpot=1.1 * STEP), {}, id="a promise to one that runs would break"),
        pytest.param(eager(ttft=0.5), {"late": 1.0}, id="the promise to the prompt is broken already"),
        pytest.param(eager(), {"token_seconds": 1.0}, id="the computation is what is short"),
    ],
)
def test_none_leaves_if(promises, options):
    stats, *_ = run_mix(promises, **options)
    assert stats.left == 0

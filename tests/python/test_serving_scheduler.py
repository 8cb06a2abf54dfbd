"""The order of service, victims and groups: no request is lost, and each gets the tokens it has alone."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_support import PAGE_TOKENS, RANGES, alone, check_books, engine_over, opened, serve
from support import PER_PAGE, draws, open_pool, quarter
from vtensor import OutOfPages
from vtensor.serving import Request, Scheduler, Status

SLOTS = 4


def request(id, prompt=8, new=4, **options):
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(id, tokens, new, **options)


@pytest.fixture
def open_cache(kind):
    """Makes caches."""
    with ExitStack() as stack:
        yield lambda *args, **kw: stack.enter_context(opened(kind, *args, **kw))


def check_plan(engine, plan) -> None:
    scheduler = engine.scheduler
    running = [group.order for group in scheduler.running]
    queued = [group.order for group in scheduler.waiting + scheduler.swapped]
    check_books(scheduler)
    assert plan.tokens == sum(work.stop - work.start for work in plan.work) <= scheduler.token_budget
    assert len({work.sequence for work in plan.work}) == len(plan.work)
    for group in plan.preempted:
        assert all(group.order > order for order in running), "a later arrival kept its memory"
        assert group.status is (Status.SWAPPED if group in scheduler.swapped else Status.WAITING)
    if plan.admitted and queued:
        assert max(group.order for group in plan.admitted) < min(queued), "a queued request was overtaken"
    back = [group.order for group in scheduler.running for s in group.holders if s.slot in plan.swapped_in]
    if back and scheduler.swapped:
        assert max(back) < min(group.order for group in scheduler.swapped), "a swapped one was overtaken"
    stats = scheduler.cache.stats()
    assert stats.slots_used == sum(len(group.holders) for group in scheduler.running)
    assert stats.slots_swapped == sum(len(group.holders) for group in scheduler.swapped)


def serve_checked(engine, arrivals):
    """Checks the plan of each iteration."""
    plan = engine.scheduler.plan

    def checked():
        planned = plan()
        check_plan(engine, planned)
        return planned

    engine.scheduler.plan = checked
    return serve(engine, arrivals, most=4000, check=engine.forward.store.check)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)
shapes = st.tuples(
    st.integers(0, 20),
    prompts,
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from([frozenset(), frozenset({3})]),
    st.sampled_from(["", "other"]),
)


@pytest.mark.thorough
def test_each_request_as_if_alone(kind):
    """No request is lost, starved or overtaken; what can be served alone is, with the same tokens."""

    @given(
        shapes=st.lists(shapes, min_size=1, max_size=8),
        pages=st.integers(6, 60),
        token_budget=st.sampled_from([SLOTS, 16, 64]),
        host_pages=st.sampled_from([0, 20, None]),
    )
    @settings(max_examples=draws(400 if kind == "host" else 120))
    def serve_them(shapes, pages, token_budget, host_pages):
        arrivals = [(at, Request(i, *shape)) for i, (at, *shape) in enumerate(shapes)]
        with opened(kind, pages, SLOTS, host_pages=host_pages) as cache:
            engine = engine_over(cache, token_budget=token_budget)
            done = serve_checked(engine, arrivals)
            assert set(done) == {wanted.id for _, wanted in arrivals}
            assert cache.stats().slots_free == SLOTS
        for _, wanted in arrivals:
            with opened(kind, pages, SLOTS, host_pages=host_pages) as cache:
                by_itself = engine_over(cache).run([wanted])[wanted.id]
            # In company its samples may get out of step, and one end and make room for the other.
            if not by_itself.error:
                assert not done[wanted.id].error
                assert done[wanted.id].tokens == by_itself.tokens == alone(wanted)

    serve_them()


def test_decoding_goes_before_prompts_and_the_budget_holds(open_cache):
    scheduler = Scheduler(open_cache(budget=1000), token_budget=10)
    scheduler.add(request("decoding", prompt=2, new=30))
    scheduler.complete(scheduler.plan(), [0])
    scheduler.add(request("long", prompt=40))
    pieces = []
    for _ in range(5):
        plan = scheduler.plan()
        assert [(w.sequence.group.request.id, w.stop - w.start) for w in plan.work[:1]] == [("decoding", 1)]
        assert plan.tokens <= 10
        pieces += [(w.start, w.stop) for w in plan.work[1:]]
        scheduler.complete(plan, [0] * len(plan.sampled))
    assert pieces == [(0, 9), (9, 18), (18, 27), (27, 36), (36, 40)]


def test_groups_come_back_in_the_order_of_arrival(open_cache):
    """The third is swapped out before the second, and must not come back before it."""
    engine = engine_over(open_cache(budget=30, max_batch=6))
    wanted = [request(i, [i] * 6, 24 - 5 * i, samples=2) for i in range(3)]
    done = serve_checked(engine, [(0, one) for one in wanted])
    assert engine.scheduler.stats.swapped >= 2
    assert [done[one.id].tokens for one in wanted] == [alone(one) for one in wanted]


def test_a_swapped_group_that_fits_only_shared_shares_again(open_cache):
    """Three samples of a long prompt fit while they share it, as they do again when they are back."""
    cache = open_cache(budget=34)
    engine = engine_over(cache)
    wanted = [request("first", [1] * 4, 24), request("group", [0] * 40, 8, samples=3)]
    done = engine.run(wanted)
    stats = engine.scheduler.stats
    assert stats.swapped >= 1 and not any(completion.error for completion in done.values())
    assert [done[r.id].tokens for r in wanted] == [alone(r) for r in wanted]


def test_what_a_preempted_request_computed_is_found_again(open_cache):
    """The second has a unit of 4 tokens when the first needs a page: no token is computed twice."""
    engine = engine_over(open_cache(budget=6 * RANGES))
    wanted = [request("first", [0] * 14, 4), request("second", [1] * 2, 20)]
    done = engine.run(wanted)
    assert [done[r.id].tokens for r in wanted] == [alone(r) for r in wanted]
    stats = engine.scheduler.stats
    assert stats.recomputed == 1
    assert stats.computed_tokens == (14 + 4 - 1) + (2 + 20 - 1)


def test_what_a_finished_request_generated_is_found_again(open_cache):
    engine = engine_over(open_cache(budget=200))
    first = request("first", [1, 0], 20)
    said = engine.run([first])["first"].tokens[0]
    engine.run([request("next", [1, 0, *said, 1], 4)])
    assert engine.scheduler.stats.reused_tokens == (2 + 20 - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_an_iteration_taken_back_leaves_its_news_to_the_next(open_cache):
    scheduler = Scheduler(open_cache(budget=6 * RANGES))
    scheduler.add(request("never", prompt=40))
    scheduler.add(request("fits"))
    plan = scheduler.plan()
    assert [g.request.id for g in plan.failed] == ["never"] and plan.work
    scheduler.abandon(plan)
    again = scheduler.plan()
    assert [g.request.id for g in again.failed] == ["never"]
    assert [g.request.id for g in again.admitted] == ["fits"]
    assert again.work == plan.work and again.sampled == plan.sampled


# --- beside other processes -------------------------------------------------------------------------------


@pytest.fixture
def beside(kind):
    """Makes an engine of `budget` pages, and a tensor of another pool that shares them."""
    name = f"serving-{os.getpid()}"
    with ExitStack() as stack:

        def make(budget, **options):
            cache = stack.enter_context(opened(kind, budget, shared_budget=name))
            pool = stack.enter_context(open_pool(kind, budget, shared_budget=name))
            return engine_over(cache, **options), quarter(pool, 0, capacity=1024)

        yield make


def test_a_request_waits_for_what_only_other_processes_could_give_back(beside):
    engine, other = beside(30)
    other.extend(26 * PER_PAGE)
    waits = request("waits", [0, 1] * 9, 8)
    engine.submit(waits)
    for _ in range(5):
        assert engine.step() == [] and engine.scheduler.waits_for_others
    other.shrink(20 * PER_PAGE)
    done = engine.run()["waits"]
    assert done.tokens == alone(waits) and not done.error
    assert not engine.scheduler.waits_for_others


@pytest.mark.parametrize("samples", [1, 2])
def test_who_is_stopped_by_other_processes_keeps_nothing_and_goes_on_later(beside, samples):
    engine, other = beside(60)
    grows = request("grows", [0, 1] * 4, 30, samples=samples)
    engine.submit(grows)
    for _ in range(4):
        engine.step()
    while engine.scheduler.running:  # what it leaves the other takes
        with suppress(OutOfPages):
            while True:
                other.extend(PER_PAGE)
        assert engine.step() == []
    assert engine.scheduler.waits_for_others
    stats = engine.scheduler.cache.stats()
    assert stats.tokens == 0 and engine.scheduler.stats.failed == 0
    other.close()
    done = engine.run()["grows"]
    assert done.tokens == alone(grows) and not done.error


def test_who_was_stopped_comes_back_with_room_for_more_than_it_had(beside):
    """So that it makes progress each time."""
    engine, other = beside(60)
    scheduler, pool = engine.scheduler, engine.scheduler.cache.pool
    engine.submit(request("grows", [0, 1] * 4, 30))
    engine.step()
    had = pool.stats().pages_active
    while scheduler.running or not scheduler.waits_for_others:
        with suppress(OutOfPages):
            while True:
                other.extend(PER_PAGE)
        engine.step()
    with suppress(OutOfPages):
        while True:
            other.extend(PER_PAGE)
    freed = 0
    while not scheduler.running:
        other.shrink(PER_PAGE)
        freed += 1
        engine.step()
    assert freed >= 2 * had > 0


def test_waiting_for_other_processes_has_a_bound(beside):
    engine, other = beside(30, patience=0.05)
    other.extend(28 * PER_PAGE)
    done = engine.run([request("waits", [0, 1] * 9, 8)])
    assert "other processes of the shared budget gave back too little in 0.05 s" in done["waits"].error


def test_what_could_never_fit_waits_for_nobody(beside):
    engine, other = beside(6 * RANGES)
    other.extend(2 * PER_PAGE)
    engine.submit(request("never", [0] * 40, 4))
    (ended,) = engine.step()
    assert "larger budget" in ended.error and "other processes" not in ended.error

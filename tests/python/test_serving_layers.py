"""Prompts that find no room are computed band by band: each request gets the tokens it has alone, none
starves, and a walk that is cut off is walked again."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving_support import (
    BAND_LAYERS,
    BAND_PAGE_TOKENS,
    LAYERED,
    SLOTS,
    alone,
    engine_over,
    opened,
)
from support import PER_PAGE, draws, every, quarter, simcuda_library
from test_serving_interrupts import Run, cut_completions, interrupt, steps_of
from test_serving_refusals import Refusing, made
from test_serving_refusals import serve as serve_refused
from vtensor import DriverError, InvalidArgument, NoFreeSlot, OutOfPages, TimedOut, testing
from vtensor.serving import (
    Layering,
    Promises,
    Request,
    Scheduler,
    Status,
    bands_that_stay,
    resident_bands,
)
from vtensor.testing import fail_after

MAX_LEN = 64
RANGES = 2 * BAND_LAYERS
TICK = 0.001  # seconds between two looks at the tests' clock, whatever the machine does
TPOTS = {"none": None, "tight": TICK, "some": 8 * TICK, "loose": 1e6}


def pages(tokens: int) -> int:
    """Of one sequence, in all layers."""
    return RANGES * -(-tokens // BAND_PAGE_TOKENS)


def layered_engine(cache, resident=0, tpot="none", layered=True, **options):
    ticks = count()
    seconds = TPOTS[tpot]
    return engine_over(
        cache,
        layered=Layering(resident) if layered else False,
        promises=None if seconds is None else Promises(seconds),
        clock=lambda: next(ticks) * TICK,
        **options,
    )


def check_nothing_left(cache) -> None:
    stats = cache.stats()
    assert stats.slots_free == SLOTS and stats.slots_swapped == 0
    assert stats.nbytes_swapped == 0 and stats.tokens == 0
    testing.check_invariants(cache.pool)


def check_books(scheduler) -> None:
    testing.check_invariants(scheduler.cache.pool)
    for queue in (scheduler.running, scheduler.waiting, scheduler.swapped):
        orders = [group.order for group in queue]
        assert orders == sorted(set(orders))
    held = [s.slot for group in scheduler.running + scheduler.swapped for s in group.holders]
    assert None not in held and len(set(held)) == len(held)
    assert scheduler.cache.stats().slots_free == SLOTS - len(held)
    assert all(s.slot is None and s.computed == 0 for group in scheduler.waiting for s in group.live)


def most_iterations(requests) -> int:
    """In which any requests end that are there from the first iteration on. The oldest is never preempted, so
    it is computed by at least a token in each iteration; or waits, while at most SLOTS later ones, to which
    nobody is added, come to their ends or make room."""
    longest = max(request.prompt_tokens + request.max_new_tokens for request in requests)
    return len(requests) * (SLOTS + 1) * (longest + 1)


def serve(engine, arrivals, cancels=()):
    """Runs requests that arrive, and some that are cancelled, at given iterations; checks each iteration."""
    arrivals, cancels = sorted(arrivals, key=lambda arrival: arrival[0]), dict(cancels)
    last = max(at for at, _ in arrivals)
    done = {}
    for iteration in range(last + most_iterations([request for _, request in arrivals])):
        while arrivals and arrivals[0][0] <= iteration:
            engine.submit(arrivals.pop(0)[1])
        scheduler = engine.scheduler
        held = {g.request.id for g in scheduler.waiting + scheduler.running + scheduler.swapped}
        if (cancelled := cancels.get(iteration)) in held:
            engine.cancel(cancelled)
        ended = []
        with suppress(OutOfPages):  # the host has no room for a band that leaves
            ended = engine.step()
        for completion in ended:
            assert completion.id not in done
            done[completion.id] = completion
        check_books(scheduler)
        if not arrivals and not engine.unfinished:
            return done
    raise AssertionError(f"{engine.unfinished} requests starve")


# --- the same tokens as alone -----------------------------------------------------------------------------

LAST = [1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 1]
prompts = st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=n, max_size=n))
shapes = st.tuples(st.integers(0, 10), prompts, st.integers(1, 12), st.integers(1, 2))


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "examples"), [("host", draws(300)), ("simcuda", draws(75))])
def test_each_request_as_if_alone(kind, examples):
    """What can be served alone in the same memory is served, with the same tokens."""
    if kind == "simcuda" and simcuda_library() is None:
        pytest.skip("libsimcuda.so is not built (set VTENSOR_SIMCUDA to its path)")
    walked = []

    @given(
        shapes=st.lists(shapes, min_size=2, max_size=8),
        budget=st.integers(18, 80),
        token_budget=st.sampled_from([SLOTS, 16, 64]),
        bands=st.sampled_from([3, 6]),
        layered=st.sampled_from([True, True, False]),
        resident=st.sampled_from([None, 0, 1, 2]),
        tpot=st.sampled_from(sorted(TPOTS)),
        host_pages=st.sampled_from([20, 1000, 1000]),
        cancels=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), max_size=3),
    )
    # The last is alone when its next piece is planned, and pages of those before it are still being copied.
    @example([(3, LAST, 10, 1)] * 3 + [(7, LAST, 7, 1)], 58, 4, 3, True, 1, "none", 1000, [(9, 1)])
    @settings(max_examples=examples)
    def serve_them(shapes, budget, token_budget, bands, layered, resident, tpot, host_pages, cancels):
        arrivals = [(at, Request(i, *shape)) for i, (at, *shape) in enumerate(shapes)]
        options = {"layered": layered, "resident": resident, "token_budget": token_budget}
        with opened(kind, budget, SLOTS, MAX_LEN, host_pages, bands) as cache:
            engine = layered_engine(cache, tpot=tpot, **options)
            done = serve(engine, arrivals, cancels)
            walked.append(engine.scheduler.stats.layered)
            check_nothing_left(cache)
        assert set(done) == {wanted.id for _, wanted in arrivals}
        for _, wanted in arrivals:
            completion = done[wanted.id]
            if completion.error == "cancelled":
                whole = alone(wanted)
                assert all(whole[i][: len(got)] == got for i, got in enumerate(completion.tokens))
                continue
            with opened(kind, budget, SLOTS, MAX_LEN, host_pages, bands) as cache:
                by_itself = layered_engine(cache, **options).run([wanted])[wanted.id]
            if not by_itself.error:
                assert not completion.error
                assert completion.tokens == by_itself.tokens == alone(wanted)

    serve_them()
    assert sum(map(bool, walked)) >= examples // 10, "too few of the runs had prompts go by bands"


def test_bands_of_another_for_which_the_host_has_no_room(kind):
    """The second waits for memory that bands of the last keep: the last is computed again."""
    prompts = {"first": [0] * 4, "second": [1] * 11, "last": [1] * 6}
    requests = [Request(name, prompt, 4) for name, prompt in prompts.items()]
    with opened(kind, 24, SLOTS, MAX_LEN, 20, bands=6) as cache:
        engine = layered_engine(cache, None, token_budget=64)
        done = serve(engine, list(zip((1, 1, 2), requests, strict=True)), [])
        assert engine.scheduler.stats.recomputed == 1
        check_nothing_left(cache)
    assert all(done[one.id].tokens == alone(one) and not done[one.id].error for one in requests)


# --- fairness ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("tpot", TPOTS)
@pytest.mark.parametrize("resident", [None, 0, 1])
@pytest.mark.parametrize("layered", [True, False])
def test_a_long_prompt_among_short_requests_without_end(layered, resident, tpot):
    """It is done in the iterations that it and those ahead of it may take if nobody follows: who comes later
    keeps no memory and no slot that it waits for."""
    went_by_bands = []

    @given(
        long=st.integers(24, 48),
        new=st.integers(1, 8),
        short=st.tuples(st.integers(1, 12), st.sampled_from([1, 1, 2, 6])),
        each=st.integers(1, 3),
        before=st.integers(0, 6),
        more_pages=st.integers(0, 3 * RANGES),
        token_budget=st.sampled_from([SLOTS, 16]),
        bands=st.sampled_from([3, 6]),
    )
    @example(29, 6, (11, 2), 2, 2, 0, SLOTS, 6)  # bands that stay with later prompts take what it grows into
    @example(25, 7, (11, 4), 2, 5, 25, 16, 6)  # later prompts take the room for its next piece
    @example(28, 8, (8, 1), 3, 3, 22, 16, 3)  # later prompts are walked as long as it does not come back
    @settings(max_examples=draws(15))
    def serve_it(long, new, short, each, before, more_pages, token_budget, bands):
        budget = pages(long + new) + more_pages
        with opened("host", budget, SLOTS, MAX_LEN, bands=bands) as cache:
            engine = layered_engine(cache, resident, tpot, layered, token_budget=token_budget)
            names = count()

            def stream(n):
                for _ in range(n):
                    name = next(names)
                    engine.submit(Request(name, [name % 5] * short[0], short[1]))

            stream(each * before)
            for _ in range(before):
                engine.step()
            wanted = Request("long", [1, 0] * (long // 2), new)
            engine.submit(wanted)
            scheduler = engine.scheduler
            ahead = [g.request for g in scheduler.running + scheduler.swapped + scheduler.waiting]
            for _ in range(most_iterations(ahead)):
                stream(each)
                ended = [completion for completion in engine.step() if completion.id == "long"]
                if ended:
                    break
            else:
                raise AssertionError("the long prompt starves")
            assert ended[0].tokens == alone(wanted) and not ended[0].error
            went_by_bands.append(scheduler.stats.layered)

    serve_it()
    assert any(went_by_bands) == layered


# --- walks that are cut off -------------------------------------------------------------------------------

FIRST, LONG = Request("first", [1] * 8, 30), Request("long", [0, 1] * 20, 3)


@pytest.fixture(params=[0, 1, None])
def walking(request, kind):
    """An engine whose second iteration computes a long prompt band by band, beside one that decodes."""
    with opened(kind, pages(LONG.prompt_tokens + LONG.max_new_tokens), SLOTS, MAX_LEN, bands=6) as cache:
        engine = layered_engine(cache, request.param, token_budget=16)
        engine.submit(FIRST)
        engine.step()
        engine.submit(LONG)
        yield engine
        check_nothing_left(cache)


def finish(engine) -> None:
    done = {}
    for _ in range(most_iterations([FIRST, LONG])):
        done |= {completion.id: completion for completion in engine.step()}
        check_books(engine.scheduler)
        if not engine.unfinished:
            break
    for request in (FIRST, LONG):
        assert done[request.id].tokens == alone(request) and not done[request.id].error


def test_layers_left_out_or_out_of_order(walking):
    scheduler = walking.scheduler
    plan = scheduler.plan()
    assert [work.sequence.group.request for work in plan.walk.work] == [LONG]
    with pytest.raises(InvalidArgument, match="layer 1 is of band 1, and band 0 is next.* in their order"):
        plan.enter(1)
    assert not plan.walk.begun
    plan.enter(0)
    plan.enter(0)
    with pytest.raises(InvalidArgument, match="layer 3 is of band 3, and band 1 is next"):
        plan.enter(3)
    plan.enter(1)
    with pytest.raises(InvalidArgument, match="layer 0 is of band 0, and band 2 is next"):
        plan.enter(0)
    with pytest.raises(InvalidArgument, match="layer by layer: call plan.enter"):
        scheduler.complete(plan, [0])
    assert scheduler.planned is plan
    scheduler.abandon(plan)
    finish(walking)


def test_complete_without_enter(walking):
    scheduler = walking.scheduler
    plan = scheduler.plan()
    with pytest.raises(InvalidArgument, match="call plan.enter"):
        scheduler.complete(plan, [0])
    scheduler.abandon(plan)
    again = scheduler.plan()
    assert again.work == plan.work and [work.start for work in again.walk.work] == [0]
    scheduler.abandon(again)
    finish(walking)


@pytest.mark.parametrize("piece", [0, 1])
@pytest.mark.parametrize("layer", range(BAND_LAYERS))
def test_a_walk_abandoned_in_the_middle_is_computed_again(walking, piece, layer):
    forward, walks = walking.forward, count()

    def unreliable(plan):
        if plan.walk is not None and next(walks) == piece:
            for entered in range(layer + 1):
                plan.enter(entered)
            raise OSError("the device is gone")
        return forward(plan)

    walking.forward = unreliable
    with pytest.raises(OSError, match="gone"):
        for _ in range(20):
            walking.step()
    check_books(walking.scheduler)
    assert walking.scheduler.planned is None
    walking.step()
    assert walking.scheduler._books.groups["long"].status is Status.WAITING, "it is begun beside others again"
    finish(walking)


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_memory_that_goes_in_the_middle_of_a_walk(walking, layer):
    """Another tensor takes all there is: the step says so, those that follow do without or go on later."""
    cache, forward = walking.scheduler.cache, walking.forward
    rivals = []

    def robbed(plan):
        if plan.walk is not None and not rivals:
            enter = plan.walk.enter

            def robbed_enter(entered):
                if entered == layer and not rivals:
                    rivals.append(quarter(cache.pool, 0, capacity=4096))
                    with suppress(OutOfPages):
                        while True:
                            rivals[0].extend(PER_PAGE)
                enter(entered)

            plan.walk.enter = robbed_enter
        return forward(plan)

    walking.forward = robbed
    if layer == 0:
        with pytest.raises(OutOfPages, match="has gone since it was planned"):
            walking.step()
    else:  # what leaves may make room for what comes
        with suppress(OutOfPages):
            walking.step()
    assert rivals
    check_books(walking.scheduler)
    for _ in range(3):
        walking.step()
    rivals[0].close()
    finish(walking)


@pytest.mark.parametrize("host_pages", [0, 6, 20, 30])
@pytest.mark.parametrize("resident", [0, 1, None])
def test_a_host_without_memory(kind, host_pages, resident):
    """A walk that it refuses takes nothing from the one that decodes beside it more than once."""
    budget = pages(LONG.prompt_tokens + LONG.max_new_tokens)
    with opened(kind, budget, SLOTS, MAX_LEN, host_pages, bands=6) as cache:
        engine = layered_engine(cache, resident, token_budget=16)
        done = serve(engine, [(0, FIRST), (3, LONG)])
        for request in (FIRST, LONG):
            assert done[request.id].tokens == alone(request) and not done[request.id].error
        check_nothing_left(cache)


# --- exceptions from outside, and refusals ---------------------------------------------------------------


def layered_run(steps: int) -> Run:
    return Run(*LAYERED, steps, bands=6)


@pytest.mark.slow
def test_an_interrupted_step():
    seen = set()

    def check(run, outcome):
        assert run.scheduler.layering is not None
        run.ends += outcome.result or []
        run.finish()

    for steps in range(steps_of(LAYERED, bands=6)):
        interrupt(partial(layered_run, steps), lambda run: run.engine.step(), check, stride=9, seen=seen)
    assert len(seen) > 1500


@pytest.mark.slow
@pytest.mark.parametrize("abandoned", [False, True])
def test_an_iteration_of_walks_can_be_completed_again_or_abandoned(abandoned):
    assert len(cut_completions(LAYERED, abandoned=abandoned, stride=5, bands=6)) > 300


class RefusingLayers(Refusing):
    """A cache whose layers a model reads, one call of which is refused."""

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, layer: int):
        return self._cache[layer]


@pytest.mark.parametrize("error", [DriverError, OutOfPages, NoFreeSlot, TimedOut, MemoryError])
def test_any_error_of_any_call_of_the_cache(error):
    budget, requests = LAYERED

    def run(call):
        with opened("host", budget, SLOTS, bands=6) as cache:
            refusing = RefusingLayers(cache, call, error("refused"))
            engine = layered_engine(refusing, 1, token_budget=16)
            return engine.scheduler.stats, serve_refused(engine, requests), refusing.calls

    stats, none, calls = run(0)
    assert stats.layered >= 2 and not none
    assert sum(bool(run(call)[1]) for call in range(1, calls + 1, 3)) > calls // 12


@pytest.mark.thorough
def test_any_refused_driver_call(kind):
    budget, requests = LAYERED

    def run(call):
        with opened(kind, budget, SLOTS, bands=6) as cache:
            engine = layered_engine(cache, 1, token_budget=16)
            before = made(cache)
            with fail_after(cache.pool, call):
                refusals = serve_refused(engine, requests)
            return made(cache) - before, refusals

    calls, none = run(1 << 30)
    assert not none
    met = 0
    for call in range(0, calls, every(3 if kind == "host" else 41)):  # CUDA's runs make ten times as many
        try:
            met += bool(run(call)[1])
        except BaseException as error:
            error.add_note(f"driver call {call} was refused")
            raise
    assert met > 5


# --- by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bands", "compute", "copy", "stay"),
    [
        (8, 1.0, 0.5, 0),
        (8, 1.0, 1.0, 0),
        (8, 1.0, 2.0, 4),  # half of a band is copied while one is computed
        (8, 1.0, 1.1, 1),
        (6, 1.0, 3.0, 4),
        (6, 0.0, 1.0, 6),
        (1, 1.0, 100.0, 1),
    ],
)
def test_resident_bands(bands, compute, copy, stay):
    assert resident_bands(bands, compute, copy) == stay


@pytest.mark.parametrize(
    ("bands", "resident", "stay"),
    [(6, 0, set()), (6, 1, {5}), (6, 2, {2, 5}), (6, 3, {1, 3, 5}), (7, 3, {1, 3, 6}), (4, 4, {0, 1, 2, 3})],
)
def test_bands_that_stay(bands, resident, stay):
    assert bands_that_stay(bands, resident) == stay


@given(st.integers(1, 64), st.data())
def test_bands_that_stay_are_spread_and_the_last_is_among_them(bands, data):
    resident = data.draw(st.integers(1, bands))
    stay = sorted(bands_that_stay(bands, resident))
    assert len(stay) == resident and stay[-1] == bands - 1
    gaps = [after - before for before, after in zip([-1, *stay], stay, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_bands_stay_as_they_are_measured():
    """A copy that takes three times as long as the computation of a band: two of three bands stay."""
    with opened("host", 200, SLOTS, bands=3) as cache:
        layering = Layering()
        layering.open(cache)
        assert layering.stay == frozenset()
        walk = layering.walk({})
        times = iter([10.0, 13.0])
        layering.measure(walk, 3 * 1.0, lambda: next(times))
        assert layering.stay == {0, 2}
        layering.measure(layering.walk({}), 3.0, lambda: pytest.fail("measured again at once"))


def test_bad_input():
    for resident, message in ((-1, "at least 0 bands"), (1.5, "resident"), ("1", "resident")):
        with pytest.raises(InvalidArgument, match=rf"\[Layering\].*{message}"):
            Layering(resident)
    with opened("host", 72, SLOTS) as cache:
        with pytest.raises(InvalidArgument, match=r"has 1 bands of layers.*KVCache\(..., bands=3\)"):
            Scheduler(cache, layered=True)
    with opened("host", 72, SLOTS, bands=3) as cache:
        for layering in (Layering(3), Layering(4)):
            with pytest.raises(InvalidArgument, match="of 3 bands: some have to leave, lower it"):
                Scheduler(cache, layered=layering)
        assert Scheduler(cache, layered=Layering(2)).layering.stay == {0, 2}
        assert Scheduler(cache).layering is None


def test_a_cache_without_bands_cannot_be_layered():
    with opened("host", 72, SLOTS, bands=2) as cache:
        with pytest.raises(InvalidArgument, match="the cache has 2 bands"):
            Scheduler(cache, layered=True)

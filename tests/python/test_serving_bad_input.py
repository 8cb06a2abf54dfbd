"""One bad request is refused, or ends with its reason, and no other hears of it."""

from __future__ import annotations

from array import array

import pytest
import torch

from serving_support import FakeModel, Store, alone, check_books, choose, opened
from vtensor import InvalidArgument
from vtensor.serving import Engine, Request, Scheduler


def test_what_is_made_stays_as_it_was_checked():
    tokens, stop, buffer = [1, 2, 3], {4}, bytearray(b"\5\6")
    request = Request("a", tokens, 2, stop=stop)
    tokens.append(2**63)
    stop.add("x")
    assert list(request.prompt) == [1, 2, 3] and request.stop == frozenset({4})
    for prompt in (
        torch.tensor([5, 6]),
        torch.tensor([5, 6]).numpy(),
        array("i", [5, 6]),
        b"\5\6",
        range(5, 7),
        memoryview(buffer),
    ):
        made = Request("b", prompt, torch.tensor(2), samples=True)
        assert list(made.prompt) == [5, 6] and type(made.max_new_tokens) is int
    buffer[0] = 9
    assert list(made.prompt) == [5, 6]
    (length,) = torch.tensor([5]).numpy()
    counted = Request("c", length, 2)
    assert type(counted.prompt) is int and counted.prompt_tokens == 5


@pytest.fixture
def cache():
    with opened("host", 60, 4) as cache:
        yield cache


GOOD = [Request("good", [1] * 8, 6), Request("fork", [2] * 6, 4, samples=2)]


def raising(work, sequence):
    raise ZeroDivisionError("no chances")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (raising, "ZeroDivisionError: no chances"),
        (lambda work, sequence: 2.5, "token id 2.5"),
        (lambda work, sequence: 2**63, "token id 9223372036854775808"),
        (lambda work, sequence: -1, "token id -1"),
        (lambda work, sequence: None, "token id None"),
    ],
)
@pytest.mark.parametrize("samples", [1, 2])
def test_a_choice_that_fails_ends_its_request_alone(cache, wrong, reason, samples):
    """At its first token, and at a later one of one of its samples."""
    for after in (0, 2):
        bad = Request("bad", [3] * 6, 8, samples=samples)

        def chosen(work, sequence, bad=bad, after=after):
            failing = sequence.group.request is bad and sequence.generated == after
            return (wrong if failing and sequence.index == samples - 1 else choose)(work, sequence)

        engine = Engine(Scheduler(cache), FakeModel(Store(cache)), chosen)
        done = engine.run([bad, *GOOD])
        assert reason in done["bad"].error
        assert done["bad"].tokens[-1] == alone(bad)[-1][:after]
        for good in GOOD:
            assert done[good.id].tokens == alone(good) and not done[good.id].error
        assert cache.stats().slots_free == 4
        assert (engine.scheduler.stats.finished, engine.scheduler.stats.failed) == (2, 1)


def test_what_the_model_cannot_compute_is_not_queued(cache):
    class Small(FakeModel):
        def check(self, request):
            if max(request.prompt) > 9:
                raise InvalidArgument("[Small] too large")

    engine = Engine(Scheduler(cache), Small(Store(cache)), choose)
    with pytest.raises(InvalidArgument, match="too large"):
        engine.submit(Request("large", [10], 2))
    assert list(engine.run([GOOD[0]])) == ["good"]


def test_beams_continue_sequences_of_their_own_request(cache):
    engine = Engine(Scheduler(cache), FakeModel(Store(cache)), choose)
    engine.submit(Request("beams", [1, 0, 1], 4, samples=2))
    reorder = engine.scheduler.reorder
    for request in ("beams", "other"):
        with pytest.raises(InvalidArgument, match="has no sequences at work"):
            reorder(request, [0, 1])
    engine.step()
    engine.step()
    (group,) = engine.scheduler.running
    before = [sequence.tokens for sequence in group.live]
    assert before[0] != before[1]
    for sources in ([1], [0, 2], [-1, 0], [0, 1, 0]):
        with pytest.raises(InvalidArgument, match="of 2 live sequences"):
            reorder("beams", sources)
    assert [sequence.tokens for sequence in group.live] == before
    reorder("beams", [1, 1])
    assert [sequence.tokens for sequence in group.live] == [before[1]] * 2
    check_books(engine.scheduler)
    (end,) = engine.run().values()
    assert [tokens[:2] for tokens in end.tokens] == [before[1][3:]] * 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Request("bad", [1] * 80, 6), "max_len is 64"),
        (Request("bad", 8, 6), "is a number"),
        (Request("good", [3] * 8, 6), "two requests have the id 'good'"),
        ("bad", "request is a str"),
    ],
)
def test_a_run_with_a_refused_request_queues_none_of_them(cache, bad, reason):
    engine = Engine(Scheduler(cache), FakeModel(Store(cache)), choose)
    with pytest.raises(InvalidArgument, match=reason):
        engine.run([GOOD[0], bad])
    assert not engine.unfinished
    assert set(engine.run(GOOD)) == {"good", "fork"}

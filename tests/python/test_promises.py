"""Latencies that are promised: what time is left, to the digit, and what it lets in."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtensor import InvalidArgument
from vtensor.serving import LengthHistogram, Pace, Promises, Request, SampleGroup

ANY = Request("any", [1], 4)
EXACT = 2.0**-10  # sums and products of a few of these are exact


class Left:
    """Predicts what it is told."""

    def __init__(self, left: float) -> None:
        self.tokens = left
        self.ended = []

    def left(self, request, generated) -> float:
        return self.tokens

    def observe(self, request, generated) -> None:
        self.ended.append((request, generated))


def decoding(generated: int, first_token_at: float | None = 0.0) -> SampleGroup:
    group = SampleGroup(ANY, 0)
    group.live[0].known += generated
    group.first_token_at = first_token_at
    return group


def promises(tpot=0.5, left=10.0, step=0.25, token=0.125) -> Promises:
    made = Promises(tpot, Left(left))
    made.pace = SimpleNamespace(step_seconds=step, token_seconds=token, note=lambda *numbers: None)
    return made


def knowing(groups, now=1.0, **options) -> Promises:
    """Promises to requests that have their first token."""
    made = promises(**options)
    for group in groups:
        made.note_first_token(group, now)
    return made


# --- slack ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tpot", "left", "step", "generated", "first", "now", "slack"),
    [
        (0.5, 10, 0.25, 5, 1.0, 2.0, 0.5 * (4 + 10) - 1.0 - 10 * 0.25),  # 3.5
        (0.5, 0, 0.25, 5, 1.0, 2.0, 1.0),  # nothing more to come: 4 tokens promised in 2 s, in 1 s there
        (0.5, 0, 0.25, 5, 1.0, 3.0, 0.0),
        (0.5, 0, 0.25, 5, 1.0, 3.5, -0.5),
        (0.5, 8, 0.75, 1, 0.0, 0.0, 4.0 - 6.0),  # slower than promised
        (0.5, 8, 0.0, 1, 0.0, 0.0, 4.0),  # nothing is known of the pace
    ],
)
def test_slack(tpot, left, step, generated, first, now, slack):
    assert promises(tpot, left, step).slack(decoding(generated, first), now) == slack


# --- the predictor ----------------------------------------------------------------------------------------


def bin_of(length: int) -> tuple[int, int]:
    """A histogram's bins, written otherwise: quarters of octaves."""
    octave = math.floor(math.log2(length))
    return octave, int((length - 2**octave) * 4 // 2**octave)


@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(1, 300), st.integers(1, 5000))
def test_a_histogram_predicts_the_mean_of_the_longer_ones(lengths, first, generated):
    """Exactly that of those in longer bins, and so up to a bin's width that of those that were longer."""
    histogram = LengthHistogram(first)
    for length in lengths:
        histogram.observe(ANY, length)
    longer = [length for length in [first, *lengths] if bin_of(length) > bin_of(generated)]
    expected = sum(longer) / len(longer) - generated if longer else 0.0
    assert histogram.left(ANY, generated) == expected
    assert all(length > generated for length in longer)
    passed_over = [n for n in [first, *lengths] if n > generated and n not in longer]
    assert all(length < generated * 1.25 + 1 for length in passed_over)


def test_a_histogram_before_anything_has_ended():
    histogram = LengthHistogram(128)
    assert histogram.left(ANY, 0) == 128 and histogram.left(ANY, 28) == 100
    assert histogram.left(ANY, 128) == histogram.left(ANY, 10**9) == 0.0
    histogram.observe(ANY, 2**60)  # no length is too long to count
    assert histogram.left(ANY, 0) == (128 + 2**60) / 2


# --- the pace ---------------------------------------------------------------------------------------------


@given(
    st.integers(0, 64),
    st.integers(0, 64),
    st.lists(st.integers(0, 500), min_size=2, max_size=40).filter(lambda x: len(set(x)) > 1),
)
def test_pace_recovers_a_line(step, token, prompt_tokens):
    pace = Pace()
    for x in prompt_tokens:
        pace.note(x, step * EXACT + token * EXACT * x)
    assert pace.token_seconds == pytest.approx(token * EXACT, rel=1e-6, abs=1e-9)
    assert pace.step_seconds == pytest.approx(step * EXACT, rel=1e-6, abs=1e-6)


def test_two_points_give_their_line_exactly():
    pace = Pace()
    assert (pace.token_seconds, pace.step_seconds) == (0.0, 0.0)
    pace.note(0, 2.0)
    assert (pace.token_seconds, pace.step_seconds) == (0.0, 2.0)
    pace.note(4, 4.0)
    assert (pace.token_seconds, pace.step_seconds) == pytest.approx((0.5, 2.0), abs=1e-12)


def test_prompts_of_one_size_alone_take_all_of_the_time():
    pace = Pace()
    for _ in range(3):
        pace.note(8, 2.0)
    assert pace.token_seconds == pytest.approx(0.25, abs=1e-12)
    assert pace.step_seconds == pytest.approx(0.0, abs=1e-12)


def test_older_iterations_weigh_less():
    pace = Pace()
    for seconds in [1.0] * 200 + [3.0] * 200:
        pace.note(0, seconds)
    old = (1 - 1 / 64) ** 200
    assert pace.step_seconds == pytest.approx(3.0 - 2.0 * old * (1 - old) / (1 - old**2), rel=1e-9)


def test_a_pace_is_never_below_nothing():
    pace = Pace()
    pace.note(0, 5.0)
    pace.note(10, 1.0)
    assert pace.token_seconds == 0.0 and pace.step_seconds > 0.0


# --- what is let in ---------------------------------------------------------------------------------------


def test_prompts_take_no_more_than_who_can_lose_least_may_lose():
    tight, loose = decoding(5, 0.0), decoding(50, 0.0)
    groups = [loose, tight]
    least = promises().slack(tight, 1.0)
    assert least == 0.5 * 14 - 1.0 - 2.5 == 3.5 < promises().slack(loose, 1.0)
    assert knowing(groups).allow(28, groups, 1.0)
    assert not knowing(groups).allow(29, groups, 1.0)
    assert promises().allow(10**9, [decoding(5, None)], 1.0), "none has its first token"


def test_a_broken_promise_holds_no_other_up():
    broken, kept = decoding(5, -100.0), decoding(5, 0.0)
    groups = [broken, kept]
    assert promises().slack(broken, 1.0) < 0
    assert knowing(groups).allow(28, groups, 1.0)
    assert not knowing(groups).allow(29, groups, 1.0)
    assert knowing([broken]).allow(10**9, [broken], 1.0)


def test_a_promise_that_breaks_is_no_more_looked_at():
    breaks, kept = decoding(5, 0.0), decoding(25, 0.0)
    groups = [breaks, kept]
    made = knowing(groups, 0.0)  # may lose 4.5 s, and 14.5 s
    assert made.slack(breaks, 5.0) == -0.5 and made.slack(kept, 5.0) == 9.5
    assert made.allow(76, groups, 5.0) and not made.allow(77, groups, 5.0)


groups = st.lists(
    st.builds(decoding, st.integers(1, 40), st.integers(-20, 0).map(float)), min_size=1, max_size=6
)


@given(groups, st.lists(st.tuples(st.integers(0, 8), st.integers(0, 120)), min_size=1, max_size=30))
def test_what_is_remembered_allows_nothing_that_the_rule_refuses(groups, questions):
    """While slacks change by time alone. A promise that is about to break is kept as long as all of them are
    not looked at again, so that what is remembered may refuse more."""
    made, now = knowing(groups, 0.0), 0.0
    for quarters, tokens in questions:
        now += quarters / 4
        slacks = [made.slack(group, now) for group in groups]
        least = min((slack for slack in slacks if slack >= 0), default=math.inf)
        if made.allow(tokens, groups, now):
            assert tokens * 0.125 <= least
        made.note_iteration(tokens, 0.25)


def test_a_new_request_is_remembered():
    made = promises(left=0.0)
    assert made.allow(10**6, [], 0.0)
    first = decoding(5, 0.0)
    made.note_first_token(first, 0.0)  # may lose 2 s
    assert made.allow(16, [first], 0.0) and not made.allow(17, [first], 0.0)
    assert made.allow(8, [first], 1.0) and not made.allow(9, [first], 1.0)
    made.note_first_token(decoding(2, 0.0), 2.0)  # broken already
    assert made.allow(0, [first], 2.0)


def test_refused_questions_look_at_every_request_now_and_then():
    looked = []

    class Looking(Left):
        def left(self, request, generated):
            looked.append(generated)
            return super().left(request, generated)

    made = knowing([decoding(5)])
    made.predictor = Looking(10.0)
    for _ in range(32):
        assert not made.allow(10**6, [decoding(5)], 1.0)
        made.note_iteration(0, 0.25)
    assert len(looked) == 4


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tpot", [0, 0.0, -1, math.inf, math.nan])
def test_a_promise_of_no_time(tpot):
    with pytest.raises(InvalidArgument, match=rf"\[Promises\] tpot is {tpot}: give seconds over 0"):
        Promises(tpot)


@pytest.mark.parametrize("tpot", ["soon", None, [1]])
def test_a_promise_of_no_number(tpot):
    with pytest.raises(InvalidArgument, match=r"\[Promises\] tpot"):
        Promises(tpot)


@pytest.mark.parametrize("first", [0, -1, math.nan])
def test_a_first_length_of_no_token(first):
    with pytest.raises(
        InvalidArgument, match=rf"\[LengthHistogram\] first is {first}: give at least 1 token"
    ):
        LengthHistogram(first)


def test_a_predictor_of_ones_own_is_told_of_ends():
    predictor = Left(3.0)
    made = Promises(0.5, predictor)
    assert made.predictor is predictor and isinstance(Promises(1).predictor, LengthHistogram)
    made.predictor.observe(ANY, 7)
    assert predictor.ended == [(ANY, 7)]

"""Latencies that are promised: what time is left, to the digit, and which request leaves for which."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtensor.serving import LengthHistogram, Pace, Promises, Request, SampleGroup

EXACT = 2.0**-10  # sums and products of a few of these are exact
PACE = {"seconds": 0.25, "token_seconds": 0.0, "prompt_share": 0.0, "copy_seconds": 0.0}


def group(prompt=8, generated=0, first_token_at=0.0, **state) -> SampleGroup:
    """A request that decodes, or that waits if it has generated nothing."""
    made = SampleGroup(Request("any", prompt, 1000), 0)
    sequence = made.live[0]
    sequence.known += generated
    sequence.computed = sequence.known - 1 if generated else 0
    made.first_token_at = first_token_at if generated else None
    for name, value in state.items():
        setattr(made, name, value)
    return made


def promises(tpot=0.5, ttft=100.0, slower=1.0, left=10.0, earned=1000.0, **pace) -> Promises:
    made = Promises(tpot, ttft, slower)
    made.lengths = SimpleNamespace(left=lambda generated: left, observe=lambda length: None)
    made.pace = SimpleNamespace(**PACE | pace)
    made._earned = earned
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
        (0.5, 8, 0.25, 0, 0.0, 9.0, math.inf),  # no token yet
    ],
)
def test_slack(tpot, left, step, generated, first, now, slack):
    made = promises(tpot, left=left, seconds=step)
    assert made._slack(group(generated=generated, first_token_at=first), now) == slack


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
        histogram.observe(length)
    longer = [length for length in [first, *lengths] if bin_of(length) > bin_of(generated)]
    expected = sum(longer) / len(longer) - generated if longer else 0.0
    assert histogram.left(generated) == expected
    assert all(length > generated for length in longer)
    passed_over = [n for n in [first, *lengths] if n > generated and n not in longer]
    assert all(length < generated * 1.25 + 1 for length in passed_over)


def test_a_histogram_before_anything_has_ended():
    histogram = LengthHistogram(128)
    assert histogram.left(0) == 128 and histogram.left(28) == 100
    assert histogram.left(128) == histogram.left(10**9) == 0.0
    histogram.observe(2**60)  # no length is too long to count
    assert histogram.left(0) == (128 + 2**60) / 2


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


OLD = (1 - 1 / 64) ** 200  # of what was 200 iterations ago


@pytest.mark.parametrize(
    ("notes", "token_seconds", "step_seconds"),
    [
        ([], 0.0, 0.0),
        ([(0, 2.0)], 0.0, 2.0),
        ([(0, 2.0), (4, 4.0)], 0.5, 2.0),
        ([(8, 2.0)] * 3, 0.25, 0.0),  # prompts of one size alone take all of the time
        ([(0, 1.0)] * 200 + [(0, 3.0)] * 200, 0.0, 3.0 - 2.0 * OLD * (1 - OLD) / (1 - OLD**2)),
    ],
)
def test_pace_by_hand(notes, token_seconds, step_seconds):
    pace = Pace()
    for tokens, seconds in notes:
        pace.note(tokens, seconds)
    assert (pace.token_seconds, pace.step_seconds) == pytest.approx((token_seconds, step_seconds), abs=1e-12)


def test_a_pace_is_never_below_nothing():
    pace = Pace()
    pace.note(0, 5.0)
    pace.note(10, 1.0)
    assert pace.token_seconds == 0.0 and pace.step_seconds > 0.0


def test_what_copies_add_is_kept_apart():
    pace = Pace()
    for _ in range(3):
        pace.note(0, 1.0)
        pace.note(4, 2.0)
    line = pace.step_seconds, pace.token_seconds
    assert pace.copy_seconds == 0.0
    pace.note(4, 5.0, copied_tokens=6)  # 3 s more than its line
    assert pace.copy_seconds == pytest.approx(0.5)
    pace.note(0, 0.5, copied_tokens=6)  # hidden behind the computation
    assert 0.2 < pace.copy_seconds < 0.26
    assert (pace.step_seconds, pace.token_seconds) == line


def test_the_share_of_prompts():
    pace = Pace()
    assert pace.prompt_share == pace.seconds == 0.0
    for _ in range(200):
        pace.note(0, 1.0)
        pace.note(4, 3.0)
    assert pace.seconds == pytest.approx(2.0, rel=0.01)
    assert pace.prompt_share == pytest.approx(0.5, rel=0.01)


# --- which one leaves -------------------------------------------------------------------------------------


def test_those_leave_that_have_generated_most():
    short, longer, longest = (group(8, generated) for generated in (2, 10, 20))
    running = [longer, short, longest]
    made = promises()
    assert made.leavers(27, running) == [longest] and made.leavers(28, running) == [longest, longer]
    assert made.leavers(27 + 17 + 9, running) == [longest, longer, short]
    assert made.leavers(27 + 17 + 10, running) is None, "there is no room for it at all"


def test_some_never_leave():
    two = SampleGroup(Request("two", 8, 100, samples=2), 0)
    for sequence in two.live:
        sequence.known, sequence.computed = 28, 27
    two.first_token_at = 0.0
    computing = group(8, 0)
    begins = group(8, 1)
    was_away = group(8, 20, away=1.0)
    assert promises().leavers(1, [two, computing, begins, was_away]) is None


# --- when -------------------------------------------------------------------------------------------------

# Two that decode free (108 + 58) / 10 tokens a step and grow by 2: the prompt waits 29 / 14.6 = 2 steps,
# and the one that leaves 108 / 14.6 more, of its 109 tokens.
LONG, OTHER = {"prompt": 8, "generated": 101}, {"prompt": 8, "generated": 51}


def is_worth(made, now=1.0, prompt=29, leaves=True, swapped=(), **waits):
    long, other = group(**LONG), group(**OTHER)
    waiting = group(prompt, 0, **waits)
    return made.worth(waiting, [long] if leaves else [], [long, other], list(swapped), now)


def test_worth_it():
    assert is_worth(promises())


@pytest.mark.parametrize(
    ("made", "case"),
    [
        pytest.param(promises(prompt_share=0.6), {}, id="most of the time goes to prompts"),
        pytest.param(promises(ttft=0.5), {}, id="its own promise is broken"),
        pytest.param(promises(token_seconds=4.0), {}, id="it will be broken before its prompt is computed"),
        pytest.param(promises(tpot=0.05), {}, id="that of the one that leaves would break"),
        pytest.param(promises(earned=0.0), {}, id="the account is empty"),
        pytest.param(promises(slower=0.0), {}, id="nothing may be slower"),
        pytest.param(promises(copy_seconds=1.0), {}, id="copies cost the others more than it gains"),
        pytest.param(promises(left=1000.0), {}, id="none ends before all have grown"),
        pytest.param(promises(), {"prompt": 1}, id="it gains too little"),
        pytest.param(
            promises(),
            {"swapped": [group(8, 200, left_at=0.0) for _ in range(40)]},
            id="many are away already",
        ),
        pytest.param(
            promises(),
            {"leaves": False, "swapped": [group(8, 3, first_token_at=-100.0, left_at=0.5)]},
            id="a promise that is broken: it comes back first",
        ),
    ],
)
def test_not_worth_it(made, case):
    assert not is_worth(made, **case)


def test_a_broken_promise_of_one_that_stays_holds_nobody_up():
    broken = group(8, 51, first_token_at=-1000.0)
    made, long = promises(token_seconds=0.01), group(**LONG)
    assert made._slack(broken, 1.0) < 0
    assert made.worth(group(29), [long], [long, broken], [], 1.0)


def test_a_promise_of_one_that_stays_is_kept():
    """It waits for the prompt of 29 tokens: 2.9 s."""
    made, long = promises(token_seconds=0.1), group(**LONG)
    tight, loose = (group(8, 51, first_token_at=1.0 - lost) for lost in (25.0, 24.0))
    assert 2.4 < made._slack(tight, 1.0) < 2.9 < made._slack(loose, 1.0)
    assert not made.worth(group(29), [long], [long, tight], [], 1.0)
    assert made.worth(group(29), [long], [long, loose], [], 1.0)


def test_short_waits_are_not_worth_the_account():
    made = promises()
    made.note_first_token(group(8, 1, first_token_at=10.0))  # 10 s after its arrival
    assert not is_worth(made, now=2.9) and is_worth(made, now=3.1)
    for _ in range(600):
        made.note_first_token(group(8, 1, first_token_at=0.0))
    assert is_worth(made, now=2.9), "long waits are forgotten"


def test_the_account():
    made = promises(slower=0.25, earned=0.0)
    made.note_end(group(8, 11, first_token_at=0.0), 10.0)  # a second a token
    assert (made._earned, made._spent) == (1.0, 0.0)
    made.note_end(group(8, 11, first_token_at=0.0, away=4.0), 10.0)
    assert (made._earned, made._spent) == pytest.approx((1.6, 0.4))
    made.note_end(group(8, 1, first_token_at=0.0), 10.0)  # has no time per token
    assert made._earned == pytest.approx(1.6)
    assert not is_worth(made), "more was spent than a quarter"
    for _ in range(4):
        made.note_end(group(8, 11, first_token_at=0.0), 10.0)
    assert is_worth(made)

"""Latencies that are promised to requests, and how much time the promises leave for others.

After LayerKV (arXiv 2410.00428), section 3, as its abstract and this project's notes give it. The time that a
request may still lose is ``tpot * (N_past + N_future) - (T_past + T_future)``. The server's own pace is
measured. One rule is not the paper's: a promise that is already broken delays no other request.
"""

from __future__ import annotations

import math
from collections import abc
from typing import Protocol

from vtensor._arguments import number
from vtensor.errors import InvalidArgument
from vtensor.serving.requests import Request, SampleGroup

__all__ = ["LengthHistogram", "LengthPredictor", "Pace", "Promises"]

_PER_OCTAVE, _BINS = 4, 4 * 40  # of a histogram
_PLANS = 8  # plans from one check of every request to the next
_KEEP = 1 - 1 / 64  # the weight that older iterations keep at each new one


class LengthPredictor(Protocol):
    """Predicts how many tokens a request will still generate. It may be wrong."""

    def left(self, request: Request, generated: int) -> float:
        """Tokens beyond those that it has ``generated``."""

    def observe(self, request: Request, generated: int) -> None:
        """Takes note of a request that has ended."""


class LengthHistogram:
    """Predicts from the lengths of requests that have ended: the mean of those longer than the request is
    now. It reads nothing of the request itself.

    Args:
        first: tokens: the length of one imaginary request that ended before all others.

    Raises InvalidArgument for a ``first`` below 1.
    """

    def __init__(self, first: int = 128) -> None:
        if not first >= 1:
            raise InvalidArgument(f"[LengthHistogram] first is {first}: give at least 1 token")
        self._counts, self._sums = [0] * _BINS, [0] * _BINS
        self._longer = [0.0] * _BINS  # for each bin, the mean of the lengths in the bins after it
        self._add(first)

    def left(self, request: Request, generated: int) -> float:
        return max(0.0, self._longer[_bin(generated)] - generated)

    def observe(self, request: Request, generated: int) -> None:
        self._add(generated)

    def _add(self, length: int) -> None:
        place = _bin(length)
        self._counts[place] += 1
        self._sums[place] += length
        count = total = 0
        for i in reversed(range(_BINS)):
            self._longer[i] = total / count if count else 0.0
            count += self._counts[i]
            total += self._sums[i]


def _bin(length: int) -> int:
    if length == 0:
        return 0
    octave = length.bit_length()
    return min(octave * _PER_OCTAVE + (length * _PER_OCTAVE >> octave - 1) % _PER_OCTAVE, _BINS - 1)


class Pace:
    """The time of iterations: a line through their seconds over the prompt tokens that they computed. Older
    iterations weigh less."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, prompt_tokens: int, seconds: float) -> None:
        new = (1.0, prompt_tokens, seconds, prompt_tokens * prompt_tokens, prompt_tokens * seconds)
        self._sums = tuple(_KEEP * old + more for old, more in zip(self._sums, new, strict=True))  # type: ignore[assignment]

    @property
    def token_seconds(self) -> float:
        """Seconds of a prompt token; 0 before one was computed."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if spread > 1e-9 * n * xx:
            return max(0.0, (n * xy - x * y) / spread)
        return y / x if x else 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of an iteration without prompt tokens."""
        n, x, y, _, _ = self._sums
        return max(0.0, (y - self.token_seconds * x) / n) if n else 0.0


class Promises:
    """Decides whether prompts may be computed now. They delay the requests that are decoding, so all of them
    together must take less time than each decoding request may still lose.

    Args:
        tpot: seconds a token, promised to each request as the mean over its tokens after the first.
        predictor: predicts the tokens that requests will still generate; a :class:`LengthHistogram` unless
            given.

    Raises InvalidArgument for a ``tpot`` that is not over 0.
    """

    def __init__(self, tpot: float, predictor: LengthPredictor | None = None) -> None:
        self.tpot = number("Promises", "tpot", tpot)
        if not 0 < self.tpot < math.inf:
            raise InvalidArgument(f"[Promises] tpot is {tpot}: give seconds over 0")
        self.predictor: LengthPredictor = LengthHistogram() if predictor is None else predictor
        self.pace = Pace()
        self._least, self._least_at = math.inf, 0.0
        self._plans = _PLANS  # since all requests were checked

    def slack(self, group: SampleGroup, now: float) -> float:
        """Seconds that a request with its first token may still lose; below 0 if its promise is broken."""
        assert group.first_token_at is not None
        past = group.live[0].generated - 1
        left = self.predictor.left(group.request, past + 1)
        future = left * self.pace.step_seconds
        return self.tpot * (past + left) - (now - group.first_token_at) - future

    def allow(self, prompt_tokens: int, decoding: abc.Iterable[SampleGroup], now: float) -> bool:
        """Whether ``prompt_tokens`` (begun prompts included) may be computed beside these requests."""
        takes = prompt_tokens * self.pace.token_seconds
        # A slack shrinks by at most the time that passes, so few plans check every request.
        if takes <= self._least - (now - self._least_at):
            return True
        if self._plans < _PLANS:
            return False
        slacks = (self.slack(group, now) for group in decoding if group.first_token_at is not None)
        self._least = min((slack for slack in slacks if slack >= 0), default=math.inf)
        self._least_at, self._plans = now, 0
        return takes <= self._least

    def note_iteration(self, prompt_tokens: int, seconds: float) -> None:
        self._plans += 1
        self.pace.note(prompt_tokens, seconds)

    def note_first_token(self, group: SampleGroup, now: float) -> None:
        slack = self.slack(group, now)
        if slack >= 0:
            self._least = min(self._least - (now - self._least_at), slack)
            self._least_at = now

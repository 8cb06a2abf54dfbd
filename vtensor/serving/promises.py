"""Latencies that are promised to requests, and which requests wait in host memory so that others begin.

After LayerKV (arXiv 2410.00428), section 3, as its abstract and this project's notes give it. The time that a
request may still lose is ``tpot * (N_past + N_future) - (T_past + T_future)``. The server's own pace is
measured. Two rules are not the paper's: K and V leave of those requests that lose least by it, not of the
prompt that begins; and what all of them lose together is kept in an account.
"""

from __future__ import annotations

import math
from collections import abc

from vtensor._base.arguments import integer, number, seconds
from vtensor.errors import InvalidArgument
from vtensor.serving.requests import SampleGroup

_PER_OCTAVE, _BINS = 4, 4 * 40  # of a histogram
_KEEP = 1 - 1 / 64  # the weight that older iterations keep at each new one
_FORGET = 1 / 256  # the part of the longest wait that is forgotten with each first token
_MOSTLY = 0.5  # of the time for prompts: then it is the computation that is short, not memory
_LONG = 0.3  # of the longest wait: shorter ones are not worth the account


class LengthHistogram:
    """Predicts from the lengths of requests that have ended: the mean of those longer than the request is
    now. It reads nothing of the request itself.

    Args:
        first: tokens: the length of one imaginary request that ended before all others.

    Raises InvalidArgument for a ``first`` below 1.
    """

    def __init__(self, first: int = 128) -> None:
        first = integer("LengthHistogram", "first", first, 1)
        self._counts, self._sums = [0] * _BINS, [0] * _BINS
        self._longer = [0.0] * _BINS  # for each bin, the mean of the lengths in the bins after it
        self.observe(first)

    def left(self, generated: int) -> float:
        """Predicts the tokens beyond those that a request has ``generated``."""
        return max(0.0, self._longer[_bin(generated)] - generated)

    def observe(self, length: int) -> None:
        """Takes note of a request that has ended."""
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
    """The time of iterations: a line through their seconds over the prompt tokens that they computed, and
    what copies to host memory and back add. Older iterations weigh less."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._copies = (0.0, 0.0)  # tokens, and seconds that the line does not explain

    def note(self, prompt_tokens: int, seconds: float, copied_tokens: int = 0) -> None:
        """Notes an iteration that computed ``prompt_tokens`` beside one token of each request that decodes,
        while K and V of ``copied_tokens`` moved."""
        if copied_tokens:
            more = seconds - self.step_seconds - self.token_seconds * prompt_tokens
            tokens, excess = self._copies
            self._copies = (_KEEP * tokens + copied_tokens, _KEEP * excess + max(0.0, more))
            return
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

    @property
    def seconds(self) -> float:
        """Seconds of an iteration; 0 before the first."""
        n, _, y, _, _ = self._sums
        return y / n if n else 0.0

    @property
    def prompt_share(self) -> float:
        """The part of the time that prompts take."""
        _, x, y, _, _ = self._sums
        return min(1.0, self.token_seconds * x / y) if y else 0.0

    @property
    def copy_seconds(self) -> float:
        """Seconds by which the copy of a token's K and V makes an iteration longer."""
        tokens, excess = self._copies
        return excess / tokens if tokens else 0.0


class Promises:
    """Decides when requests leave for host memory, so that a prompt can begin that finds no room.

    Those leave that have generated most: of their time per token the wait takes least. They do so only if
    memory is what is short, if the prompt gains more than they lose, if no promise breaks by it, and if the
    account allows it. Each leaves at most once.

    Args:
        tpot: seconds a token, promised to each request as the mean over its tokens after the first.
        ttft: seconds from a request's arrival to its first token. None leaves for a request whose promise is
            broken already: where requests come faster than they are served, all are.
        slower: the part by which waits in host memory may lengthen the mean time per token of all requests.

    Raises InvalidArgument for a ``tpot`` or ``ttft`` that is not over 0, and for a ``slower`` below 0.
    """

    def __init__(self, tpot: float, ttft: float = 3.0, slower: float = 0.05) -> None:
        self.tpot = seconds("Promises", "tpot", tpot)
        self.ttft = seconds("Promises", "ttft", ttft)
        self.slower = number("Promises", "slower", slower)
        if not 0 <= self.slower < math.inf:
            raise InvalidArgument(f"[Promises] slower is {slower}: give a part of the time, at least 0")
        self.lengths = LengthHistogram()
        self.pace = Pace()
        self._earned = self._spent = 0.0  # seconds a token, summed over requests that have ended
        self._longest = 0.0  # seconds to a first token, lately

    def _slack(self, group: SampleGroup, now: float) -> float:
        """Seconds that a request may still lose; below 0 if its promise is broken."""
        if group.first_token_at is None:
            return math.inf
        past = _generated(group) - 1
        left = self.lengths.left(past + 1)
        return self.tpot * (past + left) - (now - group.first_token_at) - left * self.pace.seconds

    def leavers(self, tokens: int, running: abc.Iterable[SampleGroup]) -> list[SampleGroup] | None:
        """The requests that would leave to make room for so many tokens. None if there are too few."""
        chosen: list[SampleGroup] = []
        for group in sorted(filter(_may_leave, running), key=_generated, reverse=True):
            if tokens <= 0:
                break
            chosen.append(group)
            tokens -= group.live[0].computed
        return chosen if tokens <= 0 else None

    def worth(
        self,
        prompt: SampleGroup,
        leavers: abc.Sequence[SampleGroup],
        running: abc.Sequence[SampleGroup],
        swapped: abc.Iterable[SampleGroup],
        now: float,
    ) -> bool:
        """Whether a waiting request should begin now, while ``leavers`` and those that are ``swapped`` wait
        for room in its place."""
        pace, waited = self.pace, now - prompt.arrived_at
        begin = prompt.prompt_tokens * pace.token_seconds
        if waited < _LONG * min(self._longest, self.ttft) or waited + begin > self.ttft:
            return False
        gone = [*leavers, *swapped]
        stay = [group for group in running if group not in leavers]
        if pace.prompt_share > _MOSTLY:
            return False
        # Tokens of memory: requests that end give theirs back, and the others grow.
        freed = sum(map(self._freed, running)) - len(running)
        if freed <= 0:
            return False
        wait = prompt.prompt_tokens / freed * pace.seconds
        absence = wait + _tokens(gone) / freed * pace.seconds
        copies = _tokens(leavers) * pace.copy_seconds
        # As parts of its time to the first token, and of theirs. A wait for other prompts is no gain.
        gain = wait * (1 - pace.prompt_share) / (wait + begin + pace.seconds)
        loss = self._a_token(absence, leavers) + self._a_token(copies, stay)
        if gain * pace.seconds <= loss:
            return False
        if any(self._slack(group, now) < absence for group in gone):
            return False
        # A promise that is broken already holds no other up.
        if any(0 <= self._slack(group, now) < begin + copies for group in stay):
            return False
        before = sum(group.time_away(now) / self._length(group) for group in [*stay, *gone])
        return self._spent + before + self._a_token(absence, gone) <= self.slower * self._earned

    def note_first_token(self, group: SampleGroup) -> None:
        assert group.first_token_at is not None
        self._longest = max(self._longest * (1 - _FORGET), group.first_token_at - group.arrived_at)

    def note_end(self, group: SampleGroup, now: float) -> None:
        """Takes note of a request that has ended."""
        length = max(sequence.generated for sequence in group.sequences)
        self.lengths.observe(length)
        if length > 1 and group.first_token_at is not None:
            away = group.away / (length - 1)
            self._spent += away
            self._earned += (now - group.first_token_at) / (length - 1) - away

    def _a_token(self, seconds: float, groups: abc.Iterable[SampleGroup]) -> float:
        """What a loss adds to the times per token of some requests, in sum."""
        return sum(seconds / self._length(group) for group in groups)

    def _length(self, group: SampleGroup) -> float:
        """The tokens after the first that a request will have generated in the end."""
        generated = _generated(group)
        return max(1.0, generated + self.lengths.left(generated) - 1)

    def _freed(self, group: SampleGroup) -> float:
        """The tokens that a request gives back in each iteration, if it may end in any of those to come."""
        sequence = group.live[0]
        return sequence.computed / max(1.0, self.lengths.left(sequence.generated))


def _generated(group: SampleGroup) -> int:
    return group.live[0].generated


def _tokens(groups: abc.Iterable[SampleGroup]) -> int:
    return sum(sequence.computed for group in groups for sequence in group.holders)


def _may_leave(group: SampleGroup) -> bool:
    sequence = group.live[0]
    decodes = sequence.generated > 1 and sequence.known - sequence.computed == 1
    return decodes and len(group.sequences) == 1 and group.away == 0 and group.first_token_at is not None

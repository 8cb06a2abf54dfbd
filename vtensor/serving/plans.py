"""The plan of an iteration, and counts of all iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vtensor.serving.requests import SampleGroup, TokenSequence


class Work(NamedTuple):
    """Tokens ``[start, stop)`` of a sequence. Their K and V go to these positions of its slot."""

    sequence: TokenSequence
    start: int
    stop: int


@dataclass
class Plan:
    """One iteration."""

    work: list[Work] = field(default_factory=list)
    """The decoding sequences (one token each) first, then pieces of prompts."""
    sampled: list[tuple[int, TokenSequence]] = field(default_factory=list)
    """Pairs of the index of a work and the sequence that gets a token from its last logits."""
    admitted: list[SampleGroup] = field(default_factory=list)
    """Requests whose first tokens are computed here."""
    preempted: list[SampleGroup] = field(default_factory=list)
    """Requests that had to make room: swapped out, or back among the waiting."""
    failed: list[SampleGroup] = field(default_factory=list)
    """Requests that the cache cannot hold even alone."""
    cancelled: list[SampleGroup] = field(default_factory=list)
    """Requests that were cancelled since the last plan."""
    swapped_in: list[int] = field(default_factory=list)
    """Slots that are being swapped in: call ``cache.wait(slot, layer)`` before each layer reads them."""
    tokens: int = 0
    """Tokens computed."""
    ended: list[SampleGroup] | None = None
    """Requests that ended with this plan; None until it is complete."""

    def __bool__(self) -> bool:
        return bool(self.work)


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made."""

    admitted: int = 0
    finished: int = 0
    failed: int = 0
    recomputed: int = 0
    """Preemptions that gave up computed K and V."""
    swapped: int = 0
    """Preemptions that moved K and V to host memory."""
    prompt_tokens: int = 0
    """Tokens in the prompts of admitted requests."""
    reused_tokens: int = 0
    """The prompt tokens that published prefixes covered."""
    computed_tokens: int = 0
    left: int = 0
    """Swaps that made room for a waiting prompt. The requests that ran did not need it."""


def decodes(work: Work) -> bool:
    """Whether a work is the last known token of a sequence, and that was generated."""
    sequence = work.sequence
    return sequence.group.prompt_tokens <= work.start == sequence.known - 1


def slot_of(sequence: TokenSequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def target(sequence: TokenSequence) -> int:
    """The tokens of a sequence to compute before it samples, or is forked."""
    return sequence.known if sequence.group.forked else sequence.group.prompt_tokens


def add_piece(plan: Plan, sequence: TokenSequence, most: int) -> int:
    """Plans the next tokens of a sequence, at most so many. Returns where they end. At the end of a prompt
    all its samples get a token."""
    start = sequence.computed
    stop = min(target(sequence), start + most)
    if stop > start:
        if stop == sequence.known:
            followers = [sequence] if sequence.group.forked else sequence.group.live
            plan.sampled += [(len(plan.work), follower) for follower in followers]
        plan.work.append(Work(sequence, start, stop))
        plan.tokens += stop - start
    return stop

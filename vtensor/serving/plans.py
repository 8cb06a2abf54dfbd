"""What an iteration computes, and how many did what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vtensor.serving.requests import SampleGroup, TokenSequence

__all__ = ["Plan", "SchedulerStats", "Walk", "Work", "add_piece", "next_piece", "slot_of", "target"]


class Work(NamedTuple):
    """Tokens ``[start, stop)`` of a sequence, whose K and V go to these positions of its slot."""

    sequence: TokenSequence
    start: int
    stop: int


class Walk(Protocol):
    """Pieces of prompts that are computed band by band: :class:`vtensor.serving.LayerWalk`."""

    work: list[Work]

    @property
    def begun(self) -> bool: ...

    def enter(self, layer: int) -> None: ...

    def finish(self) -> None: ...


@dataclass
class Plan:
    """One iteration."""

    work: list[Work] = field(default_factory=list)
    """The decoding sequences (one token each) first, then pieces of prompts."""
    sampled: list[tuple[int, TokenSequence]] = field(default_factory=list)
    """Who gets a token from the logits at the end of which work (its index)."""
    admitted: list[SampleGroup] = field(default_factory=list)
    """Requests that have their first tokens computed here."""
    preempted: list[SampleGroup] = field(default_factory=list)
    """Requests that had to make room: swapped out, or back among the waiting."""
    failed: list[SampleGroup] = field(default_factory=list)
    """Requests that the cache cannot hold even alone."""
    cancelled: list[SampleGroup] = field(default_factory=list)
    """Requests that were cancelled since the last one."""
    swapped_in: list[int] = field(default_factory=list)
    """Slots on their way back: ``cache.wait(slot, layer)`` before each layer reads them."""
    tokens: int = 0
    """Tokens computed."""
    ended: list[SampleGroup] | None = None
    """Requests that ended with it; None until it is complete."""

    walk: Walk | None = None
    """The pieces of prompts, the last of ``work``, that are computed band by band."""

    def __bool__(self) -> bool:
        return bool(self.work)

    def enter(self, layer: int) -> None:
        """Makes a layer ready for the plan's work. To be called before K and V of each layer are written and
        read, in the order of layers.

        Raises:
            InvalidArgument: layers are left out.
            OutOfPages: memory was lost that the plan counted on. Abandon it.
        """
        if self.walk is not None:
            self.walk.enter(layer)


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made."""

    admitted: int = 0
    finished: int = 0
    failed: int = 0
    recomputed: int = 0
    """Preemptions that gave up what was computed."""
    swapped: int = 0
    """Preemptions that moved it to host memory."""
    prompt_tokens: int = 0
    """Of admitted requests."""
    reused_tokens: int = 0
    """Of those, the ones that published prefixes covered."""
    computed_tokens: int = 0
    layered: int = 0
    """Requests whose prompts were computed band by band."""


def slot_of(sequence: TokenSequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def target(sequence: TokenSequence) -> int:
    """How far a sequence is computed before it is its turn to sample, or to be forked."""
    return sequence.known if sequence.group.forked else sequence.group.prompt_tokens


def next_piece(plan: Plan, sequence: TokenSequence, start: int, token_budget: int) -> Work | None:
    """As much of a sequence from ``start`` on as the budget leaves beside what is planned."""
    stop = min(target(sequence), start + token_budget - plan.tokens)
    return Work(sequence, start, stop) if stop > start else None


def add_piece(plan: Plan, piece: Work) -> None:
    """Plans a piece. Who gets a token at its end: all the samples of a prompt, where it is theirs."""
    sequence = piece.sequence
    if piece.stop == sequence.known:
        followers = [sequence] if sequence.group.forked else sequence.group.live
        plan.sampled += [(len(plan.work), follower) for follower in followers]
    plan.work.append(piece)
    plan.tokens += piece.stop - piece.start

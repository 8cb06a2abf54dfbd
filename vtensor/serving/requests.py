"""Requests, and the progress of each."""

from __future__ import annotations

from array import array
from collections import abc
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from operator import index
from typing import Any, cast

from vtensor._base.arguments import integer, text
from vtensor.errors import InvalidArgument


def token_id(operation: str, token: object) -> int:
    """A token id as an int, from any kind of whole number. Raises InvalidArgument for anything else."""
    try:
        number = index(token)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise InvalidArgument(f"[{operation}] token id {token!r}: give a whole number from 0 to 2**63 - 1")
    return number


def token_ids(operation: str, tokens: abc.Sequence[int | Exception]) -> abc.Sequence[int | Exception]:
    """Token ids as ints, and exceptions as they are. Raises InvalidArgument for anything else."""
    with suppress(TypeError, OverflowError):
        ids = array("q", iter(cast("abc.Sequence[int]", tokens)))
        if min(ids, default=0) >= 0:
            return ids
    return [token if isinstance(token, Exception) else token_id(operation, token) for token in tokens]


@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it.

    Args:
        id: any hashable name, unique among the requests of a scheduler.
        prompt: token ids; or their number if only lengths are known (a replay): nothing is shared then.
        max_new_tokens: tokens to generate, for each sample.
        samples: sequences that continue the prompt. They share its pages, and are preempted together.
        stop: token ids that end a sequence; they count as generated.
        salt: requests share prefixes only with those of the same salt, so that tenants are kept apart.

    A mutable prompt (a list or a tensor) is copied.

    Raises InvalidArgument for arguments of another type, for what is no token id, for an empty prompt, and
    for numbers under one.
    """

    id: abc.Hashable
    prompt: abc.Sequence[int] | int
    max_new_tokens: int
    samples: int = 1
    stop: frozenset[int] = frozenset()
    salt: str = ""

    def __post_init__(self) -> None:
        try:
            hash(self.id)
        except TypeError:
            raise InvalidArgument(f"[Request] id is {self.id!r}: give something hashable") from None
        text("Request", "salt", self.salt)
        object.__setattr__(self, "prompt", self._checked_prompt(self.prompt))
        try:
            stop = frozenset(token_id("Request", token) for token in self.stop)
        except TypeError:
            raise InvalidArgument(
                f"[Request] stop of request {self.id!r} is {self.stop!r}: give a set of token ids"
            ) from None
        object.__setattr__(self, "stop", stop)
        for name in ("max_new_tokens", "samples"):
            number = integer("Request", f"{name} of request {self.id!r}", getattr(self, name), 1)
            object.__setattr__(self, name, number)
        integer("Request", f"the length of the prompt of request {self.id!r}", self.prompt_tokens, 1)

    def _checked_prompt(self, prompt: Any) -> abc.Sequence[int] | int:
        if isinstance(prompt, Integral):  # an int, or numpy's
            return int(prompt)
        try:
            ids = array("Q", list(prompt[:]))  # the fastest type code that refuses negative numbers
            if max(ids, default=0) >= 1 << 63:
                raise OverflowError(f"{max(ids)} is too large")
        except (LookupError, OverflowError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"[Request] the prompt of request {self.id!r} is not of token ids ({error}): give whole "
                "numbers from 0 to 2**63 - 1, or how many they are"
            ) from None
        # A memoryview is a sequence to Python, of bytes that may change.
        fixed = isinstance(prompt, abc.Sequence) and not isinstance(prompt, (abc.MutableSequence, memoryview))
        return cast("abc.Sequence[int]", prompt) if fixed else tuple(ids)

    @property
    def prompt_tokens(self) -> int:
        return self.prompt if isinstance(self.prompt, int) else len(self.prompt)


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class TokenSequence:
    """One continuation of a request's prompt.

    Of its ``known`` tokens (the prompt's and the generated ones) the first ``computed`` are in the cache.
    """

    group: SampleGroup
    index: int
    known: int
    output: list[int] = field(default_factory=list)  # the generated ids; empty if only their number is known
    computed: int = 0
    published: int = 0
    slot: int | None = None

    @property
    def generated(self) -> int:
        """The number of known tokens after the prompt."""
        return self.known - self.group.prompt_tokens

    @property
    def tokens(self) -> list[int]:
        """The known ids, the prompt's first; empty if the prompt is a number."""
        return self.ids(0, self.known)

    def ids(self, start: int, stop: int) -> list[int]:
        """The known ids of the tokens ``[start, stop)``."""
        prompt, before = self.group.request.prompt, self.group.prompt_tokens
        if isinstance(prompt, int):
            return []
        head = list(prompt[start:stop]) if start < before else []
        return head + self.output[max(start - before, 0) : max(stop - before, 0)]


@dataclass(eq=False)
class SampleGroup:
    """The sequences of one request: admitted, preempted and brought back as a whole."""

    request: Request
    order: int  # of arrival
    arrived_at: float = 0.0  # by the scheduler's clock, as the times below
    prompt_tokens: int = field(init=False)
    sequences: list[TokenSequence] = field(init=False)
    live: list[TokenSequence] = field(init=False)  # sequences that have not ended
    status: Status = Status.WAITING
    forked: bool = False  # each live sequence has a slot; before that only the first has
    admitted: bool = False  # at least once
    first_token_at: float | None = None  # if there are promises to keep
    left_at: float | None = None  # for host memory; None if it is not there
    away: float = 0.0  # seconds in host memory, before it came back
    reason: str = ""  # why it failed, or "cancelled"

    def __post_init__(self) -> None:
        self.prompt_tokens = self.request.prompt_tokens
        self.sequences = [TokenSequence(self, i, self.prompt_tokens) for i in range(self.request.samples)]
        self.live = list(self.sequences)
        self.forked = self.request.samples == 1

    def time_away(self, now: float) -> float:
        """Seconds in host memory."""
        return self.away + (0.0 if self.left_at is None else now - self.left_at)

    @property
    def holders(self) -> list[TokenSequence]:
        """The live sequences that have a slot if the group is running or swapped."""
        return self.live if self.forked else self.live[:1]

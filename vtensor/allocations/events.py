"""Recorded allocations: the requests to an allocator, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

from vtensor.errors import InvalidArgument

__all__ = ["MOST_BYTES", "AllocationTrace", "Event", "Kind", "checked"]

MOST_BYTES = 2**50
"""The largest allocation in a trace."""

Kind: TypeAlias = Literal["alloc", "free"]


class Event(NamedTuple):
    """One allocation, or the end of one."""

    kind: Kind
    id: int
    """Names the allocation from its ``alloc`` to its ``free``. Later allocations may reuse the name."""
    bytes: int
    stream: int
    """The stream for which the memory was allocated. Other streams may not take it over without a wait."""


@dataclass(frozen=True)
class AllocationTrace:
    """The allocations and frees of one device.

    Args:
        events: in order. Every ``free`` ends a live allocation and repeats its bytes and its stream.
        notes: the file's notes on its origin.
    """

    events: list[Event]
    notes: list[str] = field(default_factory=list)

    def live_bytes(self) -> list[int]:
        """Bytes asked for and not yet freed, after each event."""
        changes = (event.bytes if event.kind == "alloc" else -event.bytes for event in self.events)
        return list(accumulate(changes))

    @property
    def streams(self) -> int:
        """The number of streams that allocate."""
        return len({event.stream for event in self.events})


def checked(events: Iterable[tuple[str, Event]]) -> Iterable[Event]:
    """Passes events on, and checks that every allocation is freed at most once, with its bytes and stream.

    Args:
        events: the events, each with its place in the file, for errors.

    Raises:
        InvalidArgument: for an event that cannot follow those before it.
    """
    live: dict[int, Event] = {}
    for place, event in events:
        if not 0 < event.bytes <= MOST_BYTES:
            raise InvalidArgument(
                f"[replay-allocations] {place}: {event.bytes:,} bytes: an allocation has 1 to 2**50"
            )
        if event.kind == "alloc":
            if event.id in live:
                raise InvalidArgument(
                    f"[replay-allocations] {place}: {event.id} is allocated again before it is freed: "
                    "events are missing or out of order; record it again"
                )
            live[event.id] = event
        else:
            begun = live.pop(event.id, None)
            if begun is None:
                raise InvalidArgument(
                    f"[replay-allocations] {place}: {event.id} is freed and not allocated: "
                    "events are missing or out of order; record it again"
                )
            if begun[2:] != event[2:]:
                raise InvalidArgument(
                    f"[replay-allocations] {place}: {event.id} is freed with {event.bytes:,} bytes of stream "
                    f"{event.stream}, and was allocated with {begun.bytes:,} of stream {begun.stream}"
                )
        yield event

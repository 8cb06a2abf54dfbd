"""Recorded allocations: the requests to an allocator, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Literal, NamedTuple

from vtensor.errors import InvalidArgument

MOST_BYTES = 2**50
"""The largest allocation in a trace."""


class Event(NamedTuple):
    """One allocation, or the end of one."""

    kind: Literal["alloc", "free"]
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


def malformed(what: str) -> InvalidArgument:
    return InvalidArgument(f"[replay-allocations] {what}")


def checked(events: Iterable[tuple[str, Event]]) -> Iterable[Event]:
    """Passes events on, and refuses one that cannot follow those before it: every allocation is freed at most
    once, with its bytes and stream. Each event has its place in the file."""
    live: dict[int, Event] = {}
    for place, event in events:
        if not 0 < event.bytes <= MOST_BYTES:
            raise malformed(f"{place}: {event.bytes:,} bytes: an allocation has 1 to 2**50")
        if event.kind == "alloc":
            if event.id in live:
                raise malformed(
                    f"{place}: {event.id} is allocated again before it is freed: "
                    "events are missing or out of order; record it again"
                )
            live[event.id] = event
        else:
            begun = live.pop(event.id, None)
            if begun is None:
                raise malformed(
                    f"{place}: {event.id} is freed and not allocated: "
                    "events are missing or out of order; record it again"
                )
            if begun[2:] != event[2:]:
                raise malformed(
                    f"{place}: {event.id} is freed with {event.bytes:,} bytes of stream "
                    f"{event.stream}, and was allocated with {begun.bytes:,} of stream {begun.stream}"
                )
        yield event


def named(
    recorded: Iterable[tuple[str, Event]], live_at_end: Iterable[tuple[str, Event]] = ()
) -> Iterator[tuple[str, Event]]:
    """Gives each allocation a name of its own, in place of its address, which the recorded allocator reuses.

    Allocations from before the recording come first, in order of addresses. They are known from their frees,
    or because they were live when the recording ended. Each event has its place in the file.
    """
    events = list(recorded)
    seen: set[int] = set()
    before: dict[int, tuple[str, Event]] = {}
    for place, event in events:
        if event.kind == "free" and event.id not in seen:
            before[event.id] = place, event._replace(kind="alloc")
        seen.add(event.id)
    for place, event in live_at_end:
        if event.id not in seen:
            before[event.id] = place, event
    names: dict[int, int] = {}
    fresh = count(1)
    for place, event in [*(before[address] for address in sorted(before)), *events]:
        if event.kind == "alloc" and event.id not in names:
            names[event.id] = next(fresh)
        yield place, event._replace(id=names.get(event.id, 0))
        if event.kind == "free":
            names.pop(event.id, None)


def selected(path: Path, found: Mapping[str, int], asked: str | None) -> str:
    """The device of a recording: the one asked for, or the only one. ``found`` has the events of each."""
    there = ", ".join(f"{name} ({number:,} events)" for name, number in found.items())
    if asked is None and len(found) > 1:
        raise malformed(f"{path} has several devices, {there}: choose one with --device")
    if asked is not None and asked not in found:
        raise malformed(f"{path} has no events of {asked}, only of {there}")
    return next(iter(found)) if asked is None else asked

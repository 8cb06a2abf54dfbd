"""Turns addresses, which a recorded allocator reuses, into a trace that begins with nothing allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple

from vtensor.allocations.events import Event, Kind

__all__ = ["RawEvent", "named"]


class RawEvent(NamedTuple):
    """An event as recorded."""

    place: str
    """Its place in the file."""
    kind: Kind
    address: int
    bytes: int
    stream: int


def named(recorded: Iterable[RawEvent], live_at_end: Iterable[RawEvent] = ()) -> Iterator[tuple[str, Event]]:
    """Gives each allocation a name of its own.

    Allocations from before the recording come first, in order of addresses. They are known from their frees,
    or because they were live when the recording ended.

    Args:
        recorded: events in order.
        live_at_end: allocations that existed when the recording ended; those recorded are left out.
    """
    events = list(recorded)
    seen: set[int] = set()
    before: dict[int, RawEvent] = {}
    for event in events:
        if event.kind == "free" and event.address not in seen:
            before[event.address] = event._replace(kind="alloc")
        seen.add(event.address)
    for event in live_at_end:
        if event.address not in seen:
            before[event.address] = event
    names: dict[int, int] = {}
    fresh = count(1)
    for event in [*sorted(before.values(), key=lambda event: event.address), *events]:
        if event.kind == "alloc" and event.address not in names:
            names[event.address] = next(fresh)
        name = names.get(event.address, 0)
        yield event.place, Event(event.kind, name, event.bytes, event.stream)
        if event.kind == "free":
            names.pop(event.address, None)

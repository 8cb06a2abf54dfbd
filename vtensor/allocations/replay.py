"""Replays recorded allocations, and finds the smallest device on which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vtensor.allocations.events import AllocationTrace
from vtensor.allocations.models import PAGE, Allocator, Opened
from vtensor.errors import OutOfPages

ROOM = 1.25
"""The size of a device with some room, as a multiple of the peak of live bytes."""

Progress: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """A completed replay."""

    device_bytes: list[int]
    """Bytes taken of the device after each event."""
    calls: dict[str, int]
    seconds: float | None = None
    """Seconds in the allocator's calls, if it maps real memory."""


@dataclass(frozen=True)
class Need:
    """The needs of an allocator for a trace."""

    name: str
    smallest: int
    """Bytes of the smallest device."""
    peak: int
    """The most bytes live at once."""
    run: Run
    """The replay on the smallest device."""
    with_room: Run | None
    """The replay on a device of ROOM times the peak; None if that is too small."""

    @property
    def of_peak(self) -> float:
        """The smallest device as a multiple of the peak."""
        return self.smallest / self.peak


def replay_allocations(
    trace: AllocationTrace, allocator: Allocator, progress: Progress | None = None
) -> Run | None:
    """Passes every event to an unused allocator. None if it refuses an allocation."""
    addresses: dict[int, int] = {}
    taken = []
    for i, event in enumerate(trace.events):
        if event.kind == "alloc":
            try:
                addresses[event.id] = allocator.allocate(event.bytes, event.stream)
            except OutOfPages:
                return None
        else:
            allocator.free(addresses.pop(event.id), event.bytes, event.stream)
        taken.append(allocator.device_bytes)
        if progress and i % 1024 == 0:
            progress(f"event {i:,} of {len(trace.events):,}")
    return Run(taken, dict(allocator.calls), getattr(allocator, "seconds", None))


def device_needed(
    name: str, opened: Opened, trace: AllocationTrace, progress: Progress | None = None
) -> Need:
    """Finds the smallest device by halving, down to a page.

    An allocator may succeed on one device and fail on a larger one. The device found succeeds, and one with a
    page less fails.

    Args:
        name: name of the allocator.
        opened: opens it.
        trace: the events.
        progress: gets a line now and then.
    """

    def on(pages: int) -> Run | None:
        said = progress and (lambda line: progress(f"{name}, a device of {pages:,} pages: {line}"))
        with opened(pages * PAGE) as allocator:
            return replay_allocations(trace, allocator, said)

    peak = max(trace.live_bytes())
    too_small, enough = (peak - 1) // PAGE, -int(-ROOM * peak // PAGE)
    with_room = found = on(enough)
    while found is None:
        too_small, enough = enough, 2 * enough
        found = on(enough)
    while enough - too_small > 1:
        middle = (enough + too_small) // 2
        if (run := on(middle)) is None:
            too_small = middle
        else:
            enough, found = middle, run
    return Need(name, enough * PAGE, peak, found, with_room)

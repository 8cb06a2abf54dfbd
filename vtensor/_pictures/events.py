"""A recording as curves of memory and as spans of time, for pictures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vtensor.trace import MAPPED, Event

_GROWTH = {"extend": 1, "shrink": -1}


class Point(NamedTuple):
    """Bytes at one moment, relative to the beginning of the recording."""

    time_ns: int
    reserved: int
    mapped: int
    needed: int
    copied: int
    """Bytes that ``torch.cat`` would hold at the last growth: the old tensor and the new one."""


def memory_points(events: Iterable[Event], reserved_now: int = 0) -> list[Point]:
    """One point for each event that changed memory, in order of time.

    A fork counts from 0: what it shares with its parent is needed only once. Reserved addresses count from
    what there was when the recording began: ``reserved_now`` are the bytes of the tensors in it that are open
    still; those that went in it, it shows.
    """
    events = sorted(events, key=lambda event: event.time_ns + event.duration_ns)
    tensors = {event.tensor for event in events}
    lengths: defaultdict[int, int] = defaultdict(int)  # bytes, by tensor
    ranges: Counter[int] = Counter()  # reservations that are open, by size
    reserved = mapped = needed = copied = 0
    points = []
    for event in events:
        if event.what in _GROWTH:
            before = lengths[event.tensor]
            lengths[event.tensor] = max(0, before + _GROWTH[event.what] * event.nbytes)
            needed += lengths[event.tensor] - before
            copied = needed + (before if event.what == "extend" else 0)
        elif event.what in MAPPED:
            mapped += MAPPED[event.what] * event.nbytes
        elif event.call == "cuMemAddressReserve" or (event.call == "mmap" and event.address == 0):
            ranges[event.nbytes] += 1
            reserved += event.nbytes
        elif event.call in ("munmap", "cuMemAddressFree") and (
            ranges[event.nbytes] or event.address in tensors
        ):
            ranges[event.nbytes] -= 1
            reserved -= event.nbytes
        else:
            continue
        points.append(Point(event.time_ns + event.duration_ns, reserved, mapped, needed, copied))
    # The recording unmapped pages that were mapped before it began, and ended older tensors.
    before = -min([0, *(point.mapped for point in points)])
    older = max([reserved_now - reserved, 0, *(-point.reserved for point in points)])
    return [point._replace(mapped=point.mapped + before, reserved=point.reserved + older) for point in points]


def thinned(times: Sequence[float], values: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """At most `most` points: the highest of each interval of time, so that no peak is lost, and the last."""
    if len(times) <= most:
        return list(times), list(values)
    width = (times[-1] - times[0]) / (most - 1) or 1.0
    highest: dict[int, int] = {}
    for i, (time, value) in enumerate(zip(times, values, strict=True)):
        stretch = int((time - times[0]) / width)
        if stretch not in highest or value >= values[highest[stretch]]:
            highest[stretch] = i
    kept = sorted({*highest.values(), len(times) - 1})
    return [times[i] for i in kept], [values[i] for i in kept]


class Lane(NamedTuple):
    """The events of one thread."""

    name: str
    depth: int
    """Levels of nested spans."""
    spans: dict[tuple[int, str], list[tuple[int, int]]]
    """(begin, nanoseconds) by depth and kind. Spans too close to be seen as two are merged."""
    marks: dict[str, list[int]]
    """Times by event."""


def lanes(
    events: Sequence[Event], kind_of: Callable[[Event], str], marked: Iterable[str], closest_ns: float
) -> list[Lane]:
    """One lane for each thread: callers in the order of their first event, then mappers."""
    threads: dict[tuple[bool, int], list[Event]] = defaultdict(list)
    for event in events:
        threads[event.role == "mapper", event.thread].append(event)
    roles = Counter(is_mapper for is_mapper, _ in threads)
    numbers: Counter[bool] = Counter()
    found = []
    for key in sorted(threads, key=lambda key: (key[0], threads[key][0].time_ns)):
        numbers[key[0]] += 1
        name = "mapper" if key[0] else "caller"
        number = f" {numbers[key[0]]}" if roles[key[0]] > 1 else ""
        found.append(_lane(name + number, threads[key], kind_of, frozenset(marked), closest_ns))
    return found


def _lane(
    name: str, events: list[Event], kind_of: Callable[[Event], str], marked: frozenset[str], closest_ns: float
) -> Lane:
    spans: dict[tuple[int, str], list[tuple[int, int]]] = {}
    marks: dict[str, list[int]] = {}
    ends: list[int] = []  # of the spans around the current one
    depth = 0
    for event in sorted(events, key=lambda event: (event.time_ns, -event.duration_ns)):
        if event.what in marked:
            marks.setdefault(event.what, []).append(event.time_ns)
        if not event.duration_ns:
            continue
        end = event.time_ns + event.duration_ns
        while ends and ends[-1] < end:
            ends.pop()
        ends.append(end)
        depth = max(depth, len(ends))
        same = spans.setdefault((len(ends) - 1, kind_of(event)), [])
        if same and event.time_ns - sum(same[-1]) < closest_ns:
            same[-1] = same[-1][0], max(sum(same[-1]), end) - same[-1][0]
        else:
            same.append((event.time_ns, event.duration_ns))
    return Lane(name, depth, spans, marks)

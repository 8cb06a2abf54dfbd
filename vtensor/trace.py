"""Recordings of what vtensor does: every driver call and every change of state, as a table or a timeline.

::

    with vtensor.trace.record() as recording:
        model.generate(...)

    print(recording.summary())
    table = pandas.DataFrame(recording.events())
    recording.export("trace.json.gz")  # for https://ui.perfetto.dev and chrome://tracing

In one timeline with torch's profiler, where the driver calls lie inside the operators that caused them::

    with torch.profiler.profile() as profiler, vtensor.trace.record() as recording:
        model.generate(...)
    recording.export("trace.json.gz", profile=profiler)

``vtensor.trace.load("trace.json.gz")`` reads the file, for :mod:`vtensor.plot` or a table.
"""

from __future__ import annotations

import gzip
import itertools
import json
import operator
import os
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

from vtensor import _core
from vtensor._base.arguments import integer, type_text
from vtensor._base.terminal import aligned, quantile
from vtensor.errors import InvalidArgument, VTensorError

__all__ = ["Event", "Recording", "load", "record"]

_MOST_EVENTS = 2**28
_KINDS = frozenset(_core.TRACE_KINDS)
MAPPED = {"map": 1, "unmap": -1}
"""The events that change what is mapped, each with the sign of its bytes."""


class Profiler(Protocol):
    """The part of torch's profiler that :meth:`Recording.export` uses."""

    def export_chrome_trace(self, path: str) -> object: ...


class Event(NamedTuple):
    """One event of a recording. Times are nanoseconds, sizes are bytes."""

    time_ns: int
    """When it began, as Unix time: the clock of ``time.time_ns()`` and of torch's profiler."""
    duration_ns: int
    """0 for an event without duration."""
    what: str
    """``"driver_call"``, ``"extend"``, ``"shrink"``, ``"prepare"``, ``"fork"``, ``"unshare"``, ``"map"``,
    ``"unmap"``, ``"retire"``, ``"revive"``, ``"zero"``, ``"copy"``, ``"populate"``, ``"cache"``, ``"reuse"``,
    ``"lease"``, ``"wait"``, ``"out_of_memory"`` or ``"error"``."""
    call: str
    """The name of a driver call: ``"mmap"``, ``"cuMemMap"``, ... Empty for other events."""
    address: int
    """The first address that the event concerns; 0 if there is none."""
    nbytes: int
    """The size that the event concerns. For ``extend`` and ``shrink``, the sum over all rows."""
    tensor: int
    """The first address of the tensor's range, which identifies the tensor; 0 if there is none."""
    thread: int
    """The id that ``threading.get_native_id()`` and torch's profiler use."""
    role: str
    """``"mapper"`` for the pool's own thread, else ``"caller"``."""


class Recording:
    """A context manager that records what vtensor does. Made by :func:`record`.

    It holds the events that began and ended inside the ``with``, and keeps them afterwards. ``capacity`` is
    as for :func:`record`.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._asked = () if capacity is None else (capacity,)
        self._core: _core.TraceRecording | None = None

    def __enter__(self) -> Recording:
        if self._core is not None:
            raise VTensorError("[trace.record] this recording was used before: make another with record()")
        self._core = _core.TraceRecording(*self._asked)
        return self

    def __exit__(self, *exc: object) -> None:
        self._begun("record").stop()

    def __repr__(self) -> str:
        if self._core is None:
            return "<vtensor.trace.Recording, not begun>"
        lost = f", {self.dropped:,} older ones dropped" if self.dropped else ""
        return f"<vtensor.trace.Recording, {len(self._core.events()):,} of {self.capacity:,} events{lost}>"

    @property
    def capacity(self) -> int:
        """The number of events that it can hold: the requested number, rounded up to a power of two."""
        return self._begun("capacity").capacity

    @property
    def dropped(self) -> int:
        """The number of events that newer ones have replaced. A larger ``capacity`` keeps more."""
        return self._begun("dropped").dropped

    def events(self) -> list[Event]:
        """The newest ``capacity`` events in order of time, an outer event before those inside it.

        Inside the ``with``, those so far. ``pandas.DataFrame(recording.events(),
        columns=vtensor.trace.Event._fields)`` makes a table of them.
        """
        return [Event._make(row) for row in self._begun("events").events()]

    def summary(self) -> str:
        """A table as text: the count, times and bytes of each kind of event and driver call."""
        groups: dict[tuple[str, str], list[Event]] = {}
        for event in self.events():
            groups.setdefault((event.call or event.what, event.role), []).append(event)
        rows = [("what", "thread", "count", "total ms", "p50 us", "p99 us", "bytes")]
        by_time = sorted(groups.items(), key=lambda group: -sum(event.duration_ns for event in group[1]))
        for (name, role), group in by_time:
            times = sorted(event.duration_ns for event in group)
            rows.append(
                (
                    name,
                    role,
                    f"{len(group):,}",
                    f"{sum(times) / 1e6:,.3f}",
                    f"{quantile(times, 0.5) / 1e3:,.2f}",
                    f"{quantile(times, 0.99) / 1e3:,.2f}",
                    f"{sum(event.nbytes for event in group):,}",
                )
            )
        lines = aligned(rows, left=2)
        if self.dropped:
            lines.append(f"{self.dropped:,} older events were dropped: record(capacity=) keeps more")
        return "\n".join(lines)

    def export(
        self, path: str | os.PathLike[str], profile: str | os.PathLike[str] | Profiler | None = None
    ) -> None:
        """Writes the events as JSON for Perfetto and ``chrome://tracing``, with a track for each thread.

        Args:
            path: the file. It is compressed if the name ends in ``.gz``.
            profile: a profile of the same time by torch's profiler, to merge into the file: a file that its
                ``export_chrome_trace`` wrote, or the stopped profiler itself. A profiler exports only once.

        Raises:
            VTensorError: if ``profile`` is no such file, or a profiler that still runs or has exported
                before.
            OSError: if a file cannot be read or written.
        """
        file = _path("export", path)
        started = self._begun("export").started
        trace: dict[str, Any] = (
            {"baseTimeNanoseconds": started} if profile is None else _read_profile(profile)
        )
        theirs = trace.pop("traceEvents", [])
        threads = [(record.get("pid"), record.get("tid")) for record in theirs if record.get("ph") == "M"]
        named = {(pid, tid) for pid, tid in threads if isinstance(pid, int) and isinstance(tid, int)}
        ours = _records(self.events(), trace.get("baseTimeNanoseconds", 0), named)
        _write(file, trace, itertools.chain(theirs, ours))

    def _begun(self, operation: str) -> _core.TraceRecording:
        if self._core is None:
            raise VTensorError(
                f"[trace.{operation}] the recording has not begun: enter it by "
                "`with vtensor.trace.record() as recording:`"
            )
        return self._core


def record(capacity: int | None = None) -> Recording:
    """Makes a context manager that records what vtensor does on all threads inside the ``with``.

    One recording runs at a time, in the whole process. It takes 48 bytes an event, allocated as events come.

    Args:
        capacity: events to keep, rounded up to a power of two. The newest stay. Defaults to 1,048,576.

    Raises:
        InvalidArgument: if ``capacity`` is below 1 or above 2**28.
        VTensorError: when entered, if another recording runs, or if this is a forked child process: vtensor
            does nothing there.
    """
    if capacity is not None:
        capacity = integer("trace.record", "capacity", capacity, 1, _MOST_EVENTS)
    return Recording(capacity)


def load(path: str | os.PathLike[str]) -> list[Event]:
    """Reads the events of a file that :meth:`Recording.export` wrote, in order of time.

    Times are exact to about a nanosecond. Events of torch's profiler are left out.

    Args:
        path: the file, compressed or not.

    Raises:
        VTensorError: if the file is no trace, or was cut short.
        OSError: if it cannot be read.
    """
    trace = _read_trace(
        _path("load", path), "load", "it was cut short or is another file; export the recording again"
    )
    base = trace.get("baseTimeNanoseconds", 0)
    try:
        found = [_event(one, base) for one in trace["traceEvents"] if one.get("cat") == "vtensor"]
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise VTensorError(
            f"[trace.load] {path} holds an event that no Recording.export wrote ({error!r}): export the "
            "recording again"
        ) from error
    return sorted(found, key=lambda event: (event.time_ns, -event.duration_ns))


# -- the Chrome trace format ("Trace Event Format", the Chromium project), which Perfetto also reads


def _records(events: Sequence[Event], base: int, named: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """The events as records of the format, in torch's profiler's units: microseconds since `base`.

    `base` is Unix time in nanoseconds. `named` holds the (pid, tid) that have a name already.
    """
    process = os.getpid()
    alive = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = {0: ("process_name", f"python {process}")}
    for event in events:
        thread = "vtensor mapper" if event.role == "mapper" else alive.get(event.thread, "thread")
        names[event.thread] = ("thread_name", f"{thread} {event.thread}")
    for number, (kind, name) in names.items():
        if (process, number) not in named:
            yield {"name": kind, "ph": "M", "pid": process, "tid": number, "args": {"name": name}}
    for event in events:
        begin = (event.time_ns - base) / 1000
        lasts = {"ph": "X", "dur": event.duration_ns / 1000} if event.duration_ns else {"ph": "i", "s": "t"}
        yield {
            "name": event.call or event.what,
            "cat": "vtensor",
            "pid": process,
            "tid": event.thread,
            "ts": begin,
            **lasts,
            "args": {
                "address": hex(event.address),
                "nbytes": event.nbytes,
                "tensor": hex(event.tensor),
                "role": event.role,
            },
        }
    mapped = 0
    changes = [event for event in events if event.what in MAPPED]
    for event in sorted(changes, key=lambda event: event.time_ns + event.duration_ns):
        end = event.time_ns + event.duration_ns
        mapped += MAPPED[event.what] * event.nbytes
        counter = {"name": "bytes mapped since the recording began", "ph": "C", "pid": process, "tid": 0}
        yield {**counter, "ts": (end - base) / 1000, "args": {"bytes": mapped}}


def _event(written: dict[str, Any], base: int) -> Event:
    """The inverse of `_records` for one record."""
    name, more = written["name"], written["args"]
    if not isinstance(name, str) or more["role"] not in ("caller", "mapper"):
        raise ValueError(name, more["role"])
    known = name in _KINDS
    return Event(
        time_ns=base + round(written["ts"] * 1000),
        duration_ns=round(written.get("dur", 0) * 1000),
        what=name if known else "driver_call",
        call="" if known else name,
        address=int(more["address"], 16),
        nbytes=operator.index(more["nbytes"]),
        tensor=int(more["tensor"], 16),
        thread=operator.index(written["tid"]),
        role=more["role"],
    )


def _path(operation: str, path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise InvalidArgument(
            f"[trace.{operation}] path is {type_text(type(path))}: give a str or a pathlib.Path"
        ) from None


def _read_profile(profile: str | os.PathLike[str] | Profiler) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(profile, (str, os.PathLike)):
            path = Path(profile)
        else:
            path = Path(folder) / "profile.json"
            try:
                profile.export_chrome_trace(str(path))
            except (AssertionError, AttributeError, RuntimeError) as error:
                raise VTensorError(
                    f"[trace.export] torch's profiler gave no trace ({error}): stop it first; it exports "
                    "only once, so if it has, give profile= that file"
                ) from error
        return _read_trace(
            path, "export", "give profile= a file that export_chrome_trace of torch's profiler wrote"
        )


def _read_trace(path: Path, operation: str, remedy: str) -> dict[str, Any]:
    content = path.read_bytes()
    try:
        trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (EOFError, OSError, RecursionError, ValueError, zlib.error):
        trace = None
    if not _is_trace(trace):
        raise VTensorError(f"[trace.{operation}] {path} holds no trace: {remedy}")
    return trace


def _is_trace(read: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(read, dict) or not isinstance(read.get("traceEvents"), list):
        return False
    base = read.get("baseTimeNanoseconds", 0)
    return (
        isinstance(base, int) and abs(base) < 2**63 and all(isinstance(e, dict) for e in read["traceEvents"])
    )


def _write(path: Path, head: dict[str, Any], records: Iterable[dict[str, Any]]) -> None:
    """Writes one record at a time, because there may be millions."""
    with gzip.open(path, "wt", compresslevel=6) if path.suffix == ".gz" else path.open("w") as file:
        file.write("{")
        for key, value in head.items():
            file.write(f"{json.dumps(key)}: {json.dumps(value)}, ")
        file.write('"traceEvents": [')
        for i, record in enumerate(records):
            file.write((",\n" if i else "\n") + json.dumps(record))
        file.write("\n]}\n")

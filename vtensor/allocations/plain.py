"""The plain format of allocations: CSV, also as ``.csv.gz`` and ``.csv.xz``.

::

    # any notes
    event,id,bytes,stream
    alloc,1,1048576,0
    alloc,2,512,0
    free,1,,

``id`` is a whole number that names an allocation until its ``free``, and may be used again after it. A
``free`` may leave out bytes and stream.
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from vtensor.allocations.events import AllocationTrace, Event, checked, malformed

_COLUMNS = "event,id,bytes,stream"
_MOST_DIGITS = 19


def read_plain(path: Path) -> AllocationTrace:
    """Reads the plain format. A malformed line is refused by its number."""
    notes: list[str] = []
    opened: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    with opened.get(path.suffix.lower(), open)(path, "rt", encoding="utf-8") as file:
        events = list(checked(_events(path, file, notes)))
    return AllocationTrace(events, notes)


def write_plain(trace: AllocationTrace, path: Path) -> None:
    """Writes the plain format, the same bytes for the same trace."""
    lines = [*(f"# {note}" for note in trace.notes), _COLUMNS, *map(_line, trace.events)]
    data = "".join(f"{line}\n" for line in lines).encode()
    if path.suffix.lower() == ".gz":
        data = gzip.compress(data, 9, mtime=0)
    elif path.suffix.lower() == ".xz":
        data = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    path.write_bytes(data)


def _line(event: Event) -> str:
    if event.kind == "free":
        return f"free,{event.id},,"
    return f"alloc,{event.id},{event.bytes},{event.stream}"


def _events(path: Path, lines: Iterable[str], notes: list[str]) -> Iterator[tuple[str, Event]]:
    last: dict[int, Event] = {}  # by id
    header = False
    for number, text in enumerate(lines, 1):
        place, line = f"{path} line {number}", text.strip()
        if not line:
            continue
        if line.startswith("#"):
            notes.append(line.removeprefix("#").strip())
        elif not header:
            if line != _COLUMNS:
                raise malformed(f"{place}: the columns are {brief(line)}, not {_COLUMNS}")
            header = True
        else:
            event = _event(place, line.split(","), last)
            yield place, event
            last[event.id] = event


def _event(place: str, fields: list[str], last: dict[int, Event]) -> Event:
    if len(fields) != 4:
        raise malformed(f"{place}: {len(fields)} fields, not {_COLUMNS}")
    kind, name, nbytes, stream = fields
    if kind not in ("alloc", "free"):
        raise malformed(f"{place}: event {brief(kind)}: write alloc or free")
    number = _whole(place, "id", name)
    begun = last.get(number, Event("free", number, 1, 0))
    if kind == "free":
        nbytes, stream = nbytes or str(begun.bytes), stream or str(begun.stream)
    size, of_stream = _whole(place, "bytes", nbytes), _whole(place, "stream", stream)
    return Event("free" if kind == "free" else "alloc", number, size, of_stream)


def _whole(place: str, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise malformed(f"{place}: {name} {brief(text)}: write a whole number")
    return int(text)

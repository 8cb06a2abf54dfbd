"""Pickles of ``torch.cuda.memory._snapshot()``, which ``torch.cuda.memory._dump_snapshot`` writes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as brief
from typing import IO, Any, NoReturn

from vtensor._base.arguments import type_text
from vtensor.allocations.events import AllocationTrace, Event, checked, malformed, named, selected
from vtensor.errors import InvalidArgument

_LIVE = ("active_allocated", "active_awaiting_free")


def read_snapshot(path: Path, device: str | None) -> AllocationTrace:
    """Reads the history of a snapshot. Nothing in the file can run: only plain containers are accepted.

    Memory counts as freed when torch could use it again (``free_completed``). If the history leaves that out,
    it counts as freed when its free was requested.
    """
    snapshot = _loaded(path)
    histories = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(histories, list) or not all(isinstance(entries, list) for entries in histories):
        raise malformed(f"{path} has no device_traces: write it with torch.cuda.memory._dump_snapshot")
    number = _device(path, histories, device)
    events = list(_events(path, number, histories[number]))
    live = _live_at_end(path, number, snapshot.get("segments"))
    notes = [f"torch.cuda.memory._snapshot, cuda:{number}"]
    return AllocationTrace(list(checked(named(events, live))), notes)


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, tuples, strings and numbers, and calls nothing."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> NoReturn:
        raise malformed(
            f"{self._path} asks for {module}.{name}, and a snapshot has plain "
            "containers only: do not unpickle this file elsewhere"
        )

    def persistent_load(self, identity: Any) -> NoReturn:
        raise malformed(f"{self._path} refers to objects outside of it; a snapshot does not")


def _loaded(path: Path) -> Any:
    with path.open("rb") as file:
        try:
            return _PlainUnpickler(path, file).load()
        except (InvalidArgument, OSError):
            raise
        except Exception as error:  # a malformed pickle may raise anything
            raise malformed(f"{path} is not a whole pickle: {type(error).__name__}: {error}") from error


def _device(path: Path, histories: list[list[Any]], asked: str | None) -> int:
    found = {f"cuda:{i}": len(entries) for i, entries in enumerate(histories) if entries}
    if not found:
        raise malformed(
            f"{path} has an empty history: call torch.cuda.memory._record_memory_history() before what is "
            "recorded"
        )
    return int(selected(path, found, asked).removeprefix("cuda:"))


def _events(path: Path, number: int, entries: list[Any]) -> Iterator[tuple[str, Event]]:
    completed = any(isinstance(entry, dict) and entry.get("action") == "free_completed" for entry in entries)
    free = "free_completed" if completed else "free_requested"
    for i, entry in enumerate(entries):
        place = f"{path} device_traces[{number}][{i}]"
        if not isinstance(entry, dict):
            raise malformed(f"{place}: {type_text(type(entry))}, not a dict")
        action = entry.get("action")
        if action not in ("alloc", free):
            continue
        nbytes = _whole(place, "size", entry.get("size"))
        if nbytes:
            address = _whole(place, "addr", entry.get("addr"))
            stream = _whole(place, "stream", entry.get("stream", 0))
            yield place, Event("alloc" if action == "alloc" else "free", address, nbytes, stream)


def _live_at_end(path: Path, number: int, ranges: Any) -> Iterator[tuple[str, Event]]:
    """The allocations in the snapshot. Old versions of torch leave out an address; it follows from the sizes
    before it."""
    for i, found in enumerate(ranges if isinstance(ranges, list) else []):
        if not isinstance(found, dict) or found.get("device", 0) != number:
            continue
        place = f"{path} segments[{i}]"
        address = _whole(place, "address", found.get("address"))
        stream = _whole(place, "stream", found.get("stream", 0))
        parts = found.get("blocks")
        for j, part in enumerate(parts if isinstance(parts, list) else []):
            where = f"{place}['blocks'][{j}]"
            if not isinstance(part, dict):
                raise malformed(f"{where}: {type_text(type(part))}, not a dict")
            size = _whole(where, "size", part.get("size"))
            if part.get("state") in _LIVE:
                asked = _whole(where, "requested_size", part.get("requested_size", size))
                at = _whole(where, "address", part.get("address", address))
                yield where, Event("alloc", at, asked or size, stream)
            address += size


def _whole(place: str, name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise malformed(f"{place}: {name} is {_shown(value)}, not a whole number below 2**64")
    return value


def _shown(value: Any) -> str:
    try:
        return brief(value)
    except ValueError:  # a pickle may hold numbers with more digits than Python writes
        return f"{type_text(type(value))} too long to show"

"""Memory events of ``torch.profiler`` traces: ``profile(profile_memory=True)``, ``export_chrome_trace``."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from vtensor.allocations.events import AllocationTrace, Event, Kind, checked, malformed, named, selected

_KINDS = {0: "cpu", 1: "cuda"}  # of c10::DeviceType


def read_profile(path: Path, device: str | None) -> AllocationTrace:
    """Reads the ``[memory]`` events of a Chrome trace, by time. They name no stream: all are of 0."""
    data = path.read_bytes()
    if path.suffix.lower() == ".gz":
        data = gzip.decompress(data)
    try:
        trace = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed(f"{path} is not JSON: {error}") from error
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise malformed(f"{path} has no traceEvents: write it with torch.profiler's export_chrome_trace")
    memory = [_Memory(path, i, event) for i, event in enumerate(events) if _is_memory(event)]
    if not memory:
        raise malformed(f"{path} has no [memory] events: record with profile(profile_memory=True)")
    found = dict(sorted(Counter(event.device for event in memory).items()))
    chosen = selected(path, found, device)
    ordered = sorted((event for event in memory if event.device == chosen), key=lambda event: event.time)
    return AllocationTrace(list(checked(named(_raw(ordered)))), [f"torch.profiler, {chosen}"])


def _is_memory(event: Any) -> bool:
    return isinstance(event, dict) and event.get("name") == "[memory]"


class _Memory:
    """One checked event."""

    def __init__(self, path: Path, index: int, event: dict[str, Any]) -> None:
        self.place = f"{path} traceEvents[{index}]"
        given = event.get("args")
        values: dict[str, Any] = given if isinstance(given, dict) else {}
        self.time: float = self._number("ts", event.get("ts"), (int, float))
        self.bytes: int = self._number("args.Bytes", values.get("Bytes"), (int,))
        self.address: int = self._number("args.Addr", values.get("Addr"), (int,))
        kind: int = self._number("args['Device Type']", values.get("Device Type"), (int,))
        number: int = self._number("args['Device Id']", values.get("Device Id"), (int,))
        name = _KINDS.get(kind, f"device type {kind}")
        self.device = name if number < 0 else f"{name}:{number}"

    def _number(self, name: str, value: Any, kinds: tuple[type, ...]) -> Any:
        if type(value) not in kinds or value != value:
            raise malformed(
                f"{self.place}: {name} is {brief(value)}, not a number; torch.profiler writes one"
            )
        return value


def _raw(events: list[_Memory]) -> Iterator[tuple[str, Event]]:
    for event in events:
        if event.bytes:
            kind: Kind = "alloc" if event.bytes > 0 else "free"
            yield event.place, Event(kind, event.address, abs(event.bytes), 0)

"""Memory events of ``torch.profiler`` traces: ``profile(profile_memory=True)``, ``export_chrome_trace``."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from vtensor.allocations.events import AllocationTrace, Event, checked, malformed, named, selected

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
    memory = list(_memory(path, events))
    if not memory:
        raise malformed(f"{path} has no [memory] events: record with profile(profile_memory=True)")
    found = dict(sorted(Counter(device for device, *_ in memory).items()))
    chosen = selected(path, found, device)
    ordered = sorted((each for each in memory if each[0] == chosen), key=itemgetter(1))
    recorded = [(place, event) for _, _, place, event in ordered if event.bytes]
    return AllocationTrace(list(checked(named(recorded))), [f"torch.profiler, {chosen}"])


def _memory(path: Path, events: list[Any]) -> Iterator[tuple[str, float, str, Event]]:
    """The device, the time, the place in the file and the event of each change of memory."""
    for i, event in enumerate(events):
        if not isinstance(event, dict) or event.get("name") != "[memory]":
            continue
        place = f"{path} traceEvents[{i}]"
        given = event.get("args")
        values: dict[str, Any] = given if isinstance(given, dict) else {}
        time = _number(place, "ts", event.get("ts"), (int, float))
        nbytes = _number(place, "args.Bytes", values.get("Bytes"))
        address = _number(place, "args.Addr", values.get("Addr"))
        kind = _number(place, "args['Device Type']", values.get("Device Type"))
        number = _number(place, "args['Device Id']", values.get("Device Id"))
        name = _KINDS.get(kind, f"device type {kind}")
        device = name if number < 0 else f"{name}:{number}"
        yield device, time, place, Event("alloc" if nbytes > 0 else "free", address, abs(nbytes), 0)


def _number(place: str, name: str, value: Any, kinds: tuple[type, ...] = (int,)) -> Any:
    if type(value) not in kinds or value != value:
        raise malformed(f"{place}: {name} is {brief(value)}, not a number; torch.profiler writes one")
    return value

"""The needs of allocators for recorded allocations: as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vtensor._base.terminal import aligned, drawable
from vtensor._base.units import byte_text
from vtensor.allocations.events import AllocationTrace
from vtensor.allocations.replay import ROOM, Need, Run
from vtensor.errors import VTensorError

# In the order of the table; shown without their prefix.
_CALLS = (
    "cudaMalloc",
    "cudaFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "mmap",
    "munmap",
    "fallocate",
)
_MOST_POINTS = 2000  # on a curve


@dataclass(frozen=True)
class Comparison:
    """Several allocators over one trace."""

    name: str
    trace: AllocationTrace
    needs: list[Need]


def table(comparison: Comparison) -> str:
    """A line for each allocator: the smallest device, and the driver calls there and on one with room."""
    trace, needs = comparison.trace, comparison.needs
    streams = f"{trace.streams} stream{'s' if trace.streams != 1 else ''}"
    headline = (
        f"{comparison.name}: {len(trace.events):,} events, {streams}, "
        f"at most {byte_text(max(trace.live_bytes()))} live"
    )
    names = [call for call in _CALLS if any(call in need.run.calls for need in needs)]
    short = [call.removeprefix("cuMem").removeprefix("cuda") for call in names]
    lines = [["smallest device", "bytes", "of peak", *short]]
    lines += [
        [need.name, byte_text(need.smallest), f"{need.of_peak:.4f}", *_counts(need.run, names)]
        for need in needs
    ]
    room = byte_text(ROOM * needs[0].peak)
    lines += [[f"of {ROOM:g} the peak", room, f"{ROOM:.4f}", *short]]
    lines += [[need.name, "", "", *_counts(need.with_room, names)] for need in needs]
    texts = aligned(lines)
    texts = [headline, *texts[: len(needs) + 1], "", *texts[len(needs) + 1 :]]
    for need in needs:
        if (run := need.with_room) is not None and run.seconds is not None:
            texts += [
                "",
                f"{need.name}: {run.seconds:.2f} s of {len(trace.events):,} calls, on a device of "
                f"{ROOM:g} the peak, real memory of the host",
            ]
    return "\n".join(texts)


def _counts(run: Run | None, calls: Iterable[str]) -> list[str]:
    return ["too small" if run is None else f"{run.calls.get(call, 0):,}" for call in calls]


def to_json(comparisons: Sequence[Comparison]) -> str:
    """A JSON list of the traces and the needs of each allocator for them."""
    return json.dumps([_plain(comparison) for comparison in comparisons], indent=2)


def _plain(comparison: Comparison) -> dict[str, Any]:
    trace = comparison.trace
    return {
        "trace": comparison.name,
        "notes": trace.notes,
        "events": len(trace.events),
        "streams": trace.streams,
        "peak_bytes": max(trace.live_bytes()),
        "room": ROOM,
        "allocators": [
            {
                "name": need.name,
                "smallest_device_bytes": need.smallest,
                "of_peak": round(need.of_peak, 6),
                "calls": need.run.calls,
                "calls_with_room": need.with_room.calls if need.with_room else None,
            }
            for need in comparison.needs
        ],
    }


def picture(comparisons: Sequence[Comparison], path: str | os.PathLike[str]) -> None:
    """Draws live bytes, and the bytes that each allocator takes of its smallest device.

    Traces are rows and allocators are columns. The file's suffix selects the format.

    Raises:
        VTensorError: if matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        what = f"[replay-allocations] a picture needs {missing.name}: pip install 'vtensor[plot]'"
        raise VTensorError(what) from missing
    columns = max(len(comparison.needs) for comparison in comparisons)
    figure = Figure(figsize=(1 + 3 * columns, 0.6 + 2.6 * len(comparisons)), layout="constrained")
    grid = figure.subplots(len(comparisons), columns, sharex="row", sharey="row", squeeze=False)
    for line, comparison in zip(grid, comparisons, strict=True):
        live = comparison.trace.live_bytes()
        for axes, need in zip(line, comparison.needs, strict=False):
            axes.fill_between(*_points(live), color="#9fc9cf", linewidth=0.8, label="live")
            axes.plot(
                *_points(need.run.device_bytes), color="#d1495b", linewidth=1, label="taken of the device"
            )
            axes.set_title(f"{need.name}: {need.of_peak:.4f} of the peak", fontsize=9)
            axes.set_xlabel("events", fontsize=8)
            axes.set_ylim(0, None)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(f"{drawable(comparison.name)}\nMiB", fontsize=8, parse_math=False)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise VTensorError(f"[replay-allocations] {path} cannot be drawn: {error}") from error


def _points(values: Sequence[int]) -> tuple[list[int], list[float]]:
    """At most as many points as a picture can show: the highest of each interval."""
    step = -(-len(values) // _MOST_POINTS)
    places = range(0, len(values), step)
    return list(places), [max(values[i : i + step]) / 2**20 for i in places]

"""Pictures of pages and of recordings, drawn with matplotlib: ``pip install 'vtensor[plot]'``.

::

    import vtensor.plot

    vtensor.plot.page_map(tensor)
    with vtensor.trace.record() as recording:
        model.generate(...)
    vtensor.plot.memory(recording)
    vtensor.plot.timeline("trace.json.gz")  # a file that Recording.export wrote

Every function draws on ``ax=``, or on a new figure, and returns the Axes. It draws from page tables, counts
and events. It reads no byte of a tensor and waits for no device.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from vtensor import _core, trace
from vtensor._base.arguments import type_text
from vtensor._base.terminal import drawable
from vtensor._base.units import byte_text
from vtensor._pictures.events import lanes, memory_points, thinned
from vtensor._pictures.pages import (
    COLOURS,
    PageRun,
    TensorPages,
    cells,
    pages_of,
    pages_of_arena,
    pages_of_cache,
)
from vtensor._pictures.shares import Owner, SharedPage, as_tree, boxes
from vtensor.arena import Arena
from vtensor.errors import Closed, InvalidArgument, VTensorError
from vtensor.kv import KVCache
from vtensor.pool import Pool, PoolStats, open_pools
from vtensor.tensor import VTensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Sampling", "fragmentation", "memory", "page_map", "sharing", "timeline"]

Trace: TypeAlias = "trace.Recording | Sequence[trace.Event] | str | os.PathLike[str]"
"""A recording, its events, or a file that ``Recording.export`` wrote."""

_MOST_CELLS = 400  # in a row of pages
_MOST_BANDS = 256  # of rows
_MOST_LANES = 64  # of named owners
_MOST_LINES = 100  # between pages and between rows; more look like one
_MOST_POINTS = 3000  # on a curve
_ROOM = 1.15  # the height of curves over time, over the most bytes
_SAMPLED_EVERY = 0.02  # seconds
_LINES_OF_ARENA = 16
_MOST_SPANS = 20_000  # of each kind in a lane

_NEEDED, _COPIED, _RESERVED = "#263238", "#d1495b", "#7a7f87"
_KINDS = {
    "driver call": "#d1495b",
    "wait": "#e0a33e",
    "zero, populate, copy": "#8e6bbf",
    "map, unmap": "#1b9aaa",
    "operation": "#b8c4cb",
}
_KIND_OF = {
    "driver_call": "driver call",
    "wait": "wait",
    **dict.fromkeys(("zero", "populate", "copy"), "zero, populate, copy"),
    **dict.fromkeys(("map", "unmap"), "map, unmap"),
}
_MARKS = {"lease": ("v", "#263238"), "out_of_memory": ("x", "#9c2c2c"), "error": ("X", "#9c2c2c")}


_Curve: TypeAlias = tuple[str, list[int], dict[str, Any]]  # its name, its bytes and its look
Owners: TypeAlias = "VTensor | KVCache | Sequence[VTensor | KVCache] | Mapping[str, VTensor | KVCache]"


def page_map(tensor: VTensor | KVCache | Arena, *, ax: Axes | None = None) -> Axes:
    """Draws the address range of a tensor: the state of each row's pages.

    Of a cache it draws the rows of each slot, those of slot 0 first. Of an arena it draws the one range in
    lines, the first on top.

    If there are too many rows or pages to tell apart, several share a cell, which shows the most important
    state in it.

    Raises:
        Closed: if it is closed.
        InvalidArgument: if it is none of these.
        VTensorError: if matplotlib is missing.
    """
    if not isinstance(tensor, (VTensor, KVCache, Arena)):
        raise InvalidArgument(
            f"[plot.page_map] got {type_text(type(tensor))}: give one VTensor, a KVCache or an Arena"
        )
    _refuse_closed("page_map", tensor)
    row = "row"
    if isinstance(tensor, KVCache):
        pages = pages_of_cache(tensor)
        what = f"{tensor.stats().slots_used:,} of {tensor.max_batch:,} slots in use"
    elif isinstance(tensor, Arena):
        pages, stats, row = pages_of_arena(tensor, _LINES_OF_ARENA), tensor.stats(), "line"
        what = f"{byte_text(stats.nbytes_mapped)} mapped of {byte_text(stats.nbytes_reserved)}"
    else:
        pages = pages_of(tensor)
        what = f"{list(tensor.shape)}, {tensor.length:,} of {tensor.capacity:,} positions"
    axes = _axes("page_map", ax, (8, 1.2 + 0.2 * min(len(pages.rows), 16)))
    shown = pages.shown()
    top = 0
    for runs, alike in groupby(_bands(pages, shown), key=itemgetter(0)):
        height = sum(rows for _, rows in alike)
        for run in runs:
            _box(axes, run.state, run.start, run.stop, top, height)
        top += height
    if shown <= _MOST_LINES:
        axes.vlines(range(1, shown), 0, top, colors="white", linewidth=0.3)
    if top <= _MOST_LINES:
        axes.hlines(range(1, top), 0, shown, colors="white", linewidth=0.6)
    counts = pages.counts() if pages.exact else {}
    for state, number in counts.items():
        _label(axes, f"{state} {number:,}", COLOURS[state])
    rows = f"{row}s" if pages.exact else "each row"
    axes.set(xlim=(0, max(1, shown)), ylim=(max(1, top), 0), ylabel=rows)
    axes.set_xlabel(f"page of the {row}, of {pages.slots:,} reserved")
    axes.locator_params(axis="both", integer=True)
    return _finish(axes, f"{what}, pages of {byte_text(pages.page_size)}")


@overload
def memory(what: Trace, *, ax: Axes | None = None) -> Axes: ...
@overload
def memory(what: Pool, *, ax: Axes | None = None) -> Sampling: ...
def memory(what: Trace | Pool, *, ax: Axes | None = None) -> Axes | Sampling:
    """Draws bytes over time: of a recording, or of a pool while a ``with`` runs.

    ::

        with vtensor.plot.memory(pool) as sampling:
            model.generate(...)
        sampling.axes.figure.savefig("memory.png")

    A pool is asked for its counts 50 times a second. The picture stacks what its pages are for, each page
    once, so their sum is what the pool holds. The budget and what is asleep are lines.

    A recording is drawn relative to its beginning, except *reserved*.

    *Mapped* counts a page that two tensors share twice. *Needed* is the size of the tensors by their lengths,
    and counts what a fork shares with its parent once. Two curves are for comparison: what ``torch.cat``
    would take for the same lengths, with the old tensor and the new one during a copy; and what is
    *reserved*, which costs only addresses here, and would cost memory if it were preallocated. If that is off
    the scale, the legend gives the figure.

    Args:
        what: see :data:`Trace`; or a pool.

    Returns:
        The Axes; of a pool a context manager, which draws at its end, on its ``axes``.

    Raises:
        InvalidArgument: if nothing in the trace changed any memory.
        Closed: if the pool is closed.
        VTensorError: if a trace file is cut short, or matplotlib is missing.
    """
    if isinstance(what, Pool):
        _refuse_closed("memory", what)
        return Sampling(what, _axes("memory", ax, (8, 3.6)))
    events = _events("memory", what)
    points = memory_points(events, _reserved_now(events))
    if not points:
        raise InvalidArgument("[plot.memory] the trace maps and grows nothing: record around work that does")
    axes = _axes("memory", ax, (8, 3.6))
    moments, reserved, mapped, needed, copied = (list(column) for column in zip(*points, strict=True))
    times = [(moment - moments[0]) / 1e9 for moment in moments]
    preallocated = "reserved: what preallocating\nwould hold"
    curves: list[_Curve] = [
        (preallocated, reserved, {"color": _RESERVED, "linestyle": "--", "linewidth": 1.2}),
        ("torch.cat, with its copy", copied, {"color": _COPIED, "linewidth": 1.2}),
        ("mapped", mapped, {"color": COLOURS["mapped"], "linewidth": 2}),
        ("needed", needed, {"color": _NEEDED, "linestyle": ":", "linewidth": 1.5}),
    ]
    axes.grid(axis="y", color="#eceff1")
    axes.set_axisbelow(True)
    return _over_time(axes, times, curves, max(*mapped, *copied), "Memory over time")


class Sampling:
    """The counts of a pool over the time of a ``with``, drawn at its end, also of a ``with`` that raises."""

    def __init__(self, pool: Pool, axes: Axes) -> None:
        self._pool = pool
        self.axes = axes
        self._samples: list[tuple[float, PoolStats]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vtensor-plot", daemon=True)

    def __enter__(self) -> Sampling:
        if self._samples or self._over.is_set():
            raise VTensorError("[plot.memory] this sampling was used before: make another with memory(pool)")
        try:
            self._sample()
            self._thread.start()
            return self
        except BaseException:  # there is no __exit__ to come
            self._over.set()
            raise

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self._sample()
        self._draw()

    def _watch(self) -> None:
        seconds = _SAMPLED_EVERY
        while not self._over.wait(seconds):
            self._sample()
            if len(self._samples) > 2 * _MOST_POINTS:
                del self._samples[1::2]
                seconds *= 2

    def _sample(self) -> None:
        self._samples.append((time.monotonic(), self._pool.stats()))

    def _draw(self) -> None:
        axes = self.axes
        begin = self._samples[0][0]
        times = [moment - begin for moment, _ in self._samples]
        parts: dict[str, tuple[str, list[int]]] = {
            "needed": (COLOURS["mapped"], []),
            **{kind: (COLOURS[kind], []) for kind in ("prefetched", "cached", "pinned")},
            "spare: free, with memory": (_KINDS["operation"], []),
        }
        asleep, budgets, most = [], [], 0
        for _, stats in self._samples:
            idle = (stats.pages_prefetched, stats.pages_cached, stats.pages_pinned)
            pages = (max(0, stats.pages_used - sum(idle)), *idle, stats.pages_spare)
            for (_, values), count in zip(parts.values(), pages, strict=True):
                values.append(count * stats.page_size)
            asleep.append(stats.nbytes_asleep)
            budgets.append(stats.budget)
            most = max(most, sum(pages) * stats.page_size, stats.nbytes_asleep)
        shown = {name: part for name, part in parts.items() if any(part[1])}
        if shown:
            scale, _ = _unit(_ROOM * most)
            axes.stackplot(
                times,
                *([value / scale for value in values] for _, values in shown.values()),
                labels=list(shown),
                colors=[colour for colour, _ in shown.values()],
                step="post",
            )
        curves: list[_Curve] = [
            ("budget", budgets, {"color": _RESERVED, "linestyle": "--", "linewidth": 1.5}),
            ("asleep", asleep, {"color": _NEEDED, "linestyle": ":", "linewidth": 1.5}),
        ]
        drawn = [curve for curve in curves if any(curve[1])]
        _over_time(axes, times, drawn, most, f"Memory of a pool on {self._pool.device}")


def _over_time(axes: Axes, times: list[float], curves: list[_Curve], most: int, title: str) -> Axes:
    """Draws curves of bytes, with room for `most`. If one is off this scale, the legend gives the figure."""
    highest = _ROOM * most or 1.0
    scale, unit = _unit(highest)
    for name, values, look in curves:
        off = f"\n({byte_text(max(values))}: off the scale)" if max(values) > highest else ""
        x, y = thinned(times, values, _MOST_POINTS)
        axes.plot(x, [value / scale for value in y], drawstyle="steps-post", label=name + off, **look)
    axes.set(xlabel="seconds", ylabel=unit, ylim=(0, highest / scale))
    axes.margins(x=0)
    return _finish(axes, title)


def _reserved_now(events: Sequence[trace.Event]) -> int:
    """Bytes reserved for the open tensors, caches and arenas that the events name."""
    if _core.in_forked_child():  # where none is open
        return 0
    named = {event.tensor for event in events if event.tensor}
    owners: list[Any] = [t for pool in open_pools() for t in pool._each_tensor() if not t.closed]
    nbytes = 0
    for owner in owners:
        if isinstance(owner, VTensor):
            size = owner.nbytes_reserved
            if any(at <= owner.address < at + size for at in named):
                nbytes += size
        else:
            for whole in owner._bytes if isinstance(owner, KVCache) else [owner.tensor]:
                if any(0 <= at - whole.data_ptr() < whole.numel() for at in named):
                    nbytes += whole.numel()
    return nbytes


def timeline(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draws a lane for each thread with its operations over time; an operation's driver calls lie below it.

    Driver calls are red. A caller waits for those in its own lane, and for none of those in the mapper's.
    Triangles mark the ends of leases, crosses mark errors and shortages of memory.

    Args:
        trace: see :data:`Trace`.

    Raises:
        InvalidArgument: if the trace is empty.
        VTensorError: if a trace file is cut short, or matplotlib is missing.
    """
    events = _events("timeline", trace)
    begin = min(event.time_ns for event in events)
    lasts = max(1, max(event.time_ns + event.duration_ns for event in events) - begin)
    scale, unit = (1e6, "milliseconds") if lasts < 2e9 else (1e9, "seconds")
    found = lanes(events, lambda event: _KIND_OF.get(event.what, "operation"), _MARKS, lasts / _MOST_SPANS)
    axes = _axes("timeline", ax, (8, 1.2 + 0.9 * min(len(found), 8)))
    for number, lane in enumerate(found):
        height = 0.8 / max(1, lane.depth)
        for (depth, kind), spans in sorted(lane.spans.items()):
            bars = [((start - begin) / scale, width / scale) for start, width in spans]
            colour = _KINDS[kind]
            axes.broken_barh(
                bars,
                (number + depth * height, height),
                facecolors=colour,
                edgecolors=colour,
                # The edge keeps spans narrower than a pixel visible. Operations are many, and matter less.
                linewidth=0.3 if kind == "operation" else 1,
            )
        for what, moments in lane.marks.items():
            marker, colour = _MARKS[what]
            x, _ = thinned([(time - begin) / scale for time in moments], [0.0] * len(moments), _MOST_POINTS)
            axes.scatter(x, [number - 0.08] * len(x), marker=marker, color=colour, s=22, zorder=3)
    kinds = {kind for lane in found for _, kind in lane.spans}
    for kind, colour in _KINDS.items():
        if kind in kinds:
            _label(axes, kind, colour)
    for what, (marker, colour) in _MARKS.items():
        if any(what in lane.marks for lane in found):
            _label(axes, what.replace("_", " "), colour, marker)
    axes.set(xlabel=unit, xlim=(0, lasts / scale), ylim=(len(found), -0.25))
    _name_lanes(axes, [number + 0.4 for number in range(len(found))], [lane.name for lane in found])
    return _finish(axes, "What each thread did")


def sharing(owners: Owners, *, ax: Axes | None = None) -> Axes:
    """Draws which owners share which pages: a lane for each owner, with the pages of its row.

    A page that adjacent lanes share is one box across them, and owners with a common prefix are adjacent. So
    shared prefixes read as a tree from left to right. A box gives the number of places that share its pages,
    including those outside the picture.

    Args:
        owners: a VTensor or a KVCache, a sequence of them, or a dict of them by name. Each row of a VTensor
            and each slot of a KVCache is an owner.

    Raises:
        InvalidArgument: if there are no owners, or one of them has no pages.
        Closed: if one of them is closed.
        VTensorError: if matplotlib is missing.
    """
    found = _lanes_of_pages(owners)
    ordered = as_tree(found)[:_MOST_LANES]
    axes = _axes("sharing", ax, (8, 1.2 + 0.32 * min(len(ordered), 20)))
    slots = max((max(lane.pages, default=-1) + 1 for lane in ordered), default=0)
    for box in boxes(ordered, slots):
        _box(axes, box.state, box.start, box.stop, box.top + 0.06, box.bottom - box.top - 0.12)
        if box.shared > 1 and (box.stop - box.start) > 0.04 * slots:
            x, y = (box.start + box.stop) / 2, (box.top + box.bottom) / 2
            axes.text(x, y, f"×{box.shared}", ha="center", va="center", color="white", fontsize=8)
    for state in COLOURS:
        if any(page.state == state for lane in ordered for page in lane.pages.values()):
            _label(axes, state, COLOURS[state])
    axes.set(xlim=(0, max(1, slots)), ylim=(max(1, len(ordered)), 0), xlabel="page of the row")
    _name_lanes(axes, [number + 0.5 for number in range(len(ordered))], [lane.name for lane in ordered])
    axes.locator_params(axis="x", integer=True)
    there = [page for lane in found for page in lane.pages.values() if page.state != "asleep"]
    own = len({page.key for page in there})
    more = f", {len(found) - len(ordered)} lanes not shown" if len(found) > len(ordered) else ""
    return _finish(axes, f"{len(there):,} pages mapped, {own:,} in memory{more}")


def fragmentation(owners: Any, *, ax: Axes | None = None) -> Axes:
    """Draws the mapped bytes of each owner as a bar: its data, and what is mapped beyond the data.

    *Rest of last pages* is the cost of whole pages. It grows with the page size and the number of rows. The
    end of each bar gives what is mapped beyond the data, in per cent of the data.

    Args:
        owners: a VTensor, or a cache with a ``stats()`` like ``KVCache``'s; a sequence of them, or a dict of
            them by name.

    Raises:
        InvalidArgument: if there are no owners, or one of them is something else.
        Closed: if one of them is closed.
        VTensorError: if matplotlib is missing.
    """
    named = _named("fragmentation", owners)
    measured = {name: _bytes_of(name, owner) for name, owner in named.items()}
    axes = _axes("fragmentation", ax, (8, 1.3 + 0.35 * len(measured)))
    scale, unit = _unit(max(sum(parts.values()) for parts in measured.values()))
    left = dict.fromkeys(measured, 0.0)
    colours = {"data": COLOURS["mapped"], "rest of last pages": COLOURS["private"], **COLOURS}
    for part in ("data", "rest of last pages", "prefetched", "cached", "pinned"):
        widths = [parts.get(part, 0) / scale for parts in measured.values()]
        if any(widths):
            axes.barh(range(len(measured)), widths, 0.7, list(left.values()), color=colours[part], label=part)
            left = {name: left[name] + width for name, width in zip(left, widths, strict=True)}
    for number, (name, parts) in enumerate(measured.items()):
        mapped, data = sum(parts.values()), parts["data"]
        over = f"+{100 * (mapped - data) / data:,.1f}%" if data else "no data"
        axes.text(left[name], number, f" {over}", va="center", fontsize=9)
    _name_lanes(axes, range(len(measured)), list(measured))
    axes.set(xlabel=unit, xlim=(0, 1.15 * max(left.values()) or 1.0), ylim=(len(measured) - 0.5, -0.5))
    return _finish(axes, "What is mapped beyond the data")


# -- axes, legends and units


def _axes(operation: str, ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    try:
        # Imported by name: the package needs only torch, and only pictures need matplotlib.
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise VTensorError(
            f"[plot.{operation}] matplotlib cannot be imported ({error}): pip install 'vtensor[plot]'"
        ) from error
    made: Axes = pyplot.subplots(figsize=size, layout="constrained")[1]
    return made


def _name_lanes(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    axes.set_yticks(places, list(map(drawable, names)), parse_math=False)  # a name may have dollar signs
    axes.tick_params(axis="y", length=0)


def _finish(axes: Axes, title: str) -> Axes:
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(handles, labels, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return axes


def _box(axes: Axes, state: str, start: int, stop: int, top: float, height: float) -> None:
    axes.broken_barh(
        [(start, stop - start)], (top, height), facecolors=COLOURS[state], edgecolors="white", linewidth=0.8
    )


def _label(axes: Axes, text: str, colour: str, marker: str = "s") -> None:
    """Adds an entry to the legend without drawing anything."""
    axes.scatter([], [], marker=marker, color=colour, label=text)


def _unit(most: float) -> tuple[float, str]:
    """The divisor for sizes up to `most` bytes, and the name of the unit."""
    power = min(4, int(math.log(max(1.0, most), 1024)))
    return 1024.0**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]


def _bands(pages: TensorPages, shown: int) -> Iterator[tuple[list[PageRun], int]]:
    """Adjacent rows drawn as one: their runs, and how many they are."""
    rows = -(-len(pages.rows) // _MOST_BANDS) or 1
    for first in range(0, len(pages.rows), rows):
        together = pages.rows[first : first + rows]
        yield cells(chain.from_iterable(together), shown, _MOST_CELLS), len(together)


# -- events and owners


def _events(operation: str, given: Trace) -> Sequence[trace.Event]:
    if isinstance(given, trace.Recording):
        events: Sequence[Any] = given.events()
    elif isinstance(given, (str, os.PathLike)):
        events = trace.load(given)
    elif isinstance(given, Sequence) and all(isinstance(event, trace.Event) for event in given):
        events = given
    else:
        raise InvalidArgument(
            f"[plot.{operation}] got {type_text(type(given))}: give a vtensor.trace.Recording, its events(), "
            f"or a file that its export() wrote{', or a Pool' if operation == 'memory' else ''}"
        )
    if not events:
        raise InvalidArgument(
            f"[plot.{operation}] the trace is empty: record around work that grows or shares something"
        )
    return events


def _refuse_closed(operation: str, *owners: Any) -> None:
    for owner in owners:
        if getattr(owner, "closed", False):
            raise Closed(f"[plot.{operation}] a tensor or cache given is closed: draw it before its close()")


def _named(operation: str, owners: Any) -> dict[str, Any]:
    if isinstance(owners, Mapping):
        named = {str(name): owner for name, owner in owners.items()}
    elif isinstance(owners, (list, tuple)):
        named = {str(number): owner for number, owner in enumerate(owners)}
    else:
        named = {"": owners}
    if not named:
        raise InvalidArgument(f"[plot.{operation}] no tensors: give one at least")
    _refuse_closed(operation, *named.values())
    return named


def _lanes_of_pages(owners: Any) -> list[Owner]:
    lanes_found = []
    for name, owner in _named("sharing", owners).items():
        if not hasattr(owner, "pages"):
            raise InvalidArgument(
                f"[plot.sharing] got {type_text(type(owner))}: give VTensors, or a cache that has pages()"
            )
        rows: dict[int, dict[int, SharedPage]] = {}
        for lane, record in _records(owner):
            # A page that a write has copied has no id yet, and no other owner.
            own = (name, lane, record.index)
            key = own if record.page_id < 0 else (id(owner.pool), record.page_id)
            page = SharedPage(key, record.state, record.shared)
            rows.setdefault(lane, {}).setdefault(record.index, page)
        shape = tuple(owner.shape[: owner.grow_dim]) if hasattr(owner, "grow_dim") else None
        lanes_found += [Owner(_row_name(name, row, shape), pages) for row, pages in rows.items()]
    return lanes_found


def _records(owner: Any) -> list[tuple[int, Any]]:
    """The lane and the record of each page. A tensor's lanes are its rows, a cache's are its slots.

    A slot is represented by its first row, because its rows share in the same way.
    """
    if isinstance(owner, KVCache):
        return [(slot, r) for slot in range(owner.max_batch) for r in owner.pages(slot) if r.row == 0]
    return [(record.row, record) for record in owner.pages()]


def _row_name(name: str, row: int, shape: tuple[int, ...] | None) -> str:
    """``k[0, 3]``: the indices before ``grow_dim``. Without a `shape`, `row` is a slot of a cache."""
    if shape is None:
        return f"{name} slot {row}".strip()
    if math.prod(shape) == 1:
        return name
    index = []
    for size in reversed(shape):
        row, at = divmod(row, size)
        index.append(at)
    return f"{name}{index[::-1]}"


def _bytes_of(name: str, owner: Any) -> dict[str, int]:
    if hasattr(owner, "grow_dim"):
        pages = pages_of(owner)
        data = min(owner.numel() * owner.element_size(), owner.nbytes_mapped)  # nothing of it while it sleeps
        spare = {"prefetched": 0, "pinned": 0}
        for run in chain.from_iterable(pages.rows):
            if run.state in spare:
                spare[run.state] += (run.stop - run.start) * pages.page_size
        rest = owner.nbytes_mapped - data - sum(spare.values())
        return {"data": data, "rest of last pages": rest, **spare}
    try:
        stats = owner.stats()
        data, mapped, cached = stats.nbytes_live, stats.nbytes_mapped, stats.pages_cached
    except AttributeError:
        raise InvalidArgument(
            f"[plot.fragmentation] {name or 'it'} is {type_text(type(owner))}: give VTensors, or caches with "
            "stats()"
        ) from None
    data = min(data, mapped)
    cached = min(cached * owner.pool.page_size, mapped - data)
    return {"data": data, "rest of last pages": mapped - data - cached, "cached": cached}

"""The pages behind a tensor as runs of pages in the same state, for pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from vtensor.tensor import VTensor

if TYPE_CHECKING:
    from vtensor.arena import Arena
    from vtensor.kv import KVCache

MOST_RECORDS = 1 << 15  # pages; a tensor with more is drawn from its lengths, not page by page

_STATES = {
    "mapped": ("#1b9aaa", "in use by this tensor alone"),
    "shared": ("#8e6bbf", "in use, and shared copy-on-write"),
    "prefetched": ("#9bd1d8", "prepared ahead of need"),
    "cached": ("#a9b665", "left by freed tensors for the next"),
    "pinned": ("#e0a33e", "kept by views or by work that may use it"),
    "private": ("#d9647a", "shared once, written since"),
    "asleep": ("#77838a", "away until Pool.wake"),
    "reserved": ("#c9d1d6", "addresses without memory"),
}
COLOURS = {state: colour for state, (colour, _) in _STATES.items()}
"""The states of a page, most important first. The colours suit light and dark backgrounds."""
MEANINGS = {state: meaning for state, (_, meaning) in _STATES.items()}

# A cell that covers several pages shows the first of these states among them.
_TELLING = ("private", "shared", "pinned", "mapped", "cached", "prefetched", "asleep", "reserved")


class PageRun(NamedTuple):
    """Adjacent pages of one row in the same state: slots ``[start, stop)``."""

    state: str
    start: int
    stop: int


class TensorPages(NamedTuple):
    """The pages behind a tensor, row by row."""

    rows: list[list[PageRun]]
    """The mapped slots of each row, in order. One row for all of them if `exact` is False."""
    slots: int
    """Slots reserved for each row."""
    page_size: int
    exact: bool
    """Whether the runs were read from the page table. Otherwise they follow from lengths and counts."""

    def counts(self) -> dict[str, int]:
        """Pages by state, in the order of COLOURS, without states that have none. Requires `exact`."""
        found = dict.fromkeys(COLOURS, 0)
        for run in chain.from_iterable(self.rows):
            found[run.state] += run.stop - run.start
        found["reserved"] = self.slots * len(self.rows) - sum(found.values())
        return {state: pages for state, pages in found.items() if pages}

    def shown(self) -> int:
        """Slots of a row to draw to scale: the mapped ones and a few more, or all."""
        last = max((row[-1].stop for row in self.rows if row), default=0)
        enough = max(8, last + max(2, last // 12))
        return self.slots if 2 * enough > self.slots else enough


def pages_of(tensor: VTensor) -> TensorPages:
    """Reads the page table. Reads no byte of the tensor and waits for no device."""
    page_size = tensor.pool.page_size
    count = math.prod(tensor.shape[: tensor.grow_dim])
    slots = tensor.nbytes_reserved // page_size // count if count else 0
    if tensor.nbytes_mapped > MOST_RECORDS * page_size:
        return TensorPages([_from_lengths(tensor, page_size, count)], slots, page_size, exact=False)
    rows: list[list[PageRun]] = [[] for _ in range(count)]
    for record in tensor.pages():
        append(rows[record.row], record.state, record.index)
    return TensorPages(rows, slots, page_size, exact=True)


def pages_of_cache(cache: KVCache) -> TensorPages:
    """As :func:`pages_of`, for a cache: the rows of slot 0, then those of slot 1, and so on."""
    rows: list[list[PageRun]] = []
    groups, ranges = cache._layout.row_groups, cache._bytes
    for slot in range(cache.max_batch):
        first = len(rows)
        rows += [[] for _ in range(cache._layout.ranges)]
        for number, group in enumerate(groups):
            for record in cache._core.pages(slot, number):
                append(rows[first + record.row], record.state, record.index)
            first += group.rows
    page_size = cache.pool.page_size
    row_bytes = [group.row_of(whole, cache.max_batch) for whole, group in zip(ranges, groups, strict=True)]
    return TensorPages(rows, max(row_bytes) // page_size, page_size, exact=True)


def pages_of_arena(arena: Arena, lines: int) -> TensorPages:
    """As :func:`pages_of`, for an arena: its range in at most `lines` lines, one below the other."""
    page_size = arena.pool.page_size
    total = -(-arena.nbytes // page_size)
    width = -(-total // lines)
    rows: list[list[PageRun]] = [[] for _ in range(-(-total // width))]
    for record in arena.pages():
        line, index = divmod(record.index, width)
        append(rows[line], record.state, index)
    return TensorPages(rows, width, page_size, exact=True)


def append(runs: list[PageRun], state: str, slot: int) -> None:
    """Adds a slot to `runs`: to the last run if it is adjacent and in the same state, else as a new run."""
    if runs and runs[-1].state == state and runs[-1].stop == slot:
        runs[-1] = runs[-1]._replace(stop=slot + 1)
    else:
        runs.append(PageRun(state, slot, slot + 1))


def _from_lengths(tensor: VTensor, page_size: int, rows: int) -> list[PageRun]:
    position = math.prod(tensor.shape[tensor.grow_dim + 1 :]) * tensor.element_size()
    needed = -(-(tensor.address % page_size + tensor.length * position) // page_size)
    mapped = max(needed, tensor.nbytes_mapped // page_size // rows)
    runs = [PageRun("mapped", 0, needed), PageRun("prefetched", needed, mapped)]
    return [run for run in runs if run.stop > run.start]


def cells(runs: Iterable[PageRun], slots: int, most: int) -> list[PageRun]:
    """Slots 0 to `slots` of a row in at most `most` runs; unmapped slots are ``"reserved"``.

    If there are more slots than `most`, each cell covers several and shows the most important state in it.
    """
    width = -(-slots // most) or 1
    found = ["reserved"] * -(-slots // width)
    for run in runs:
        for cell in range(run.start // width, min(len(found), -(-run.stop // width))):
            found[cell] = min(found[cell], run.state, key=_TELLING.index)
    merged: list[PageRun] = []
    for cell, state in enumerate(found):
        append(merged, state, cell)
    return [PageRun(run.state, run.start * width, min(slots, run.stop * width)) for run in merged]

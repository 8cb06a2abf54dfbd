"""The pages that rows or slots share, laid out as a tree, for pictures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from vtensor._pictures.pages import PageRun, append


class SharedPage(NamedTuple):
    """One slot of one owner."""

    key: Hashable
    """Equal for the same memory."""
    state: str
    shared: int
    """How many places share the page, including those outside the picture."""


class Owner(NamedTuple):
    """One lane of the picture: a row of a tensor, or a slot of a cache."""

    name: str
    pages: dict[int, SharedPage]
    """By slot."""


class Box(NamedTuple):
    """Slots ``[start, stop)`` of lanes ``[top, bottom)``. All the lanes have the same pages there."""

    state: str
    shared: int
    start: int
    stop: int
    top: int
    bottom: int


def as_tree(owners: Sequence[Owner]) -> list[Owner]:
    """The owners ordered so that those with a common prefix of shared pages are adjacent.

    This is the depth-first order of the prefix tree. Owners that share nothing come last, in the order given.
    A private page inside a shared run does not split the run.
    """
    numbers: dict[Hashable, int] = {}
    paths = []
    for owner in owners:
        shared = [owner.pages[slot] for slot in sorted(owner.pages) if owner.pages[slot].shared > 1]
        paths.append([numbers.setdefault(page.key, len(numbers)) for page in shared])
    order = sorted(range(len(owners)), key=lambda i: (not paths[i], paths[i]))
    return [owners[i] for i in order]


def boxes(owners: Sequence[Owner], slots: int) -> list[Box]:
    """One box for the page that adjacent lanes share. Adjacent slots in the same state join one box."""
    found: dict[tuple[int, int, int], list[PageRun]] = {}  # by lanes, and how many places share their pages
    for slot in range(slots):
        for top, bottom, page in _columns(owners, slot):
            append(found.setdefault((top, bottom, page.shared), []), page.state, slot)
    return [
        Box(run.state, shared, run.start, run.stop, top, bottom)
        for (top, bottom, shared), runs in found.items()
        for run in runs
    ]


def _columns(owners: Sequence[Owner], slot: int) -> Iterable[tuple[int, int, SharedPage]]:
    top = 0
    for page, lanes in groupby(owner.pages.get(slot) for owner in owners):
        bottom = top + len(list(lanes))
        if page is not None:
            yield top, bottom, page
        top = bottom

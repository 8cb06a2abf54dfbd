"""The pages that rows or slots share, laid out as a tree, for pictures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


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
    found: list[Box] = []
    open_at: dict[tuple[int, int], int] = {}  # by lanes: index in `found` of their last box
    for slot in range(slots):
        for top, bottom, page in _columns(owners, slot):
            at = open_at.get((top, bottom))
            if at is not None:
                box = found[at]
                if (box.stop, box.state, box.shared) == (slot, page.state, page.shared):
                    found[at] = box._replace(stop=slot + 1)
                    continue
            open_at[top, bottom] = len(found)
            found.append(Box(page.state, page.shared, slot, slot + 1, top, bottom))
    return found


def _columns(owners: Sequence[Owner], slot: int) -> Iterable[tuple[int, int, SharedPage]]:
    top = 0
    while top < len(owners):
        page = owners[top].pages.get(slot)
        bottom = top + 1
        if page is not None:
            while bottom < len(owners) and owners[bottom].pages.get(slot) == page:
                bottom += 1
            yield top, bottom, page
        top = bottom

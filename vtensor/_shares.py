"""Who shares which page, laid out as a tree: what the picture of it is drawn from."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class SharedPage(NamedTuple):
    """One slot of one owner."""

    key: Hashable
    """The same for the same memory."""
    state: str
    shared: int
    """How many places share it, also those that are in no lane here."""


class Owner(NamedTuple):
    """One lane of the picture: a row of a tensor, or a slot of a cache."""

    name: str
    pages: dict[int, SharedPage]
    """By slot."""


class Box(NamedTuple):
    """Slots ``[start, stop)`` of lanes ``[top, bottom)``: the same pages in each of the lanes."""

    state: str
    shared: int
    start: int
    stop: int
    top: int
    bottom: int


def as_tree(owners: Sequence[Owner]) -> list[Owner]:
    """Those that share from the beginning on side by side, else in the order given, and last who shares
    nothing: depth first, were it a tree. A private page inside a shared run does not split the run."""
    numbers: dict[Hashable, int] = {}
    paths = []
    for owner in owners:
        shared = [owner.pages[slot] for slot in sorted(owner.pages) if owner.pages[slot].shared > 1]
        paths.append([numbers.setdefault(page.key, len(numbers)) for page in shared])
    order = sorted(range(len(owners)), key=lambda i: (not paths[i], paths[i]))
    return [owners[i] for i in order]


def boxes(owners: Sequence[Owner], slots: int) -> list[Box]:
    """Pages that neighbouring lanes share as one box, and slots that go on alike as one."""
    found: list[Box] = []
    open_at: dict[tuple[int, int], int] = {}  # lanes to where in `found` their box is that may go on
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

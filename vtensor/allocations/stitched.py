"""A model of vtensor's allocator: any free pages serve any allocation, mapped behind one range.

The idea is GMLake's (Guo et al., arXiv 2401.08156). Allocations that fill their pages are kept apart from
all others, so that every page they leave is free as a whole. Each of the others would waste the rest of its
last page, so they are cut from shared pages.
"""

from __future__ import annotations

from vtensor.allocations.device import PAGE, rounded
from vtensor.allocations.growing import GrowingRanges, PagedModel
from vtensor.allocations.native import GRAIN, SMALL_SIZE

MOST_LOSS = 1 / 1024
"""The share of its pages that an allocation of whole pages may leave empty."""


class StitchedAllocator(PagedModel):
    """Allocations of whole pages, of other large sizes and of small ones.

    Each kind has its own ranges, and all kinds use the same pages. A freed range stays mapped, for the next
    allocation of its size or smaller, until its pages are needed elsewhere. Then as many free pages as are
    missing move, from any place and stream.

    Args:
        capacity: bytes of the device.
        most_loss: an allocation of a page and more takes whole pages if it leaves at most this share of them
            empty; 1 lets all of them take whole pages.
    """

    def __init__(self, capacity: int, most_loss: float = MOST_LOSS) -> None:
        super().__init__(capacity)
        self._most_loss = most_loss
        self._unmapped = 0  # pages taken of the device and mapped nowhere
        self._live: dict[int, GrowingRanges] = {}
        # Allocations of whole pages give up pages first: no neighbour needs these.
        self._kinds = self._whole, self._large, self._small = [GrowingRanges(self, PAGE) for _ in range(3)]

    def allocate(self, nbytes: int, stream: int, /) -> int:
        whole = rounded(nbytes, PAGE)
        if nbytes >= PAGE and whole - nbytes <= self._most_loss * whole:
            ranges, size = self._whole, whole
        else:
            size = rounded(nbytes, GRAIN)
            ranges = self._small if size <= SMALL_SIZE else self._large
        address = ranges.reuse(size, stream)
        if address is None:
            while (address := ranges.grow(size, stream)) is None:
                if not self._uncover(rounded(size, PAGE) // PAGE):
                    raise self.refused(nbytes)
        self._live[address] = ranges
        return address

    def free(self, address: int, nbytes: int, stream: int, /) -> None:
        self._live.pop(address).free(address)

    def release(self) -> None:
        """Gives back all free pages."""
        for ranges in self._kinds:
            ranges.release()
        self.calls["cuMemRelease"] += self._unmapped
        self.device_bytes -= self._unmapped * PAGE
        self._unmapped = 0

    def map(self, page: int, pages: int) -> bool:
        fresh = max(pages - self._unmapped, 0)
        if not self.take(fresh * page):
            return False
        self._unmapped -= pages - fresh
        self.calls["cuMemCreate"] += fresh
        self.calls["cuMemMap"] += pages
        self.calls["cuMemSetAccess"] += 1
        return True

    def unmap(self, page: int, pages: int) -> None:
        self.calls["cuMemUnmap"] += 1  # one for a run of pages
        self._unmapped += pages

    def _uncover(self, wanted: int) -> bool:
        """Unmaps ``wanted`` free pages, or all if there are fewer. False if there is none."""
        found = 0
        for ranges in self._kinds:
            if found < wanted:
                found += ranges.release(wanted - found)
        return found > 0

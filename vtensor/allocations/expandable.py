"""A model of torch's expandable segments, after their source: c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

from vtensor.allocations.device import rounded
from vtensor.allocations.growing import GrowingRanges, PagedModel
from vtensor.allocations.native import GRAIN, LARGE_BUFFER, SMALL_BUFFER, SMALL_SIZE


class ExpandableAllocator(PagedModel):
    """A range for each stream in a pool of small and one of large allocations.

    All free pages are unmapped before an allocation is refused.

    Args:
        capacity: bytes of the device.
        page: bytes of a page of the pool of large allocations; torch's are 20 MiB.
    """

    def __init__(self, capacity: int, page: int = LARGE_BUFFER) -> None:
        super().__init__(capacity)
        self._small, self._large = GrowingRanges(self, SMALL_BUFFER), GrowingRanges(self, page)

    def allocate(self, nbytes: int, stream: int, /) -> int:
        size = rounded(nbytes, GRAIN)
        ranges = self._small if size <= SMALL_SIZE else self._large
        for attempt in (ranges.reuse, ranges.grow):
            if (address := attempt(size, stream)) is not None:
                return address
        self.release()
        if (address := ranges.grow(size, stream)) is not None:
            return address
        raise self.refused(nbytes)

    def free(self, address: int, nbytes: int, stream: int, /) -> None:
        (self._small if self._small.holds(address) else self._large).free(address)

    def release(self) -> None:
        """Unmaps all free pages, as torch.cuda.empty_cache does."""
        self._large.release()
        self._small.release()

    def map(self, page: int, pages: int) -> bool:
        for taken in range(pages):
            self.calls["cuMemCreate"] += 1
            if not self.take(page):
                self.calls["cuMemRelease"] += taken
                self.device_bytes -= taken * page
                return False
        self.calls["cuMemMap"] += pages
        self.calls["cuMemSetAccess"] += 1
        return True

    def unmap(self, page: int, pages: int) -> None:
        self.calls["cuMemUnmap"] += pages
        self.calls["cuMemRelease"] += pages
        self.device_bytes -= pages * page

"""A model of torch's expandable segments, after their source: c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

from functools import partial

from vtensor.allocations.device import OnDevice, refused, rounded
from vtensor.allocations.growing import GrowingRanges
from vtensor.allocations.native import GRAIN, LARGE_BUFFER, SMALL_BUFFER, SMALL_SIZE

__all__ = ["ExpandableAllocator"]


class ExpandableAllocator(OnDevice):
    """A range for each stream in a pool of small and one of large allocations.

    All free pages are unmapped before an allocation is refused.

    Args:
        capacity: bytes of the device.
        page: bytes of a page of the pool of large allocations; torch's are 20 MiB.
    """

    def __init__(self, capacity: int, page: int = LARGE_BUFFER) -> None:
        super().__init__(capacity)
        self._small, self._large = (
            GrowingRanges(
                page=bytes_,
                reserved=capacity + capacity // 8,  # as torch does
                grain=GRAIN,
                take=partial(self._take, bytes_),
                give=partial(self._give, bytes_),
                reserve=self._reserve,
                unreserve=partial(self._count, "cuMemAddressFree"),
            )
            for bytes_ in (SMALL_BUFFER, page)
        )

    def allocate(self, nbytes: int, stream: int, /) -> int:
        size = rounded(nbytes, GRAIN)
        ranges = self._small if size <= SMALL_SIZE else self._large
        for attempt in (ranges.reuse, ranges.grow):
            if (address := attempt(size, stream)) is not None:
                return address
        self.release()
        if (address := ranges.grow(size, stream)) is not None:
            return address
        raise refused(nbytes, self._device)

    def free(self, address: int, nbytes: int, stream: int, /) -> None:
        (self._small if self._small.holds(address) else self._large).free(address)

    def release(self) -> None:
        """Unmaps all free pages, as torch.cuda.empty_cache does."""
        self._large.release()
        self._small.release()

    def _take(self, page: int, pages: int) -> bool:
        calls = self._device.calls
        for taken in range(pages):
            calls["cuMemCreate"] += 1
            if not self._device.take(page):
                calls["cuMemRelease"] += taken
                self._device.give(taken * page)
                return False
        calls["cuMemMap"] += pages
        calls["cuMemSetAccess"] += 1
        return True

    def _give(self, page: int, pages: int) -> None:
        self._device.calls["cuMemUnmap"] += pages
        self._device.calls["cuMemRelease"] += pages
        self._device.give(pages * page)

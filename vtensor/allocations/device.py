"""The calls of an allocator, and the base of its models: the bytes taken of a device, and counts of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Protocol

from vtensor.errors import OutOfPages

PAGE = 2 << 20
"""Bytes of a driver's page: the granularity of cudaMalloc's memory and of cuMemCreate."""


_ADDRESSES = 1 << 56
"""The distance of the first addresses of two ranges, so that no two touch."""


class Allocator(Protocol):
    """The calls of an allocator that a replay uses: of a model, or of one that maps real memory."""

    def allocate(self, nbytes: int, stream: int, /) -> int:
        """The address of ``nbytes`` bytes for ``stream``.

        Raises:
            OutOfPages: if the device has too few.
        """

    def free(self, address: int, nbytes: int, stream: int, /) -> None:
        """Ends an allocation. Takes its address, and its bytes and stream as they were asked for."""

    @property
    def device_bytes(self) -> int:
        """Bytes taken of the device."""

    @property
    def calls(self) -> Mapping[str, int]:
        """The number of calls of the driver, by name."""


class Model:
    """The base of the models of allocators: the bytes of a device, counts of calls, and addresses of ranges
    that never touch.

    Args:
        capacity: bytes of the device.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.device_bytes = 0
        self.calls: Counter[str] = Counter()
        self._ranges = count(1)

    def take(self, nbytes: int) -> bool:
        """Takes bytes of the device; False if there are too few."""
        if self.device_bytes + nbytes > self.capacity:
            return False
        self.device_bytes += nbytes
        return True

    def addresses(self) -> int:
        """The first address of a new range."""
        return _ADDRESSES * next(self._ranges)

    def refused(self, nbytes: int) -> OutOfPages:
        return OutOfPages(
            f"[replay-allocations] {nbytes:,} bytes were asked for, and the device has {self.capacity:,}, of "
            f"which {self.device_bytes:,} are taken: replay it on a larger one"
        )


def rounded(nbytes: int, multiple: int) -> int:
    """``nbytes`` rounded up."""
    return -(-nbytes // multiple) * multiple

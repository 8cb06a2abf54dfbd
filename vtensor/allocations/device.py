"""The device of the models: its bytes, the bytes taken, and a count of the calls that change these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Protocol

from vtensor.errors import OutOfPages

__all__ = ["PAGE", "Allocator", "Device", "OnDevice", "refused", "rounded"]

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


class Device:
    """Counts bytes taken, and calls.

    Args:
        capacity: bytes of the device.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.calls: Counter[str] = Counter()

    def take(self, nbytes: int) -> bool:
        """Takes ``nbytes``; False if there are too few."""
        if self.used + nbytes > self.capacity:
            return False
        self.used += nbytes
        return True

    def give(self, nbytes: int) -> None:
        self.used -= nbytes


class OnDevice:
    """The base of the models of allocators: a device, and addresses of ranges that never touch.

    Args:
        capacity: bytes of the device.
    """

    def __init__(self, capacity: int) -> None:
        self._device = Device(capacity)
        self._ranges = count(1)

    @property
    def device_bytes(self) -> int:
        return self._device.used

    @property
    def calls(self) -> Mapping[str, int]:
        return self._device.calls

    def _count(self, call: str) -> None:
        self._device.calls[call] += 1

    def _addresses(self) -> int:
        """The first address of a new range."""
        return _ADDRESSES * next(self._ranges)

    def _reserve(self) -> int:
        self._count("cuMemAddressReserve")
        return self._addresses()


def rounded(nbytes: int, multiple: int) -> int:
    """``nbytes`` rounded up."""
    return -(-nbytes // multiple) * multiple


def refused(nbytes: int, device: Device) -> OutOfPages:
    return OutOfPages(
        f"[replay-allocations] {nbytes:,} bytes were asked for, and the device has {device.capacity:,}, of "
        f"which {device.used:,} are taken: replay it on a larger one"
    )

"""vtensor's allocator itself, over real memory of the host, as a row beside the models."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from vtensor import _core
from vtensor.allocations.models import PAGE
from vtensor.pool import Pool


class RealAllocator:
    """A heap over a pool of the CPU. It measures the time of its calls."""

    def __init__(self, pool: Pool, heap: _core.HeapCore) -> None:
        self._pool, self._heap = pool, heap
        self.seconds = 0.0

    @property
    def device_bytes(self) -> int:
        return self._pool.stats().nbytes_held

    @property
    def calls(self) -> Mapping[str, int]:
        return sum(map(Counter, self._pool.stats().driver_calls.values()), Counter())

    def allocate(self, nbytes: int, stream: int, /) -> int:
        begun = time.perf_counter()
        try:
            return self._heap.allocate(nbytes, stream or None)
        finally:
            self.seconds += time.perf_counter() - begun

    def free(self, address: int, nbytes: int, stream: int, /) -> None:
        begun = time.perf_counter()
        self._heap.free(address, stream or None)
        self.seconds += time.perf_counter() - begun


@contextmanager
def real(capacity: int) -> Iterator[RealAllocator]:
    """Opens a :class:`RealAllocator` over ``capacity`` bytes of the host, in pages of 2 MiB."""
    with (
        Pool("cpu", page_size=PAGE, budget=capacity) as pool,
        closing(_core.HeapCore(pool._open_core("replay-allocations"))) as heap,
    ):
        yield RealAllocator(pool, heap)

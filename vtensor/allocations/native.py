"""A model of torch's native caching allocator, after its source: c10/cuda/CUDACachingAllocator.cpp.

It leaves out private pools of CUDA graphs, and ``max_split_size``, ``roundup_power2_divisions`` and garbage
collection, which torch's defaults do not use.
"""

from __future__ import annotations

from vtensor.allocations.device import Model, rounded
from vtensor.allocations.pieces import FreePieces, Piece

GRAIN = 512  # kMinBlockSize
SMALL_SIZE = 1 << 20  # kSmallSize: up to this, an allocation is of the small pool
SMALL_BUFFER = 2 << 20  # kSmallBuffer
LARGE_BUFFER = 20 << 20  # kLargeBuffer
_LARGE_ALLOCATION = 10 << 20  # kMinLargeAlloc: from this, a cudaMalloc of its own
_LARGE_ROUND = 2 << 20  # kRoundLarge


class NativeAllocator(Model):
    """Best fit in the memory of cudaMalloc, by stream, in a pool for small and one for large allocations."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small, self._large = FreePieces(), FreePieces()
        self._live: dict[int, Piece] = {}

    def allocate(self, nbytes: int, stream: int, /) -> int:
        size = rounded(nbytes, GRAIN)
        small = size <= SMALL_SIZE
        pool = self._small if small else self._large
        piece = next(pool.at_least(size, stream), None)
        if piece:
            pool.remove(piece)
        else:
            piece = self._malloc(size, stream)
        if piece.size - size >= GRAIN if small else piece.size - size > SMALL_SIZE:
            pool.add(piece.split(size))
        piece.allocated = True
        self._live[piece.address] = piece
        return piece.address

    def free(self, address: int, nbytes: int, stream: int, /) -> None:
        piece = self._live.pop(address)
        piece.allocated = False
        pool = self._small if rounded(nbytes, GRAIN) <= SMALL_SIZE else self._large
        for neighbour in (piece.prev, piece.next):
            if neighbour and not neighbour.allocated:
                pool.remove(neighbour)
                piece.absorb(neighbour)
        pool.add(piece)

    def release(self) -> None:
        """Frees the memory of cudaMalloc in which nothing is allocated, as torch.cuda.empty_cache does."""
        for pool in (self._small, self._large):
            for piece in pool.all():
                if not piece.prev and not piece.next:
                    pool.remove(piece)
                    self.calls["cudaFree"] += 1
                    self.device_bytes -= piece.size

    def _malloc(self, size: int, stream: int) -> Piece:
        if size <= SMALL_SIZE:
            asked = SMALL_BUFFER
        elif size < _LARGE_ALLOCATION:
            asked = LARGE_BUFFER
        else:
            asked = rounded(size, _LARGE_ROUND)
        for attempt in range(2):
            if attempt:
                self.release()
            self.calls["cudaMalloc"] += 1
            if self.take(asked):
                return Piece(self.addresses(), asked, stream)
        raise self.refused(asked)

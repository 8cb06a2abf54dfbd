"""Models of allocators: torch's native one, its expandable segments, and vtensor's.

Torch's follow their source, c10/cuda/CUDACachingAllocator.cpp, without private pools of CUDA graphs, and
without ``max_split_size``, ``roundup_power2_divisions`` and garbage collection, which torch's defaults do not
use.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Protocol, TypeAlias

from vtensor.allocations.pieces import Piece, Pieces
from vtensor.errors import OutOfPages

PAGE = 2 << 20
"""Bytes of a driver's page: the granularity of cudaMalloc's memory and of cuMemCreate."""

MOST_LOSS = 1 / 1024
"""The share of its pages that an allocation of whole pages may leave empty."""

_ADDRESSES = 1 << 56  # between the first addresses of two ranges, so that no two touch

_GRAIN = 512  # kMinBlockSize
_SMALL_SIZE = 1 << 20  # kSmallSize: up to this, an allocation is of the small pool
_SMALL_BUFFER = 2 << 20  # kSmallBuffer
_LARGE_BUFFER = 20 << 20  # kLargeBuffer
_LARGE_ALLOCATION = 10 << 20  # kMinLargeAlloc: from this, a cudaMalloc of its own
_LARGE_ROUND = 2 << 20  # kRoundLarge


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


Opened: TypeAlias = Callable[[int], AbstractContextManager[Allocator]]
"""Opens an allocator for a device of a number of bytes."""


class Model:
    """The base of the models of allocators: the bytes of a device, counts of calls, and addresses of ranges
    that never touch. ``capacity`` is the device's, in bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.device_bytes = 0
        self.calls: Counter[str] = Counter()
        self.addresses = count(_ADDRESSES, _ADDRESSES)
        """The first addresses of new ranges."""

    def take(self, nbytes: int) -> bool:
        if self.device_bytes + nbytes > self.capacity:
            return False
        self.device_bytes += nbytes
        return True

    def refused(self, nbytes: int) -> OutOfPages:
        return OutOfPages(
            f"[replay-allocations] {nbytes:,} bytes were asked for, and the device has {self.capacity:,}, of "
            f"which {self.device_bytes:,} are taken: replay it on a larger one"
        )


class NativeAllocator(Model):
    """Best fit in the memory of cudaMalloc, by stream, in a pool for small and one for large allocations."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small, self._large = Pieces(), Pieces()

    def allocate(self, nbytes: int, stream: int, /) -> int:
        size = _rounded(nbytes, _GRAIN)
        pool, split = (self._small, _GRAIN) if size <= _SMALL_SIZE else (self._large, _SMALL_SIZE + 1)
        piece = next(pool.at_least(size, stream), None)
        if piece is None:
            piece = self._malloc(size, stream)
            pool.add(piece)
        return pool.take(piece, size, split)

    def free(self, address: int, nbytes: int, stream: int, /) -> None:
        (self._small if nbytes <= _SMALL_SIZE else self._large).free(address)

    def release(self) -> None:
        """Frees the memory of cudaMalloc in which nothing is allocated, as torch.cuda.empty_cache does."""
        for pool in (self._small, self._large):
            for piece in pool.all_free():
                if not piece.prev and not piece.next:
                    pool.remove(piece)
                    self.calls["cudaFree"] += 1
                    self.device_bytes -= piece.size

    def _malloc(self, size: int, stream: int) -> Piece:
        if size <= _SMALL_SIZE:
            asked = _SMALL_BUFFER
        elif size < _LARGE_ALLOCATION:
            asked = _LARGE_BUFFER
        else:
            asked = _rounded(size, _LARGE_ROUND)
        for attempt in range(2):
            if attempt:
                self.release()
            self.calls["cudaMalloc"] += 1
            if self.take(asked):
                return Piece(next(self.addresses), asked, stream)
        raise self.refused(asked)


class GrowingRanges(Pieces):
    """The ranges of one pool: one for each stream, or more if addresses run out. ``page`` is in bytes.

    They grow page by page and give back free pages anywhere, after torch's expandable segments.
    """

    def __init__(self, model: ExpandableAllocator, page: int) -> None:
        super().__init__()
        self._model, self._page = model, page
        self._reserved = _rounded(model.capacity + model.capacity // 8, page)  # as torch does

    def reuse(self, size: int, stream: int) -> int | None:
        """An address where ``size`` bytes are mapped and free, in the smallest piece that is large enough;
        None if there is none. A piece that can grow counts as what it can become."""
        chosen = None
        for piece in self.at_least(size, stream):
            if chosen is not None and _growable(piece) >= _growable(chosen):
                break
            chosen = piece
        return None if chosen is None else self.take(chosen, size, _GRAIN)

    def grow(self, size: int, stream: int) -> int | None:
        """An address for ``size`` bytes, with pages mapped for it; None if there are too few."""
        piece = self._candidate(size, stream)
        if not piece.mapped and not self._map(piece, min(piece.size, size)):
            return None
        while piece.size < size:
            following = piece.next
            assert following is not None
            if not self._map(following, min(size - piece.size, following.size)):
                return None
            piece = following
        return self.take(piece, size, _GRAIN)

    def release(self, most: int = sys.maxsize) -> int:
        """Unmaps whole free pages: all, or up to ``most`` of the largest free pieces. Returns how many."""
        released = 0
        for piece in sorted(self.all_free(), key=lambda piece: -piece.size):
            if released >= most:
                break
            released += self._unmap(piece, most - released)
        return released

    def _candidate(self, size: int, stream: int) -> Piece:
        """The lowest unmapped piece from which there are addresses for ``size`` bytes, or the free one before
        it."""
        for _, piece in sorted(self._unmapped.get(stream, {}).items()):
            if piece.prev and not piece.prev.allocated:
                piece = piece.prev
            room, place = 0, piece
            while room < size:
                room += place.size
                if not (place.next and not place.next.allocated):
                    break
                place = place.next
            if room >= size:
                return piece
        self._model.calls["cuMemAddressReserve"] += 1
        begin = _rounded(next(self._model.addresses), self._page)
        piece = Piece(begin, max(self._reserved, _rounded(size, self._page)), stream, False)
        self.add(piece)
        return piece

    def _map(self, piece: Piece, size: int) -> bool:
        size = _rounded(size, self._page)
        if not self._model.map(self._page, size // self._page):
            return False
        self.remove(piece)
        if size < piece.size:
            self.add(piece.split(size))
        piece.mapped = True
        self.join(piece)
        return True

    def _unmap(self, piece: Piece, most: int) -> int:
        page = self._page
        begin, end = _rounded(piece.address, page), (piece.address + piece.size) // page * page
        if begin >= end:
            return 0
        pages = min(most, (end - begin) // page)
        begin = end - pages * page
        self._model.unmap(page, pages)
        self.remove(piece)
        if begin > piece.address:
            before, piece = piece, piece.split(begin - piece.address)
            self.add(before)
        if piece.size > pages * page:
            self.add(piece.split(pages * page))
        piece.mapped = False
        self.join(piece)
        if not piece.prev and not piece.next:
            self.remove(piece)
            self._model.calls["cuMemAddressFree"] += 1
        return pages


class ExpandableAllocator(Model):
    """torch's expandable segments: a range for each stream in a pool of small and one of large allocations.

    All free pages are unmapped before an allocation is refused. ``page`` is the size of a page of the pool of
    large allocations, in bytes; torch's are of 20 MiB.
    """

    def __init__(self, capacity: int, page: int = _LARGE_BUFFER) -> None:
        super().__init__(capacity)
        self.kinds = [GrowingRanges(self, page), GrowingRanges(self, _SMALL_BUFFER)]
        """The ranges for each kind of allocation. The first give up pages first."""

    def allocate(self, nbytes: int, stream: int, /) -> int:
        ranges, size = self.kind(nbytes)
        address = ranges.reuse(size, stream)
        while address is None:
            address = ranges.grow(size, stream)
            if address is None and not self.make_room(size):
                raise self.refused(nbytes)
        return address

    def free(self, address: int, nbytes: int, stream: int, /) -> None:
        self.kind(nbytes)[0].free(address)

    def kind(self, nbytes: int) -> tuple[GrowingRanges, int]:
        """The ranges for an allocation of ``nbytes``, and the bytes that it takes there."""
        return self.kinds[nbytes <= _SMALL_SIZE], _rounded(nbytes, _GRAIN)

    def map(self, page: int, pages: int) -> bool:
        """Maps a number of pages at once; False if there are too few, and then none is mapped."""
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

    def make_room(self, size: int) -> bool:
        """Unmaps free pages, for ``size`` bytes; False if there is none."""
        return sum(ranges.release() for ranges in self.kinds) > 0


class StitchedAllocator(ExpandableAllocator):
    """vtensor's allocator: any free pages serve any allocation, mapped behind one range.

    The idea is GMLake's (Guo et al., arXiv 2401.08156). Allocations that fill their pages are kept apart from
    all others, so that every page they leave is free as a whole. Each of the others would waste the rest of
    its last page, so they are cut from shared pages.

    Allocations of whole pages, other large ones and small ones have their own ranges, and all use the same
    pages. A freed range stays mapped, for the next allocation of its size or smaller, until its pages are
    needed elsewhere. Then as many free pages as are missing move, from any place and stream.

    Args:
        capacity: as for :class:`Model`.
        most_loss: an allocation of a page and more takes whole pages if it leaves at most this share of them
            empty; 1 lets all of them take whole pages.
    """

    def __init__(self, capacity: int, most_loss: float = MOST_LOSS) -> None:
        super().__init__(capacity)
        self._most_loss = most_loss
        self._unmapped = 0  # pages taken of the device and mapped nowhere
        # Allocations of whole pages give up pages first: no neighbour needs these.
        self.kinds = self._whole, self._large, self._small = [GrowingRanges(self, PAGE) for _ in range(3)]

    def kind(self, nbytes: int) -> tuple[GrowingRanges, int]:
        whole = _rounded(nbytes, PAGE)
        if nbytes >= PAGE and whole - nbytes <= self._most_loss * whole:
            return self._whole, whole
        return self._small if nbytes <= _SMALL_SIZE else self._large, _rounded(nbytes, _GRAIN)

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

    def make_room(self, size: int) -> bool:
        wanted, found = _rounded(size, PAGE) // PAGE, 0
        for ranges in self.kinds:
            found += ranges.release(wanted - found)
        return found > 0


def _growable(piece: Piece) -> int:
    return piece.size + (piece.next.size if piece.next and not piece.next.mapped else 0)


def _rounded(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


MODELS: dict[str, Opened] = {
    "native": lambda capacity: nullcontext(NativeAllocator(capacity)),
    "expandable-20MiB": lambda capacity: nullcontext(ExpandableAllocator(capacity)),
    "expandable-2MiB": lambda capacity: nullcontext(ExpandableAllocator(capacity, page=PAGE)),
    "stitched-whole": lambda capacity: nullcontext(StitchedAllocator(capacity, most_loss=1.0)),
    "stitched": lambda capacity: nullcontext(StitchedAllocator(capacity)),
}
"""torch's allocators; one that stitches every allocation of a page and more; and vtensor's."""

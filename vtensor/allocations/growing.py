"""Ranges that grow page by page and give back free pages anywhere, after torch's expandable segments."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vtensor.allocations.device import Model, rounded
from vtensor.allocations.native import GRAIN
from vtensor.allocations.pieces import FreePieces, Piece


class PagedModel(Model, ABC):
    """A model whose ranges grow page by page."""

    @abstractmethod
    def map(self, page: int, pages: int) -> bool:
        """Maps a number of pages at once; False if there are too few, and then none is mapped."""

    @abstractmethod
    def unmap(self, page: int, pages: int) -> None:
        """Unmaps a number of pages."""


class GrowingRanges:
    """The ranges of one pool: one for each stream, or more if addresses run out. ``page`` is in bytes."""

    def __init__(self, model: PagedModel, page: int) -> None:
        self._model, self._page = model, page
        self._reserved = rounded(model.capacity + model.capacity // 8, page)  # as torch does
        self._free = FreePieces()
        self._unmapped: dict[int, dict[int, Piece]] = {}  # of a stream, by address
        self._live: dict[int, Piece] = {}

    def reuse(self, size: int, stream: int) -> int | None:
        """An address where ``size`` bytes are mapped and free; None if there is none."""
        piece = self._best_fit(size, stream)
        return None if piece is None else self._allocated(piece, size)

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
        return self._allocated(piece, size)

    def free(self, address: int) -> None:
        piece = self._live.pop(address)
        piece.allocated = False
        self._merge(piece)
        self._free.add(piece)

    def holds(self, address: int) -> bool:
        return address in self._live

    def release(self, most: int | None = None) -> int:
        """Unmaps whole free pages: all, or up to ``most`` of the largest free pieces. Returns how many."""
        pieces = self._free.all()
        if most is not None:
            pieces.sort(key=lambda piece: -piece.size)
        released = 0
        for piece in pieces:
            if most is not None and released >= most:
                break
            released += self._unmap(piece, None if most is None else most - released)
        return released

    def _best_fit(self, size: int, stream: int) -> Piece | None:
        """The smallest free piece that is large enough. One that can grow counts as what it can become."""
        chosen = None
        for piece in self._free.at_least(size, stream):
            if chosen is not None and _growable(piece) >= _growable(chosen):
                break
            chosen = piece
        return chosen

    def _allocated(self, piece: Piece, size: int) -> int:
        self._free.remove(piece)
        if piece.size - size >= GRAIN:
            self._free.add(piece.split(size))
        piece.allocated = True
        self._live[piece.address] = piece
        return piece.address

    def _candidate(self, size: int, stream: int) -> Piece:
        """The lowest unmapped piece from which there are addresses for ``size`` bytes, or the free one before
        it."""
        unmapped = self._unmapped.setdefault(stream, {})
        for address in sorted(unmapped):
            piece = unmapped[address]
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
        begin = rounded(self._model.addresses(), self._page)
        piece = Piece(begin, max(self._reserved, rounded(size, self._page)), stream, False)
        unmapped[piece.address] = piece
        return piece

    def _map(self, piece: Piece, size: int) -> bool:
        size = rounded(size, self._page)
        if not self._model.map(self._page, size // self._page):
            return False
        unmapped = self._unmapped[piece.stream]
        del unmapped[piece.address]
        if size < piece.size:
            rest = piece.split(size)
            unmapped[rest.address] = rest
        piece.mapped = True
        self._merge(piece)
        self._free.add(piece)
        return True

    def _unmap(self, piece: Piece, most: int | None) -> int:
        page = self._page
        begin, end = rounded(piece.address, page), (piece.address + piece.size) // page * page
        if begin >= end:
            return 0
        pages = (end - begin) // page
        if most is not None and pages > most:
            pages, begin = most, end - most * page
        self._model.unmap(page, pages)
        self._free.remove(piece)
        if begin > piece.address:
            before, piece = piece, piece.split(begin - piece.address)
            self._free.add(before)
        if piece.size > pages * page:
            self._free.add(piece.split(pages * page))
        piece.mapped = False
        self._merge(piece)
        if piece.prev or piece.next:
            self._unmapped[piece.stream][piece.address] = piece
        else:
            self._model.calls["cuMemAddressFree"] += 1
        return pages

    def _merge(self, piece: Piece) -> None:
        for neighbour in (piece.prev, piece.next):
            if neighbour and not neighbour.allocated and neighbour.mapped == piece.mapped:
                if neighbour.mapped:
                    self._free.remove(neighbour)
                else:
                    del self._unmapped[neighbour.stream][neighbour.address]
                piece.absorb(neighbour)


def _growable(piece: Piece) -> int:
    return piece.size + (piece.next.size if piece.next and not piece.next.mapped else 0)

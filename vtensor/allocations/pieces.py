"""Address ranges cut into pieces, allocated and free, as the models of torch's allocators keep them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Piece:
    """A part of an address range, between its neighbours."""

    __slots__ = ("address", "allocated", "mapped", "next", "prev", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, mapped: bool = True) -> None:
        self.address, self.size, self.stream, self.mapped = address, size, stream, mapped
        self.allocated = False
        self.prev: Piece | None = None
        self.next: Piece | None = None

    def split(self, size: int) -> Piece:
        """Keeps the first ``size`` bytes. Returns the rest, which follows."""
        rest = Piece(self.address + size, self.size - size, self.stream, self.mapped)
        self.size = size
        rest.prev, rest.next = self, self.next
        if self.next:
            self.next.prev = rest
        self.next = rest
        return rest

    def absorb(self, neighbour: Piece) -> None:
        """Takes in the piece before or after."""
        if self.prev is neighbour:
            self.address, self.prev = neighbour.address, neighbour.prev
            if self.prev:
                self.prev.next = self
        else:
            self.next = neighbour.next
            if self.next:
                self.next.prev = self
        self.size += neighbour.size


class FreePieces:
    """Free pieces of each stream, by size and then by address."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[int, int, Piece]]] = {}

    def add(self, piece: Piece) -> None:
        insort(self._of.setdefault(piece.stream, []), (piece.size, piece.address, piece))

    def remove(self, piece: Piece) -> None:
        pieces = self._of[piece.stream]
        del pieces[bisect_left(pieces, (piece.size, piece.address))]

    def at_least(self, size: int, stream: int) -> Iterator[Piece]:
        """Those of ``size`` and larger, from the smallest."""
        pieces = self._of.get(stream, [])
        for i in range(bisect_left(pieces, (size,)), len(pieces)):
            yield pieces[i][2]

    def all(self) -> list[Piece]:
        return [piece for pieces in self._of.values() for _, _, piece in pieces]

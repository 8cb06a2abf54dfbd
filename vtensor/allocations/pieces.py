"""Address ranges cut into pieces, allocated and free, as the models of allocators keep them."""

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
        if self.prev is neighbour:
            self.address, self.prev = neighbour.address, neighbour.prev
            if self.prev:
                self.prev.next = self
        else:
            self.next = neighbour.next
            if self.next:
                self.next.prev = self
        self.size += neighbour.size


class Pieces:
    """The pieces of one pool: free ones of each stream by size and then by address, unmapped ones of each
    stream by address, and allocated ones."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, int, Piece]]] = {}
        self._unmapped: dict[int, dict[int, Piece]] = {}
        self._live: dict[int, Piece] = {}

    def add(self, piece: Piece) -> None:
        """Adds a piece that is free or unmapped."""
        if piece.mapped:
            insort(self._free.setdefault(piece.stream, []), (piece.size, piece.address, piece))
        else:
            self._unmapped.setdefault(piece.stream, {})[piece.address] = piece

    def remove(self, piece: Piece) -> None:
        if piece.mapped:
            pieces = self._free[piece.stream]
            del pieces[bisect_left(pieces, (piece.size, piece.address))]
        else:
            del self._unmapped[piece.stream][piece.address]

    def join(self, piece: Piece) -> None:
        """Adds a piece, with the neighbours that are free or unmapped as it is."""
        for neighbour in (piece.prev, piece.next):
            if neighbour and not neighbour.allocated and neighbour.mapped == piece.mapped:
                self.remove(neighbour)
                piece.absorb(neighbour)
        self.add(piece)

    def at_least(self, size: int, stream: int) -> Iterator[Piece]:
        """The free pieces of ``size`` and larger, from the smallest."""
        pieces = self._free.get(stream, [])
        for i in range(bisect_left(pieces, (size,)), len(pieces)):
            yield pieces[i][2]

    def all_free(self) -> list[Piece]:
        return [piece for pieces in self._free.values() for _, _, piece in pieces]

    def take(self, piece: Piece, size: int, split: int) -> int:
        """Allocates ``size`` bytes of a free piece, and what is left of it if that is below ``split``.
        Returns the address."""
        self.remove(piece)
        if piece.size - size >= split:
            self.add(piece.split(size))
        piece.allocated = True
        self._live[piece.address] = piece
        return piece.address

    def free(self, address: int) -> None:
        piece = self._live.pop(address)
        piece.allocated = False
        self.join(piece)

"""A model of tensors that grow: the bytes of each, the pages it needs, and the pages that views hold.

`Memory` stands for one reservation. Its cells outlive the tensor while views see them. `ModelTensor` and
`ModelView` are windows on a memory. Two windows on one memory see each other's writes. Windows on two
memories never do (I6), even if they share pages.

Every owner writes bytes of its own family only, so a check recognises bytes of another owner (I7).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

import vtensor

# The bytes of family f are those below 0x7c with b % 16 == f. They make no NaN in any dtype, so that all
# torch operations keep them bit for bit. Zero belongs to no family.
FAMILIES = range(1, 16)
TOP = 0x7C


def family_bytes(family: int, n: int, seed: int) -> torch.Tensor:
    own = torch.tensor([b for b in range(1, TOP) if b % 16 == family], dtype=torch.uint8, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    return own[torch.randint(0, len(own), (n,), generator=generator, device="cpu")]


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """A dense copy of the bytes of `t`, which `torch.equal` compares bit for bit, even NaN and -0.0."""
    dense = t.detach().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)


def only_of(data: torch.Tensor, families: frozenset[int]) -> bool:
    return {int(b) % 16 for b in data.unique() if b} <= families and not bool((data >= TOP).any())


@dataclass(eq=False)
class Memory:
    """Cells by row, position and byte, from the first position of a reservation."""

    rows: int
    item_bytes: int
    page_size: int
    phase: int  # bytes before position 0 in its page
    cells: torch.Tensor

    def slots(self, start: int, stop: int) -> set[int]:
        """The slots of a row that the positions `start` to `stop` need."""
        if start >= stop:
            return set()
        first = (self.phase + start * self.item_bytes) // self.page_size
        last = (self.phase + stop * self.item_bytes - 1) // self.page_size
        return set(range(first, last + 1))

    def copy(self, row_index: list[int] | None = None, start: int = 0) -> Memory:
        """New memory with the bytes of the given rows from position `start` on, which becomes position 0."""
        rows = list(range(self.rows)) if row_index is None else row_index
        return Memory(
            rows=len(rows),
            item_bytes=self.item_bytes,
            page_size=self.page_size,
            phase=(self.phase + start * self.item_bytes) % self.page_size,
            cells=self.cells[rows, start:].clone(),
        )

    def make_room(self, positions: int) -> None:
        missing = positions - self.cells.shape[1]
        if missing > 0:
            more = torch.zeros(self.rows, missing, self.item_bytes, dtype=torch.uint8, device="cpu")
            self.cells = torch.cat([self.cells, more], 1)


_serial = itertools.count()


@dataclass(eq=False)
class ModelTensor:
    """A tensor and its expected state."""

    actual: vtensor.VTensor
    pool: vtensor.Pool
    memory: Memory
    shape_before: tuple[int, ...]  # the dims before grow_dim
    item: tuple[int, ...]  # the dims after it
    dtype: torch.dtype
    capacity: int
    family: int  # the family of the bytes that it writes
    families: frozenset[int]  # families that it may show: its own, and its parent's from before the fork
    front: int = 0
    length: int = 0
    zeroed: bool = False
    dropped: bool = False  # positions, whose bytes growth may show again
    move: bool = False
    base: int = 0  # address of position 0
    row_stride: int = 0  # bytes
    serial: int = field(init=False, default_factory=lambda: next(_serial))

    @property
    def rows(self) -> int:
        return self.memory.rows

    @property
    def grow_dim(self) -> int:
        return len(self.shape_before)

    @property
    def room(self) -> int:
        """Positions that can still be added."""
        return self.capacity - self.length - (0 if self.move else self.front)

    def window(self) -> torch.Tensor:
        return self.memory.cells[:, self.front : self.front + self.length]

    def slots(self) -> set[int]:
        return self.memory.slots(self.front, self.front + self.length)

    def shape(self) -> tuple[int, ...]:
        return (*self.shape_before, self.length, *self.item)

    def typed(self, data: torch.Tensor) -> torch.Tensor:
        """Bytes [rows, n, item_bytes] as a tensor of this one's dtype and dimensions."""
        shape = (*self.shape_before, data.shape[1], *self.item)
        return data.contiguous().reshape(-1).view(self.dtype).reshape(shape)

    def expected(self) -> torch.Tensor:
        """The expected contents, as a plain tensor."""
        return self.typed(self.window())

    def new_bytes(self, n: int, seed: int) -> torch.Tensor:
        data = family_bytes(self.family, self.rows * n * self.memory.item_bytes, seed)
        return data.reshape(self.rows, n, self.memory.item_bytes)


@dataclass(eq=False)
class ModelView:
    """A plain tensor over positions of a memory, with the slots that its generation covers."""

    actual: torch.Tensor
    memory: Memory
    start: int
    stop: int
    slots: set[int]
    owner: ModelTensor
    pool: vtensor.Pool

    def window(self) -> torch.Tensor:
        return self.memory.cells[:, self.start : self.stop]

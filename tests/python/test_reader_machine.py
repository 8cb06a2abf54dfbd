"""One writer and three readers in processes of their own: random operations, kills, pages that others reuse.

Contents are compared with a plain tensor at each sync, and again later where the writer has changed nothing
in place: a page that is reused too early shows.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch

import vtensor
from reader_process import ReaderProcess, checksum, named_memory
from support import SOAK, eventually, memfds, open_pool

PAGE = 4096
ROWS, ITEM, CAPACITY = 2, 128, 400  # 512 bytes a position, 8 positions a page
READERS = 3
STRANGE = torch.full((CAPACITY, ITEM), -1, dtype=torch.int32)  # no item of the tensor


class World:
    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.pool = open_pool(kind, 400, PAGE, shareable=True, prefetch=self.random.choice([0, 64 * PAGE]))
        self.readers = [ReaderProcess() for _ in range(READERS)]
        self.seen: list[tuple[int, int] | None]  # length and checksum, while they must hold
        self.rewrites()
        self.has: list[bool] = [False] * READERS  # whether the reader has the present tensor
        self.strangers: list[vtensor.VTensor] = []
        self.counts = dict.fromkeys(("operations", "syncs", "kills", "refused"), 0)
        self.begin()

    def begin(self) -> None:
        self.front = self.length = 0
        self.tensor = vtensor.empty(
            ROWS, 0, ITEM, grow_dim=1, capacity=CAPACITY, dtype=torch.int32, pool=self.pool
        )
        self.kept = torch.empty(ROWS, CAPACITY, ITEM, dtype=torch.int32)

    @property
    def model(self) -> torch.Tensor:
        """What the tensor has."""
        return self.kept[:, self.front : self.front + self.length]

    def values(self, n: int) -> torch.Tensor:
        return torch.randint(1 << 30, (ROWS, n, ITEM), dtype=torch.int32)

    # -- the writer

    def append(self) -> None:
        n = min(self.random.randint(1, 30), CAPACITY - self.front - self.length)
        if n > 0:
            x = self.values(n)
            self.tensor.append(x)
            self.length += n
            self.model[:, -n:] = x

    def shrink(self) -> None:
        n = min(self.random.randint(1, 60), self.tensor.length)
        self.tensor.shrink(n)
        self.length -= n
        self.front = self.front if self.length else 0
        self.rewrites()

    def shrink_front(self) -> None:
        n = min(self.random.randint(1, 20), self.tensor.length)
        self.tensor.shrink(n, front=True)
        self.length -= n
        self.front = self.front + n if self.length else 0
        self.rewrites()

    def write(self) -> None:
        if self.tensor.length:
            at = self.random.randrange(self.tensor.length)
            self.tensor.unshare(at, at + 1)
            x = self.values(1)
            self.tensor[:, at] = x[:, 0]
            self.model[:, at] = x[:, 0]
            self.rewrites()

    def fork(self) -> None:
        child = self.tensor.fork()
        if child.length:
            if self.pool.device.type == "cuda" or self.random.random() < 0.5:
                child.unshare(0, 1)  # on the host the kernel copies the page otherwise
            child[:, 0] = -1
        with suppress(vtensor.OutOfPages, vtensor.CapacityExceeded):
            child.append(torch.full((ROWS, 1, ITEM), -1, dtype=torch.int32))
        self.strangers.append(child)
        self.rewrites()  # the next append copies the last page

    def stranger(self) -> None:
        """Pages change hands: of another tensor, full of another number."""
        if len(self.strangers) > 3:
            self.strangers.pop(self.random.randrange(len(self.strangers))).close()
        t = vtensor.empty(0, ITEM, grow_dim=0, capacity=CAPACITY, dtype=torch.int32, pool=self.pool)
        self.strangers.append(t)
        t.append(STRANGE[: self.random.randint(1, CAPACITY)])

    def close(self) -> None:
        self.tensor.close()
        for i, reader in enumerate(self.readers):
            if self.has[i]:
                kind, text = reader.sync()
                assert kind == "Closed", text
        self.begin()
        self.has = [False] * READERS

    def rewrites(self) -> None:
        """What readers have not synced may change under them from now on."""
        self.seen = [None] * READERS

    # -- the readers

    def sync(self) -> None:
        i = self.random.randrange(READERS)
        reader = self.readers[i]
        if not self.has[i]:
            with suppress(vtensor.VTensorError):
                reader.close()
            assert reader.receive(self.tensor) == "Reader"
            self.has[i] = True
        self.compare(i)
        self.counts["syncs"] += 1

    def compare(self, i: int) -> None:
        _, *seen = self.readers[i].checksum()
        assert seen == [self.length, checksum(self.model)]
        self.seen[i] = tuple(seen)

    def look(self) -> None:
        i = self.random.randrange(READERS)
        if self.has[i] and self.seen[i] is not None:
            assert self.readers[i].evaluate("(r.length, checksum(r))") == self.seen[i]

    def kill(self) -> None:
        i = self.random.randrange(READERS)
        self.readers[i].kill()
        self.readers[i].end()
        self.readers[i] = ReaderProcess()
        self.has[i], self.seen[i] = False, None
        self.counts["kills"] += 1

    def run(self, operations: int) -> None:
        writes = [self.append] * 6 + [self.shrink, self.shrink_front, self.write, self.fork, self.stranger]
        others = ((0.00005, self.kill), (0.0005, self.close), (0.02, self.sync), (0.03, self.look))
        for _ in range(operations):
            roll = self.random.random()
            action = next((other for below, other in others if roll < below), None)
            action = action or self.random.choice(writes)
            try:
                action()
            except vtensor.OutOfPages:
                self.counts["refused"] += 1
                while self.strangers:
                    self.strangers.pop().close()
                if self.pool.stats().pages_free < 50:
                    self.sync_all()
            self.counts["operations"] += 1

    def sync_all(self) -> None:
        for i in range(READERS):
            if self.has[i]:
                self.compare(i)

    def end(self) -> None:
        self.tensor.close()
        for t in self.strangers:
            t.close()
        for reader in self.readers:
            reader.end()
        assert eventually(lambda: self.pool.stats().pages_held_by_readers == 0)
        self.pool._core.check_invariants()
        self.pool.trim()
        assert self.pool.stats().pages_used == 0
        self.pool.close()


LONG = pytest.mark.skipif(not SOAK, reason="takes minutes: VTENSOR_HYPOTHESIS=soak")
SLOW = [pytest.mark.slow, pytest.mark.seconds(1200)]


@pytest.mark.parametrize(
    "operations", [4_000, pytest.param(100_000, marks=SLOW), pytest.param(1_000_000, marks=[*SLOW, LONG])]
)
def test_readers_see_the_writer(kind, operations):
    files, shm = memfds(), named_memory()
    world = World(kind, seed=operations)
    world.run(operations)
    if operations < 100_000:
        world.kill()
        world.run(500)
    print(world.counts)
    assert world.counts["kills"] and world.counts["syncs"] > operations // 100
    world.end()
    del world
    assert eventually(lambda: memfds() == files)
    assert named_memory() <= shm

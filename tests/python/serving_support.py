"""A model without weights for the scheduler's tests: it checks what it reads, and its tokens are known."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

import vtensor
from support import open_pool
from vtensor import testing
from vtensor.serving import Engine, LengthHistogram, Promises, Request, Scheduler, Status

LAYERS, HEADS, HEAD_DIM = 2, 2, 64  # float32, both layers in a page: 1 KiB a token and range
PAGE = 4096
PAGE_TOKENS = 4
RANGES = 2
SLOTS = 4
LONG = [1, 0] * 5

# Budgets of pages, and requests for them. Some are found in the index, forked, swapped and stopped; some are
# computed again; none but "never" fails.
GROUPS = (
    16,
    [
        Request("first", LONG, 8),
        Request("group", [0] * 6, 6, samples=3),
        Request("never", [2] * 60, 4),
        Request("stops", [*LONG, 1], 6, stop=frozenset({0, 1, 3})),
        Request("alike", [*LONG, 2], 6, samples=2, stop=frozenset({2})),
    ],
)
SINGLES = (
    12,
    [
        Request("first", [0] * 14, 4),
        Request("second", [1] * 2, 12),
        Request("never", [0, 1] * 9, 8),
        Request("third", [1] * 3, 3),
    ],
)
# With promises that are easy to keep "first" leaves for "second", which finds no room beside it and "other".
LEAVING = (
    20,
    [
        Request("early", [2] * 4, 3),
        Request("first", [1] * 12, 20),
        Request("other", [0] * 16, 10),
        Request("second", [0, 1] * 5, 3),
        Request("never", [2] * 60, 4),
    ],
)


def eager(tpot: float = 1e6, ttft: float = 1e6, slower: float = 1e6) -> Promises:
    """Promises that are easy to keep, unless given, after short answers."""
    promises = Promises(tpot, ttft, slower)
    promises.lengths = LengthHistogram(16)
    return promises


def mark(salt: str, tokens: list[int]) -> int:
    """What K and V of the last of `tokens` hold: it differs wherever any token before differs. Exact in
    float32."""
    return _mark(salt, tuple(tokens))


@lru_cache(1 << 16)  # the same requests run again and again
def _mark(salt: str, tokens: tuple[int, ...]) -> int:
    return zlib.crc32(repr((salt, list(tokens))).encode()) % (1 << 24) or 1


@lru_cache(1 << 12)
def _marks(salt: str, tokens: tuple[int, ...]) -> list[int]:
    """The mark of each of `tokens`."""
    return [_mark(salt, tokens[: i + 1]) for i in range(len(tokens))]


def next_token(salt: str, tokens: list[int], sample: int) -> int:
    return mark(f"{salt}/{sample}", tokens) % 5


def alone(request: Request) -> list[list[int]]:
    """The tokens that each sample generates without other requests."""
    results = []
    for sample in range(request.samples):
        tokens = list(request.prompt)
        while len(tokens) < len(request.prompt) + request.max_new_tokens:
            tokens.append(next_token(request.salt, tokens, sample))
            if tokens[-1] in request.stop:
                break
        results.append(tokens[len(request.prompt) :])
    return results


class Store:
    """What the tensors of a real cache hold: each token's mark, in K and V of every layer and head."""

    def __init__(self, cache: vtensor.KVCache) -> None:
        self.cache = cache

    def read(self, slot: int, stop: int) -> list[int]:
        self.cache.wait(slot)
        rows = torch.stack([side[slot, :stop] for layer in range(LAYERS) for side in self.cache[layer]])
        assert (rows == rows[:1, :, :1, :1]).all(), "K and V of the layers are of different tokens"
        return rows[0, :, 0, 0].long().tolist()

    def write(self, slot: int, start: int, values: list[int]) -> None:
        marks = torch.tensor(values, dtype=torch.float32)[:, None, None]
        for layer in range(LAYERS):
            for side in self.cache[layer]:
                side[slot, start : start + len(values)] = marks

    def check(self) -> None:
        testing.check_invariants(self.cache.pool)


class FakeModel:
    """A forward. What it reads must be what the same tokens left, wherever they were computed."""

    def __init__(self, store) -> None:
        self.store = store
        self.logits = {}

    def __call__(self, plan):
        for sequence, start, stop in plan.work:
            salt = sequence.group.request.salt
            marks = _marks(salt, tuple(sequence.tokens[:stop]))
            assert self.store.read(sequence.slot, start) == marks[:start], "another sequence's K and V"
            self.store.write(sequence.slot, start, marks[start:])
        return plan.work


def choose(work, sequence) -> int:
    """Of the work at whose end a token is due; stands in for the choice among logits."""
    assert work.stop == sequence.known and work.sequence.group is sequence.group
    return next_token(sequence.group.request.salt, sequence.tokens, sequence.index)


def check_books(scheduler: Scheduler) -> None:
    """What holds at any time, also right behind an exception."""
    queues = {
        Status.WAITING: scheduler.waiting,
        Status.RUNNING: scheduler.running,
        Status.SWAPPED: scheduler.swapped,
    }
    for status, queue in queues.items():
        orders = [group.order for group in queue]
        assert orders == sorted(set(orders))
        for group in queue:
            assert group.status is status
            holders = [] if status is Status.WAITING else group.holders
            for sequence in group.live:
                assert (sequence.slot is not None) == (sequence in holders)
                assert sequence.slot is not None or sequence.computed == 0
            assert all(len(sequence.output) == sequence.generated for sequence in group.sequences)
    slots = [s.slot for group in scheduler.running + scheduler.swapped for s in group.holders]
    assert len(set(slots)) == len(slots)
    if scheduler._books.settled and scheduler.planned is None:
        running = [s.slot for group in scheduler.running for s in group.holders]
        lengths = [scheduler.cache.length(slot) for slot in running]
        assert [scheduler._books.lengths[slot] for slot in running] == lengths


class LittleHostMemory:
    """A cache that refuses to swap out what would pass `nbytes` of host memory."""

    def __init__(self, cache: vtensor.KVCache, nbytes: int) -> None:
        self._cache, self._nbytes = cache, nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._cache[layer]

    def swap_out(self, slots: int | Sequence[int]) -> None:
        named = [slots] if isinstance(slots, int) else slots
        pages = sum(-(-self._cache.length(slot) // PAGE_TOKENS) * RANGES for slot in named)
        if self._cache.stats().nbytes_swapped + pages * PAGE > self._nbytes:
            raise vtensor.OutOfPages(f"[KVCache.swap_out] {pages} pages do not fit host memory")
        self._cache.swap_out(slots)


@contextmanager
def opened(
    kind: str,
    budget: int,
    max_batch: int = 4,
    max_len: int = 64,
    host_pages: int | None = None,
    **options: Any,
) -> Iterator:
    """A cache of `budget` pages on the host or the simulated driver, which swaps out at most `host_pages`."""
    sizes = (LAYERS, HEADS, HEAD_DIM, max_batch, max_len, torch.float32)
    pool = open_pool(kind, budget, **options)
    try:
        with vtensor.KVCache(*sizes, pool.device, layer_group=LAYERS, tile=1, pool=pool) as cache:
            yield cache if host_pages is None else LittleHostMemory(cache, host_pages * PAGE)
    finally:
        pool.close()


def serve(engine: Engine, arrivals, cancels=(), *, most: int, check) -> dict:
    """Runs requests that arrive, and some that are cancelled, at given iterations, and checks after each.
    Returns their ends."""
    arrivals, cancels, done = sorted(arrivals, key=lambda arrival: arrival[0]), dict(cancels), {}
    for iteration in range(most):
        while arrivals and arrivals[0][0] <= iteration:
            engine.submit(arrivals.pop(0)[1])
        scheduler = engine.scheduler
        held = {g.request.id for g in scheduler.waiting + scheduler.running + scheduler.swapped}
        if (cancelled := cancels.get(iteration)) in held:
            engine.cancel(cancelled)
        for completion in engine.step():
            assert completion.id not in done
            done[completion.id] = completion
        check()
        if not arrivals and not engine.unfinished:
            return done
    raise AssertionError(f"{engine.unfinished} requests starve")


def engine_over(cache, **options) -> Engine:
    return Engine(Scheduler(cache, **options), FakeModel(Store(cache)), choose)

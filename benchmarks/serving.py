"""What the cache manager for serving costs: a step, a plan, a fork, a swap.

Sizes are those of Llama-3-8B with all 32 layers in one page (32 tokens to a page), both the page and the
bytes of a token divided by 32, so that counts of pages and calls are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

import vtensor
from vtensor.replay.managers import PagedCache
from vtensor.serving import Plan, Promises, Request, Scheduler

from .harness import (
    Bar,
    Comparison,
    Figure,
    Settings,
    Spread,
    clock,
    count,
    interleave,
    keep_awake,
    speedup,
)

SLOTS, LAYERS, HEADS, HEAD_DIM, PAGE = 256, 32, 8, 4, 64 << 10
DECODE_STEP = 0.004  # seconds between steps: less than any model's
bandwidth = Comparison("x its bandwidth", lambda ours, baseline: baseline / ours)


def run(settings: Settings) -> list[Figure]:
    # The memory of the plans is laid out for the host's pages.
    planned = plans(settings) if settings.device == "cpu" else []
    return [*steps(settings), *planned, *forks(settings), *swaps(settings)]


def make(
    settings: Settings, slots: int, max_len: int, budget: int = 6 << 30, **options
) -> tuple[vtensor.Pool, vtensor.KVCache]:
    page = PAGE if settings.device == "cpu" else None
    pool = vtensor.Pool(settings.device, page_size=page, budget=budget)
    head_dim = HEAD_DIM if settings.device == "cpu" else 32 * HEAD_DIM
    options = {"layer_group": LAYERS, "dtype": torch.bfloat16} | options
    return pool, vtensor.KVCache(LAYERS, HEADS, head_dim, slots, max_len, tile=1, pool=pool, **options)


def filled_slot(cache: vtensor.KVCache, length: int, layers: int) -> int:
    slot = cache.alloc()
    lengths = cache.lengths
    lengths[slot] = length
    cache.step(lengths)
    for k, v in (cache[layer] for layer in range(layers)):
        k[slot, :length] = 1
        v[slot, :length] = 2
    return slot


class PagedManager:
    """The bookkeeping of PagedAttention's manager (Kwon et al., SOSP 2023) for one step, asked for each
    sequence, as engines ask theirs: is there room for its next token, and then, take it."""

    def __init__(self, frames: int, frame_tokens: int = 16) -> None:
        self.frame_tokens = frame_tokens
        self.free = list(range(frames))
        self.references = [0] * frames
        self.tables: dict[int, list[int]] = {}

    def can_append(self, sequence: int, length: int) -> bool:
        return len(self.free) >= -(-length // self.frame_tokens) - len(self.tables[sequence])

    def append(self, sequence: int, length: int) -> None:
        table = self.tables[sequence]
        while len(table) * self.frame_tokens < length:
            frame = self.free.pop()
            self.references[frame] = 1
            table.append(frame)


def step_each(manager: PagedManager, lengths: list[int]) -> bool:
    for sequence, length in enumerate(lengths):
        if not manager.can_append(sequence, length):
            return False
        manager.append(sequence, length)
    return True


def steps(settings: Settings) -> list[Figure]:
    """One token a slot and step, the slots' page crossings spread over the steps, as requests come."""
    rounds = settings.pick(400, 6)
    pool, cache = make(settings, SLOTS, 2048, lookahead=64)
    together, each = PagedCache(SLOTS * 64, SLOTS, 2048), PagedManager(SLOTS * 64)
    lengths = [0] * SLOTS
    for at in range(SLOTS):
        lengths[cache.alloc()] = 300 + at % 32
        each.tables[together.alloc()] = []
    samples = {
        "ours": lambda: clock(lambda: cache.step(lengths)),
        "together": lambda: clock(lambda: together.step(lengths)),
        "each": lambda: clock(lambda: step_each(each, lengths)),
    }

    def tokens() -> Iterator[int]:
        nonlocal lengths
        for number in range(rounds):
            time.sleep(DECODE_STEP)
            keep_awake()  # an engine's own code has run before it asks
            lengths = [length + 1 for length in lengths]
            yield number

    interleave(samples, 1)
    pool.wait_idle()
    before = pool.stats().driver_calls["caller"]
    taken = interleave(samples, tokens(), warmup=0)
    after = pool.stats().driver_calls["caller"]
    calls = sum(after.values()) - sum(before.values())
    cache.close()
    pool.close()
    name = f"step, {SLOTS} slots x {LAYERS} layers"
    each_sequence = "a paged manager in Python, asked for each sequence"
    return [
        Figure(name, "nothing", "us", Spread.of(taken["ours"]).scaled(1e6), bar=Bar(50)),
        speedup.among(taken, name, each_sequence, "ours", "each", bar=Bar(5, at_least=True)),
        speedup.among(taken, name, "one asked for all at once", "ours", "together"),
        count(f"{name}, {rounds} times", "the caller's thread", calls, "driver calls", Bar(0), counted=False),
    ]


def plans(settings: Settings) -> list[Figure]:
    """An iteration of as many running requests as in a step's figure, and none ends. Those that wait find
    no room, and would have it if others left."""
    rounds = settings.pick(400, 6)
    long = 300_000  # tokens: nearly all of the memory
    pool, cache = make(settings, SLOTS + 8, long + 8, budget=1200 << 20, lookahead=64)
    now = 0.0
    promises = Promises(10 * DECODE_STEP)
    scheduler = Scheduler(cache, token_budget=64 * SLOTS, promises=promises, clock=lambda: now)

    def complete(plan: Plan) -> None:
        nonlocal now
        now += DECODE_STEP
        scheduler.complete(plan)

    for i in range(SLOTS):
        scheduler.add(Request(i, 32 + i % 32, 1900))
    while scheduler.waiting or any(group.first_token_at is None for group in scheduler.running):
        complete(scheduler.plan())
    for i in range(8):
        scheduler.add(Request(SLOTS + i, long, 8))
    taken = []
    for _ in range(rounds):
        time.sleep(DECODE_STEP)
        keep_awake()  # the model's own code has run before
        planned: list[Plan] = []
        taken.append(clock(lambda: planned.append(scheduler.plan())))  # noqa: B023
        assert len(planned[0].work) == SLOTS and len(scheduler.waiting) == 8
        complete(planned[0])
    cache.close()
    pool.close()
    name = f"plan, {SLOTS} requests, by promises"
    return [Figure(name, "nothing", "us", Spread.of(taken).scaled(1e6), bar=Bar(200))]


def forks(settings: Settings) -> list[Figure]:
    """A long prefix for 64 samples; copying it so often, into one place, because memory ends otherwise."""
    ways, long = 64, settings.pick(131072, 4096)
    figures = []
    seconds = {}
    for length in (long // 4, long):
        pool, cache = make(settings, ways + 1, length + 64)
        slot = filled_slot(cache, length, layers=1)
        nbytes = cache.stats().nbytes_live
        source = torch.ones(nbytes, dtype=torch.uint8, device=cache[0][0].device)
        target = torch.ones_like(source)
        used = pool.stats().pages_used

        def fork() -> float:
            made: list[int] = []
            took = clock(lambda: made.extend(cache.fork(slot, ways)), settings.wait)  # noqa: B023
            more.append(pool.stats().pages_used - used)  # noqa: B023
            for one in made:
                cache.free(one)  # noqa: B023
            pool.wait_idle()  # noqa: B023
            return took

        def copy() -> float:
            return clock(lambda: [target.copy_(source) for _ in range(ways)], settings.wait)  # noqa: B023

        more: list[int] = []
        taken = interleave({"ours": fork, "copy": copy}, settings.pick(3, 1), warmup=1)
        seconds[length] = sorted(taken["ours"])[len(taken["ours"]) // 2]
        what, bar = f"fork {length:,} tokens {ways} ways", Bar(100, at_least=True) if length == long else None
        figures.append(speedup.among(taken, what, "copying them", "ours", "copy", bar=bar))
        figures.append(count(what, "before", max(more), "pages more", Bar(0)))
        cache.close()
        pool.close()
    ratio = seconds[long] / seconds[long // 4]
    of_four = "fork of 4 times the pages"
    figures.append(count(of_four, "time of the pages", ratio, "x", Bar(4.4), counted=False))
    return figures


def swaps(settings: Settings) -> list[Figure]:
    """A request of 256 MiB to host memory and back, against torch's copies of as many bytes."""
    length = settings.pick(65536, 2048)
    pool, cache = make(settings, 2, length)
    slot = filled_slot(cache, length, LAYERS)
    nbytes = cache.stats().nbytes_live
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=cache[0][0].device)
    on_host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_device.is_cuda)
    mapped = vtensor.zeros(nbytes, dtype=torch.uint8, grow_dim=0, capacity=nbytes, pool=pool)

    def swap_out() -> None:
        cache.swap_out(slot)
        cache.wait(slot)

    def swap_in() -> None:
        assert cache.swap_in(slot)
        cache.wait(slot)

    def copy_out() -> None:
        nonlocal on_host
        on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_device.is_cuda)
        on_host.copy_(on_device)

    outwards = {"swap out": swap_out, "copy out": copy_out}
    inwards = {
        "swap in": swap_in,
        "copy in": lambda: on_device.copy_(on_host),
        "copy into pages": lambda: mapped.copy_(on_host),
    }
    taken: dict[str, list[float]] = {name: [] for name in (*outwards, *inwards)}
    for round in range(settings.pick(16, 2)):
        for way in (outwards, inwards):
            names = list(way)
            turn = round % len(names)
            for name in names[turn:] + names[:turn]:
                taken[name].append(clock(way[name], settings.wait))
            pool.wait_idle()  # pages given back are unmapped beside what follows
    mapped.close()
    cache.close()
    pool.close()
    bar = Bar(0.9, at_least=True)
    return [
        bandwidth.among(taken, "swap out", "a plain copy", "swap out", "copy out", bar=bar),
        bandwidth.among(taken, "swap in", "a plain copy", "swap in", "copy in", bar=bar),
        bandwidth.among(taken, "swap in", "a copy into pages mapped before", "swap in", "copy into pages"),
    ]

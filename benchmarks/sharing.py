"""Memory that other processes read: handing it over, following it, reading it, and what it costs the writer.

What is handed over goes to processes of their own. What readers do is timed in the writer's process, which
received its own tensor through a pipe: there it and what it is compared with are sampled in the same rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import zlib
from multiprocessing.connection import Connection
from statistics import mean
from time import perf_counter_ns
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import vtensor
from vtensor import sharing

from .append import HEAD_DIM, HEADS, Steps
from .harness import (
    Bar,
    Comparison,
    Figure,
    Sample,
    Settings,
    Skipped,
    Spread,
    clock,
    excess,
    interleave,
    keep_awake,
    quantile,
    slowdown,
    speedup,
)
from .native import load_bare_mmap
from .serving import DECODE_STEP, LAYERS, SLOTS

GIB = 1 << 30
PAGE = 64 << 10
milliseconds = Comparison("ms", lambda ours, _baseline: ours * 1e3)


def checksum(t: torch.Tensor) -> int:
    """Of a copy."""
    return zlib.crc32(t.clone().cpu().view(torch.uint8).numpy())


def hold(queue: Any, pipe: Connection, library: str) -> None:
    """In a process of its own: holds an object, answers with its time of arrival, and syncs it on request."""
    sharing.cuda_library = library
    while True:
        held = queue.get()
        pipe.send(perf_counter_ns())
        while (command := pipe.recv()) != "drop":
            pipe.send(checksum(held) if command == "checksum" else clock(held.sync))
        if type(held) is not torch.Tensor:
            held.close()
        del held
        pipe.send(None)


class Holder:
    """A process that holds one object at a time. On a GPU it may have a `library` that simulates one."""

    def __init__(self, context: Any, library: str = "") -> None:
        self._queue = context.Queue()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(self._queue, theirs, library), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, what: object) -> float:
        """Seconds from here to there."""
        start = perf_counter_ns()
        self._queue.put(what)
        arrived: int = self._pipe.recv()
        return (arrived - start) / 1e9

    def tell(self, command: str) -> Any:
        """Of "sync": the seconds that it took."""
        self._pipe.send(command)
        return self._pipe.recv()

    def end(self) -> None:
        self.process.terminate()
        self.process.join()


def run(settings: Settings) -> list[Figure]:
    if settings.device != "cpu":
        raise Skipped("other processes read memory of the host alone")
    # A process that is not forked from this one imports torch first, too long for a quick run.
    context = multiprocessing.get_context("fork" if settings.quick else "forkserver")
    context.set_forkserver_preload(["torch"])
    holders = [Holder(context) for _ in range(settings.pick(10, 1))]
    try:
        return [
            *handing_over(settings, holders[0]),
            *following(settings),
            *attending(settings),
            *growing_while_read(settings, holders[:4]),
            *stepping_while_read(settings, holders[:4]),
            *deaths(holders),
        ]
    finally:
        for holder in holders:
            holder.end()


def release(holders: list[Holder]) -> None:
    for holder in holders:
        holder.tell("sync")
        holder.tell("drop")


def shareable(nbytes: int, **options: Any) -> vtensor.Pool:
    return vtensor.Pool("cpu", page_size=PAGE, budget=nbytes, shareable=True, **options)


def received(what: object) -> Any:
    """A reader of it in this process."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        ours.send(what)
        return theirs.recv()


def handing_over(settings: Settings, holder: Holder) -> list[Figure]:
    nbytes = settings.pick(GIB, 1 << 20)
    pool = shareable(2 * nbytes)
    filled = vtensor.empty(nbytes, grow_dim=0, capacity=2 * nbytes, dtype=torch.uint8, pool=pool).fill_(1)

    def hand_over(what: torch.Tensor) -> float:
        keep_awake()
        taken = holder.give(what)
        holder.tell("drop")
        return taken

    def ours() -> float:
        return quantile(sorted(hand_over(filled) for _ in range(5)), 0.5)

    def plain() -> float:
        return hand_over(torch.ones(nbytes, dtype=torch.uint8))  # sent once, a tensor is shared for good

    taken = interleave({"ours": ours, "torch": plain}, settings.pick(7, 1))
    pool.close()
    what = f"{nbytes >> 20:,} MiB to a waiting process"
    return [
        milliseconds.among(taken, what, "nothing", "ours", "torch", bar=Bar(3)),
        speedup.among(taken, what, "torch.multiprocessing, which copies", "ours", "torch"),
    ]


def following(settings: Settings) -> list[Figure]:
    rounds, repeats = settings.pick(201, 3), 1000
    pool = shareable(GIB, prefetch=0)
    t = vtensor.empty(0, PAGE, grow_dim=0, capacity=10_000, dtype=torch.uint8, pool=pool)
    reader, bare = received(t), load_bare_mmap()
    sync = reader.sync

    def nothing_new() -> float:
        start = perf_counter_ns()
        for _ in range(repeats):
            sync()
        return (perf_counter_ns() - start) / 1e9 / repeats

    def one_page() -> float:
        t.extend(1)
        return clock(sync)

    samples = {"nothing": nothing_new, "page": one_page, "mmap": lambda: bare(1, PAGE, PAGE)}
    taken = interleave(samples, rounds, warmup=2)
    assert reader.length == t.length
    reader.close()
    pool.close()
    return [
        Figure("sync, nothing new", "nothing", "us", Spread.of(taken["nothing"]).scaled(1e6), bar=Bar(1)),
        excess.among(taken, "sync, one new page", "one bare mmap", "page", "mmap", bar=Bar(20)),
    ]


def attending(settings: Settings) -> list[Figure]:
    length = settings.pick(8192, 256)
    medians: dict[str, list[float]] = {"reader": [], "own": [], "control": []}
    for _ in range(settings.pick(7, 2)):
        pool = shareable(GIB)
        own = [
            vtensor.from_tensor(
                torch.randn(1, HEADS, length, HEAD_DIM), grow_dim=2, capacity=length + 128, pool=pool
            )
            for _ in "kv"
        ]
        readers = [received(t) for t in own]
        q = torch.randn(1, HEADS, 1, HEAD_DIM)
        assert torch.equal(scaled_dot_product_attention(q, *readers), scaled_dot_product_attention(q, *own))
        pairs = {"reader": readers, "own": own, "control": own}
        samples = {
            name: lambda pair=pair, q=q: clock(lambda: scaled_dot_product_attention(q, *pair))
            for name, pair in pairs.items()
        }
        taken = interleave(samples, settings.pick(41, 3), warmup=2)
        for name, seconds in taken.items():
            medians[name].append(quantile(sorted(seconds), 0.5))
        for reader in readers:
            reader.close()
        pool.close()
    what = f"SDPA over {length:,} tokens of a reader"
    return [slowdown.among(medians, what, "the writer's tensor", "reader", "own", "control", Bar(1.01))]


def growing_while_read(settings: Settings, holders: list[Holder]) -> list[Figure]:
    steps, rounds, warmup = settings.pick(256, 32), settings.pick(100, 3), 1
    pool = shareable(2 * GIB)
    x = torch.randn(1, 1, HEADS, HEAD_DIM)
    capacity = steps * (rounds + warmup)

    def case(readers: list[Holder]) -> Steps:
        t = vtensor.empty(1, 0, HEADS, HEAD_DIM, grow_dim=1, capacity=capacity, pool=pool)
        for holder in readers:
            holder.give(t)
        return Steps(lambda _: t.append(x), steps, settings)

    cases = {"read": case(holders), "alone": case([]), "control": case([])}
    taken = interleave(cases, rounds, warmup)
    release(holders)
    pool.close()
    what = f"append, {len(holders)} readers, median"
    return [slowdown.among(taken, what, "no reader", "read", "alone", "control", Bar(1.02))]


def stepping_while_read(settings: Settings, holders: list[Holder]) -> list[Figure]:
    """Sizes and steps as in benchmarks/serving.py. Of equal caches some are a tenth faster than others, so
    each is timed before one of them is read, and compared with itself; and there are several of each."""
    runs = [steps_while_read(settings, holders) for _ in range(settings.pick(5, 1))]
    taken = {name: [s for run in runs for s in run[name]] for name in runs[0]}
    taken["others"] = [mean(two) for two in zip(taken["alone"], taken["control"], strict=True)]
    what = f"step, {SLOTS} slots, {len(holders)} readers"
    return [slowdown.among(taken, what, "no reader", "read", "others", "control", Bar(1.02))]


def steps_while_read(settings: Settings, holders: list[Holder]) -> dict[str, list[float]]:
    """Seconds of each step of a cache that is read, and of two that are not."""
    rounds, warmup = settings.pick(150, 6), 10
    pool = shareable(4 * GIB)
    shape = LAYERS, HEADS, 4, SLOTS, 2048, torch.bfloat16
    options: dict[str, Any] = {"layer_group": LAYERS, "tile": 1, "lookahead": 64, "pool": pool}
    caches = {name: vtensor.KVCache(*shape, **options) for name in ("alone", "read", "control")}

    def case(cache: vtensor.KVCache) -> Sample:
        lengths = [0] * SLOTS
        for at in range(SLOTS):
            lengths[cache.alloc()] = 100 + at % 32

        def step() -> float:
            nonlocal lengths
            lengths = [length + 1 for length in lengths]
            time.sleep(DECODE_STEP)
            keep_awake()  # an engine's own code has run before it asks
            return clock(lambda: cache.step(lengths))

        return step

    cases = {name: case(cache) for name, cache in caches.items()}
    before = {name: Spread.of(seconds).median for name, seconds in interleave(cases, rounds, warmup).items()}
    for holder in holders:
        holder.give(caches["read"])
    taken = interleave(cases, rounds, warmup)
    release(holders)
    pool.close()
    return {name: [s * mean(before.values()) / before[name] for s in each] for name, each in taken.items()}


def deaths(holders: list[Holder]) -> list[Figure]:
    """Each holder has a tensor of its own, whose pages only it still reads, and is killed. A pool that is
    asked frees them there and then; otherwise its worker does."""
    nbytes = 16 << 20
    pool = shareable(GIB, spare=0)
    for holder in holders:
        t = vtensor.empty(nbytes, grow_dim=0, capacity=2 * nbytes, dtype=torch.uint8, pool=pool).fill_(1)
        holder.give(t)
        t.close()
    pool.wait_idle()
    taken: dict[bool, list[float]] = {True: [], False: []}
    for at, holder in enumerate(holders):
        asked = at % 2 == 0
        held, memory = pool.stats().pages_held_by_readers, memory_of_pools()
        start = perf_counter_ns()
        os.kill(holder.process.pid, signal.SIGKILL)
        while pool.stats().pages_held_by_readers == held if asked else memory_of_pools() > memory - nbytes:
            time.sleep(0.0005)
        taken[asked].append((perf_counter_ns() - start) / 1e9)
    pool.close()
    what = "a killed reader's pages are"
    figures = [Figure(f"{what} free for the writer", "nothing", "s", Spread.of(taken[True]), bar=Bar(0.1))]
    if taken[False]:
        figures.append(Figure(f"{what} free for the system", "nothing", "s", Spread.of(taken[False])))
    return figures


def memory_of_pools() -> int:
    """Bytes of memory that this process's pools have. Unlike their statistics, it makes them free nothing."""
    folder = "/proc/self/fd"
    files = [f"{folder}/{name}" for name in os.listdir(folder)]
    return sum(
        os.stat(file).st_blocks * 512
        for file in files
        if os.path.lexists(file) and os.readlink(file).startswith("/memfd:vtensor ")
    )

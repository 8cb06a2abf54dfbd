"""A soak: random operations in threads, beside a busy mapper and refused driver calls, against a plain model.

Rounds of a few seconds, on the host and on the simulated libcuda in turn. In each, threads work on tensors of
their own in one pool, while another has random driver calls refused, of whatever thread. Every position is
compared with the model after every error and now and then; at a round's end nothing may be left. Prints and
writes JSON; exits with 1 where anything was lost or grows. Run it by scripts/soak.sh; it is no part of CI.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

import torch

import vtensor
from benchmarks.machine import describe
from stream_support import SimulatedDevice
from support import SimcudaLeaks, eventually, kernel_mappings, memfds, open_pool, simcuda_leaks, within
from vtensor import testing

ITEM = 1024  # bytes of a position; four to a page
CAPACITY = 160
THREADS = 3
ROUND_SECONDS = 2.5
ROUND_BOUND = 60.0
WARM_UP = 8  # rounds, until allocators and caches have grown to their size


@dataclass(eq=False)
class Modelled:
    """A tensor, and the byte that each position of each row is filled with."""

    actual: vtensor.VTensor
    cells: torch.Tensor  # [rows, length]
    bytes: set[int]  # its own, and its parents' from before the fork
    shared: bool = False  # its pages may be read-only on the device
    views: list[torch.Tensor] = field(default_factory=list)
    history: collections.deque = field(default_factory=lambda: collections.deque(maxlen=12))

    def check(self) -> None:
        t = self.actual
        assert t.length == self.cells.shape[1], f"length {t.length}, the model's {self.cells.shape[1]}"
        wrong = t.ne(self.cells[:, :, None]).any(2)
        if wrong.any():
            at = wrong.nonzero()[:4].tolist()
            shown = [t[row, position].unique().tolist() for row, position in at]
            raise AssertionError(
                f"contents lost at {at} of {tuple(t.shape)}: shows {shown}, own are {self.bytes}; "
                f"after {list(self.history)}; {t.pages()}"
            )


class Worker:
    """One thread's tensors, streams and graphs, and the operations it draws from."""

    def __init__(
        self,
        pool,
        device: SimulatedDevice | None,
        in_order: bool,
        seed: int,
        counts: collections.Counter,
    ) -> None:
        """`in_order`: nothing can keep the default stream waiting, so that torch, for which the simulated
        memory is the CPU's, may write at once."""
        self.pool, self.device, self.random, self.counts = pool, device, random.Random(seed), counts
        self.in_order = in_order
        self.tensors: list[Modelled] = []
        self.streams = [device.stream() for _ in range(2)] if device else [0]
        self.graphs: list[tuple[int, Modelled]] = []  # executables, and what they read
        self.failure: str | None = None
        self.next_byte = self.random.randrange(1, 255)

    def run(self, until: float) -> None:
        try:
            while time.monotonic() < until and self.pool.broken is None:
                self.step()
        except BaseException:
            self.failure = traceback.format_exc()

    def step(self) -> None:
        names = ["make"] if not self.tensors else list(WEIGHTS)
        name = self.random.choices(names, [WEIGHTS[n] for n in names])[0]
        modelled = self.random.choice(self.tensors) if self.tensors else None
        self.counts["operations", name] += 1
        try:
            self.synchronise()
            if modelled is not None:
                modelled.history.append(f"{name} at {modelled.actual.length}")
            getattr(self, name)(modelled)
        except vtensor.VTensorError as error:
            if modelled is not None:
                modelled.history.append(str(error)[:160])
            self.counts["errors", type(error).__name__] += 1
            self.synchronise()
            if self.pool.broken is None:
                for each in self.tensors:
                    each.check()

    def synchronise(self) -> None:
        """What the default stream was given has been done: it may wait for streams that are held."""
        if self.device is None or not self.device.pending(0):
            return
        for stream in self.streams:
            self.device.release(stream)
        self.wait_for(0)

    def wait_for(self, stream: int) -> None:
        over = within(10, lambda: not self.device.pending(stream) or self.device.illegal_accesses())
        assert not self.device.illegal_accesses(), "a kernel found its memory gone"
        assert over, "a stream never comes to its end"

    def fresh_byte(self) -> int:
        self.next_byte = self.next_byte % 254 + 1
        return self.next_byte

    def fill_new(self, modelled: Modelled, n: int) -> None:
        """What growth shows is zeros or the tensor's own (I7); then it gets a byte of its own."""
        self.synchronise()
        t = modelled.actual
        new = t[:, t.length - n :]
        foreign = {int(b) for b in new.unique()} - modelled.bytes - {0}
        assert not foreign, f"growth shows bytes {foreign} of others, own are {modelled.bytes}"
        modelled.cells = torch.cat([modelled.cells, new[:, :, 0].clone()], 1)
        byte = self.fresh_byte()
        if modelled.shared:
            t[:, t.length - n :] = byte  # through the tensor, which unshares pages first
        else:
            new.fill_(byte)
        modelled.bytes.add(byte)
        modelled.cells[:, -n:] = byte

    @contextlib.contextmanager
    def growth(self, modelled: Modelled) -> Iterator[None]:
        """Where it moves, its pages are shared with the views that stay behind."""
        before = modelled.actual.data_ptr()
        try:
            yield
        finally:
            modelled.shared |= modelled.actual.data_ptr() != before

    # -- operations

    def make(self, _) -> None:
        if len(self.tensors) > 5:
            return self.close(self.random.choice(self.tensors))
        rows = self.random.choice([1, 1, 3])
        t = vtensor.empty(
            rows, 0, ITEM, grow_dim=1, capacity=CAPACITY, dtype=torch.uint8, pool=self.pool,
            when_full=self.random.choice(["raise", "move"]),
        )  # fmt: skip
        self.tensors.append(Modelled(t, torch.zeros(rows, 0, dtype=torch.uint8), set()))

    def extend(self, modelled: Modelled) -> None:
        n = self.random.randrange(1, 20)
        with self.growth(modelled):
            modelled.actual.extend(n)
        self.fill_new(modelled, n)

    def append(self, modelled: Modelled) -> None:
        if not self.in_order:
            return self.extend(modelled)
        n, byte, t = self.random.randrange(1, 12), self.fresh_byte(), modelled.actual
        with self.growth(modelled):
            t.append(torch.full((t.shape[0], n, ITEM), byte, dtype=torch.uint8))
        modelled.bytes.add(byte)
        modelled.cells = torch.cat([modelled.cells, modelled.cells.new_full((t.shape[0], n), byte)], 1)

    def truncate(self, modelled: Modelled) -> None:
        length = self.random.randrange(modelled.actual.length + 1)
        modelled.actual.truncate(length, stream=self.named())
        modelled.cells = modelled.cells[:, :length]

    def window(self, modelled: Modelled) -> None:
        n = self.random.randrange(modelled.actual.length + 1)
        modelled.actual.shrink(n, front=True, stream=self.named())
        modelled.cells = modelled.cells[:, n:]

    def prepare(self, modelled: Modelled) -> None:
        modelled.actual.prepare(self.random.randrange(20))

    def fork(self, modelled: Modelled) -> None:
        try:
            child = modelled.actual.fork(stream=self.named())
        finally:
            modelled.shared = True
        self.tensors.append(Modelled(child, modelled.cells.clone(), set(modelled.bytes), shared=True))

    def unshare(self, modelled: Modelled) -> None:
        modelled.actual.unshare(0, modelled.actual.length)

    def reallocate(self, modelled: Modelled) -> None:
        try:
            modelled.actual = modelled.actual.reallocate(CAPACITY)
        finally:
            modelled.shared = True

    def write(self, modelled: Modelled) -> None:
        byte = self.fresh_byte()
        modelled.actual.fill_(byte)
        modelled.bytes.add(byte)
        modelled.cells.fill_(byte)

    def view(self, modelled: Modelled) -> None:
        if len(modelled.views) > 2:
            modelled.views.pop(self.random.randrange(len(modelled.views))).sum()
        modelled.views.append(modelled.actual.alias())

    def close(self, modelled: Modelled) -> None:
        modelled.check()
        if self.random.random() < 0.5:
            modelled.actual.close(stream=self.named())
        self.tensors.remove(modelled)

    def kernel(self, modelled: Modelled) -> None:
        """A kernel that runs late, over pages that are given back and grown into again meanwhile."""
        if self.device is None or not modelled.actual.length:
            return
        stream, t = self.random.choice(self.streams), modelled.actual
        byte = 0 if modelled.shared else self.fresh_byte()
        try:
            with self.held(vtensor.lease(t, stream=stream)):
                self.device.hold(stream)
                self.device.kernel(stream, t, writes=byte)
                if byte:
                    modelled.bytes.add(byte)
                    modelled.cells.fill_(byte)
                if self.random.random() < 0.5:
                    length = self.random.randrange(t.length + 1)
                    t.truncate(length)
                    modelled.cells = modelled.cells[:, :length]
        finally:
            if not byte and self.random.random() < 0.3:
                self.device.release(self.streams[0])  # the other may stay held for a while
            else:
                self.device.release(stream)
                self.wait_for(stream)  # late events keep a simulated stream waiting

    def graph(self, modelled: Modelled) -> None:
        """A graph of a kernel that reads, replayed while the tensor changes; the oldest goes."""
        if self.device is None or not modelled.actual.length:
            return
        stream = self.streams[0]
        self.device.release(stream)
        if len(self.graphs) > 2:
            self.device.destroy_executable(self.graphs.pop(0)[0])  # perhaps before its replays are over
        lease = vtensor.lease(modelled.actual, stream=stream)
        self.device.begin_capture(stream)
        try:
            with self.held(lease):
                self.device.kernel(stream, modelled.actual)
        finally:  # also where the lease was refused: the stream must not stay captured
            graph = self.device.end_capture(stream)
            self.graphs.append((self.device.instantiate(graph), modelled))
            self.device.destroy_graph(graph)
        self.replay(*self.random.choice(self.graphs), stream)

    def replay(self, executable: int, modelled: Modelled, stream: int) -> None:
        """In a lease: the graph keeps the pages, but what remaps them must know of this stream."""
        if modelled not in self.tensors:  # closed: nothing remaps them any more
            return self.device.replay(executable, stream)
        with self.held(vtensor.lease(modelled.actual, stream=stream)):
            self.device.replay(executable, stream)

    def compare(self, modelled: Modelled) -> None:
        modelled.check()

    # --

    def named(self) -> int | None:
        return self.random.choice([None, *self.streams])

    @contextlib.contextmanager
    def held(self, lease: vtensor.lease) -> Iterator[None]:
        lease.__enter__()
        try:
            yield
        finally:
            self.end(lease)

    def end(self, lease: vtensor.lease) -> None:
        """Tries again what is refused: what is never ended is held for good.

        Faults refuses three calls in two milliseconds at most, and a refused try of some 10 us used up one of
        them. So 100 in a row are something else: a device in error refuses every call for good.
        """
        for _ in range(100):
            try:
                return lease.__exit__(None, None, None)
            except vtensor.VTensorError as error:
                self.counts["errors", type(error).__name__] += 1
                last = error
            assert not self.device.illegal_accesses(), "a kernel found its memory gone"
        raise AssertionError(f"a lease cannot be ended: {last}")

    def finish(self) -> None:
        for executable, _ in self.graphs:
            self.device.destroy_executable(executable)
        for modelled in self.tensors:
            if self.pool.broken is None:  # else what could not be put back is not to be read
                modelled.check()
            modelled.views.clear()
            modelled.actual.close()
        self.tensors.clear()


WEIGHTS = {
    "make": 3, "extend": 12, "append": 10, "truncate": 8, "window": 3, "prepare": 6, "fork": 2, "unshare": 1,
    "reallocate": 1, "write": 3, "view": 4, "close": 2, "kernel": 6, "graph": 1, "compare": 3,
}  # fmt: skip


class Faults(threading.Thread):
    """Has random driver calls refused, of whatever thread makes them."""

    def __init__(self, pool, seed: int) -> None:
        super().__init__()
        self.core, self.random, self.stopped = pool._core, random.Random(seed), threading.Event()
        self.injected = 0

    def made(self) -> int:
        return sum(sum(calls.values()) for calls in self.core.driver_calls().values())

    def run(self) -> None:
        while not self.stopped.wait(self.random.uniform(0.001, 0.02)):
            skip, refuse = self.random.randrange(60), self.random.choice([1, 1, 1, 1, 2, 3])
            before = self.made()
            self.core.fail_after(skip, refuse)
            self.stopped.wait(self.random.uniform(0.001, 0.02))
            self.core.disarm()
            self.injected += max(0, min(refuse, self.made() - before - skip))


class GivenUp:
    """How many user objects a pool gave up: a graph refused each, and its release was refused twice (see
    keep_for_graph in csrc/driver/cuda_streams.cpp): the calls that it made, less those that arrived."""

    RETAIN, RELEASE = "cuGraphRetainUserObject", "cuUserObjectRelease"

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.arrived_before = {call: device.calls(call) for call in (self.RETAIN, self.RELEASE)}
        self.left_before = simcuda_leaks().objects

    def count(self, driver_calls: dict[str, dict[str, int]]) -> int:
        made = {
            call: sum(calls.get(call, 0) for calls in driver_calls.values()) for call in self.arrived_before
        }
        arrived = {call: self.device.calls(call) - before for call, before in self.arrived_before.items()}
        given_up = made[self.RETAIN] - arrived[self.RETAIN] - arrived[self.RELEASE]
        assert 2 * given_up <= made[self.RELEASE] - arrived[self.RELEASE], (made, arrived)
        return given_up


def is_empty(pool) -> bool:
    pool.trim()
    return pool.stats().pages_mapped == 0


def play(kind: str, number: int, seed: int, counts: collections.Counter) -> None:
    """One round: a pool with options of its own, threads, faults; in the end, nothing is left."""
    draw = random.Random(seed)
    options = {
        "prefetch": draw.choice([0, 1 << 16, 1 << 20]),
        "zero": draw.choice(["new_owner", "new_owner", "always"]),
        "pages": draw.choice([120, 400]),
    }
    options["cache"] = draw.choice([0, 1 << 18]) if options["prefetch"] else 0
    if draw.random() < 0.3:
        options["spare"] = 64 * 4096
    if kind == "simcuda":
        options["patience"] = 0.3
    pool = open_pool(kind, **options)
    device = SimulatedDevice() if kind == "simcuda" else None
    objects = GivenUp(device) if device is not None else None
    late = device is not None and draw.random() < 0.5
    if late:
        device.late_events(0, draw.choice([0.2, 1.0]))
    in_order = device is None or not (late or options["cache"])
    workers = [Worker(pool, device, in_order, draw.randrange(2**32), counts) for _ in range(THREADS)]
    faults = Faults(pool, draw.randrange(2**32))
    until = time.monotonic() + ROUND_SECONDS
    threads = [threading.Thread(target=worker.run, args=(until,)) for worker in workers]
    threads += [faults] if number % 4 else []  # one round in four without
    for thread in threads:
        thread.start()
    for thread in threads[:THREADS]:
        thread.join(ROUND_BOUND)
        if thread.is_alive():
            faulthandler.dump_traceback(file=sys.stderr)
            raise AssertionError("a worker hangs: see the traceback above")
    faults.stopped.set()
    if faults in threads:
        faults.join()
    pool._core.disarm()
    if device is not None:
        device.let_go()
    for worker in workers:
        assert worker.failure is None, f"{kind}, {options}:\n{worker.failure}"
    for worker in workers:
        with contextlib.suppress(vtensor.DriverError):  # what the mapper met, raised once
            pool.wait_idle(5)
        worker.finish()
    del worker
    workers.clear()
    gc.collect()
    if pool.broken is None:
        with contextlib.suppress(vtensor.DriverError):
            pool.wait_idle(5)
        pool.wait_idle(5)
        eventually(lambda pool=pool: is_empty(pool))  # graphs end in a thread of the driver's
    testing.check_invariants(pool)
    stats = pool.stats()
    assert stats.tensors == 0, stats
    assert pool.broken or stats.pages_used == stats.pages_mapped == stats.nbytes_reserved == 0, stats
    counts["faults", "injected"] += faults.injected
    counts["pools", "broken"] += pool.broken is not None
    for thread, calls in stats.driver_calls.items():
        counts["driver calls", thread] += sum(calls.values())
    given_up = objects.count(stats.driver_calls) if objects is not None else 0
    counts["user objects", "given up"] += given_up
    pool.close()
    del pool, stats, faults.core
    gc.collect()
    if device is not None:
        assert device.end() == 0, "a kernel found its memory gone"
        left = bytes(SimcudaLeaks(objects=objects.left_before + given_up))
        assert within(10, lambda: bytes(simcuda_leaks()) == left), (simcuda_leaks(), given_up)


def sample() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        "threads": len(os.listdir("/proc/self/task")),
        "file_descriptors": len(os.listdir("/proc/self/fd")),
        "memfds": memfds(),
        "kernel_mappings": len(kernel_mappings()),
    }


# What the last quarter may have more than the one before.
ROOM = {"rss_mib": 4, "threads": 0, "file_descriptors": 0, "memfds": 0, "kernel_mappings": 40}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kind", choices=["host", "simcuda"], help="only this one")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()
    counts: collections.Counter = collections.Counter()
    samples: list[dict[str, float]] = []
    failure = None
    begin, number = time.monotonic(), 0
    while (elapsed := time.monotonic() - begin) < 60 * arguments.minutes:
        faulthandler.dump_traceback_later(3 * ROUND_BOUND, exit=True)
        kind = arguments.kind or ("host", "simcuda")[number % 2]
        try:
            play(kind, number // 2, arguments.seed + number, counts)
        except Exception:
            failure = f"round {number} ({kind}), seed {arguments.seed + number}:\n{traceback.format_exc()}"
            break
        counts["rounds", kind] += 1
        number += 1
        samples.append({"second": round(elapsed, 1), **sample()})
        if number % 10 == 0:
            print(f"{elapsed:6.0f} s  {number} rounds  {samples[-1]}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    # From the third quarter to the last: allocators grow to their size before, a leak goes on. Of all samples
    # there, because memory comes and goes with what a round draws.
    steady = samples[max(WARM_UP, len(samples) // 2) :]
    half = len(steady) // 2
    growth = {
        name: round(median(s[name] for s in steady[half:]) - median(s[name] for s in steady[:half]), 1)
        if half
        else None
        for name in ROOM
    }
    report: dict = {
        "schema": 1,
        "date": date.today().isoformat(),
        "machine": describe("cpu"),
        "note": "The CUDA driver is simulated over host memory: a test double.",
        "seed": arguments.seed,
        "minutes": round((time.monotonic() - begin) / 60, 2),
    }
    for (group, name), n in sorted(counts.items()):
        report.setdefault(group, {})[name] = n
    report["operations_in_all"] = sum(n for (group, _), n in counts.items() if group == "operations")
    report["lost"] = failure
    report["growth"] = growth
    report["samples"] = samples[:: max(1, len(samples) // 20)]
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    grows = [name for name, more in growth.items() if more is not None and more > ROOM[name]]
    if failure or grows:
        print(f"failed: {failure or ''} grows: {grows}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # At once: after a failure there may be threads that hang.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""Pool.sleep and Pool.wake: how long they take beside a plain copy of the same bytes; and memory for training
and serving in turn, as a picture. ``python -m benchmarks.sleep`` runs it."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

import vtensor

from .harness import clock

T = TypeVar("T")
MIB = 1 << 20
COLORS = {
    "weights": "#2b4c7e",
    "gradients and optimizer": "#7a5c99",
    "activations": "#e0a33e",
    "K and V": "#1b9aaa",
}


def plain_write(memory: torch.Tensor, folder: str) -> int:
    """Bytes in memory to a temporary file, on the disk at the end, and the memory given back."""
    file = os.open(folder, os.O_TMPFILE | os.O_RDWR)
    view = memoryview(memory.numpy())
    while view:
        view = view[os.write(file, view[: 64 * MIB]) :]
    os.fdatasync(file)
    memory.set_(torch.UntypedStorage(0, device="cpu"), 0, (0,))
    return file


def plain_read(file: int) -> torch.Tensor:
    """Back into memory of its own, and the file closed."""
    memory = torch.empty(os.fstat(file).st_size, dtype=torch.uint8)
    view = memoryview(memory.numpy())
    at = 0
    while at < len(view):
        at += os.preadv(file, [view[at : at + 64 * MIB]], at)
    os.close(file)
    return memory


def plain_copy(memory: torch.Tensor) -> torch.Tensor:
    """To new memory, and the old given back."""
    copy = memory.clone()
    memory.set_(torch.UntypedStorage(0, device="cpu"), 0, (0,))
    return copy


def scattered(pages: int) -> dict[str, float]:
    """Microseconds a page that a sleep to the host and a wake take: of an arena whose pages are one run, and
    of one that has every other page."""
    size = 64 * 1024
    figures = {}
    for kind in ("one run", "as many runs as pages"):
        pool = vtensor.Pool("cpu", budget=4 * pages * size, page_size=size, prefetch=0)
        arena = vtensor.Arena(2 * pages * size, pool=pool)
        step = 1 if kind == "one run" else 2
        arena.map([(i * step * size, (i * step + 1) * size) for i in range(pages)])
        arena.tensor[: pages * step * size].view(pages, -1)[:, :size].fill_(1)
        going, coming = [], []
        for _ in range(7):
            going.append(clock(lambda pool=pool: pool.sleep(contents="host")))
            coming.append(clock(pool.wake))
        figures[f"sleep, {kind}"] = median(going) / pages * 1e6
        figures[f"wake, {kind}"] = median(coming) / pages * 1e6
        arena.close()
        pool.close()
    return figures


def measure(nbytes: int, repeats: int) -> dict[str, float]:
    """Medians. What is plain is measured before the sleep in one round, behind the wake in the next."""
    pool = vtensor.Pool("cpu", budget=2 * nbytes, page_size="2MiB")
    weights = torch.nn.ParameterList([torch.empty(32 * MIB // 4) for _ in range(nbytes // (32 * MIB))])
    vtensor.adopt(weights, pool)
    times: dict[str, list[float]] = {}

    def note(name: str, body: Callable[[], T]) -> T:
        torch.ones(nbytes, dtype=torch.uint8)  # a virtual machine gets memory slowly: some is there for each
        results: list[T] = []
        times.setdefault(name, []).append(clock(lambda: results.append(body())))
        return results[0]

    with tempfile.TemporaryDirectory(dir=".") as folder:

        def plainly() -> None:
            memory = torch.ones(nbytes, dtype=torch.uint8)
            file = note("plain write, memory freed", lambda: plain_write(memory, folder))
            memory = note("plain read, new memory", lambda: plain_read(file))
            memory = note("plain copy, memory freed", lambda: plain_copy(memory))

        for i in range(repeats):
            for p in weights:
                p.data.uniform_()
            if i % 2:
                plainly()
            note("sleep, a folder", lambda: pool.sleep(contents=folder))
            note("wake, a folder", pool.wake)
            note("sleep, host", lambda: pool.sleep(contents="host"))
            note("wake, host", pool.wake)
            if not i % 2:
                plainly()
            note("sleep, discard", lambda: pool.sleep(contents="discard"))
            note("wake, discard", pool.wake)
    pool.close()
    return {name: median(all) for name, all in times.items()}


def in_turn(rounds: int) -> list[dict[str, float]]:
    """MiB that each kind needs of one budget, step by step of training and serving in turn."""
    torch.manual_seed(0)
    pool = vtensor.Pool("cpu", budget="160MiB")
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    training = torch.nn.ParameterList([torch.zeros(1024, 1024) for _ in range(16)])  # Adam's two moments
    vtensor.adopt(model, pool, tag="weights")
    vtensor.adopt(training, pool, tag="optimizer")
    cache = vtensor.KVCache(8, 8, 64, max_batch=4, max_len=4096, dtype=torch.float32, pool=pool)
    phases: list[dict[str, float]] = []

    def note(activations: int) -> None:
        by_tag = pool.stats().nbytes_by_tag
        phases.append(
            {
                "weights": by_tag["weights"] / MIB,
                "gradients and optimizer": by_tag["optimizer"] / MIB,
                "activations": activations / MIB,
                "K and V": cache.stats().nbytes_live / MIB,
            }
        )

    for _ in range(rounds):
        for step in range(3):
            activations = vtensor.empty(0, grow_dim=0, capacity=64 * MIB, dtype=torch.uint8, pool=pool)
            for _layer in range(8):
                activations.extend((3 + step) * MIB // 2)
                note(activations.length)
            activations.close()
        pool.trim()
        pool.sleep(tag="optimizer", contents="host")
        slots, lengths = [cache.alloc() for _ in range(4)], cache.lengths
        for length in range(32, 4096, 32):
            for slot in slots:
                lengths[slot] = length
            if not cache.step(lengths):
                break  # the budget is full
            note(0)
        for slot in slots:
            cache.free(slot)
        pool.trim()
        pool.wake(tag="optimizer")
    pool.close()
    return phases


def picture(phases: list[dict[str, float]], path: Path) -> None:
    import pandas
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    pandas.DataFrame(phases).plot.area(ax=axes, color=COLORS, linewidth=0)
    axes.axhline(160, color="#444444", linewidth=1, linestyle="--")
    axes.text(1, 162, "budget", fontsize=9, color="#444444")
    axes.set(xlim=(0, len(phases) - 1), ylim=(0, 178), ylabel="MiB")
    axes.set_xlabel("training and serving in turn, step by step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncol=4, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = measure(options.mib * MIB, options.repeats)
    for name, time_taken in times.items():
        print(f"{name:26} {time_taken * 1e3:9.1f} ms {options.mib / 1024 / time_taken:7.2f} GiB/s")
    plain = times["plain write, memory freed"], times["plain read, new memory"]
    ratios = {
        "to a folder, beside plain writing": times["sleep, a folder"] / plain[0],
        "back, beside plain reading": times["wake, a folder"] / plain[1],
        "to the host, beside a plain copy": times["sleep, host"] / times["plain copy, memory freed"],
        "back, beside a plain copy": times["wake, host"] / times["plain copy, memory freed"],
    }
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f}")
    pages = scattered(1024)
    for what, microseconds in pages.items():
        print(f"{what:30} {microseconds:8.1f} us a page of 64 KiB")
    phases = in_turn(2)
    if options.plot:
        picture(phases, options.plot)
    if options.json:
        figures = {"mib": options.mib, "seconds": times, "ratios": ratios, "us_a_page": pages}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

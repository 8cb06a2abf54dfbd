"""Pool.sleep and Pool.wake: how long they take beside a plain copy of the same bytes; and memory for training
and serving in turn, as a picture. ``python benchmarks/sleep.py`` runs it."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import vtensor

MIB = 1 << 20
COLORS = {
    "weights": "#2b4c7e",
    "gradients and optimizer": "#7a5c99",
    "activations": "#e0a33e",
    "K and V": "#1b9aaa",
}


def seconds(body: Callable[[], object]) -> float:
    begun = time.perf_counter()
    body()
    return time.perf_counter() - begun


def plain_copy(source: Path, target: Path) -> None:
    """As ``cp`` does it, and on the disk at the end."""
    with open(source, "rb") as read, open(target, "wb") as write:
        left = os.fstat(read.fileno()).st_size
        while left:
            left -= os.sendfile(write.fileno(), read.fileno(), None, min(left, 64 * MIB))
        os.fsync(write.fileno())


def plain_write(memory: torch.Tensor, target: Path) -> None:
    """Bytes in memory to a file, on the disk at the end, and the memory given back."""
    with open(target, "wb", buffering=0) as write:
        view = memoryview(memory.numpy())
        while view:
            view = view[os.write(write.fileno(), view[: 64 * MIB]) :]
        os.fsync(write.fileno())
    memory.set_(torch.UntypedStorage(0), 0, (0,))


def plain_read(source: Path) -> torch.Tensor:
    """Back into memory of its own, and the file removed."""
    memory = torch.empty(source.stat().st_size, dtype=torch.uint8)
    view = memoryview(memory.numpy())
    with open(source, "rb", buffering=0) as read:
        while view:
            view = view[os.readv(read.fileno(), [view[: 64 * MIB]]) :]
    source.unlink()
    return memory


def measure(nbytes: int, repeats: int) -> dict[str, float]:
    """Medians. The plain copy is made before the sleep in one round, behind the wake in the next."""
    pool = vtensor.Pool("cpu", budget=2 * nbytes, page_size="2MiB")
    weights = torch.nn.ParameterList([torch.empty(32 * MIB // 4) for _ in range(nbytes // (32 * MIB))])
    vtensor.adopt(weights, pool)
    times: dict[str, list[float]] = {}

    def note(name: str, body: Callable[[], object]) -> None:
        torch.ones(nbytes, dtype=torch.uint8)  # a virtual machine gets memory slowly: some is there for each
        times.setdefault(name, []).append(seconds(body))

    with tempfile.TemporaryDirectory(dir=".") as folder:
        path, kept, copy, plain = (Path(folder) / name for name in ("sleep", "kept", "copy", "plain"))
        pool.sleep(contents=path)
        kept.hardlink_to(path)
        pool.wake()

        def copy_plainly() -> None:
            note("plain copy of the file", lambda: plain_copy(kept, copy))
            copy.unlink()

        for i in range(repeats):
            for p in weights:
                p.data.uniform_()
            if i % 2:
                copy_plainly()
            note("sleep, a file", lambda: pool.sleep(contents=path))
            note("wake, a file", pool.wake)
            if not i % 2:
                copy_plainly()
            memory = torch.ones(nbytes, dtype=torch.uint8)
            note("plain write, memory freed", lambda memory=memory: plain_write(memory, plain))
            note("plain read, new memory", lambda: plain_read(plain))
            note("sleep, host", lambda: pool.sleep(contents="host"))
            note("wake, host", pool.wake)
            note("sleep, discard", pool.sleep)
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

    def note(activations: int, training_awake: bool) -> None:
        by_tag = pool.stats().nbytes_by_tag
        phases.append(
            {
                "weights": by_tag["weights"] / MIB,
                "gradients and optimizer": by_tag["optimizer"] / MIB if training_awake else 0.0,
                "activations": activations / MIB,
                "K and V": cache.stats().nbytes_live / MIB,
            }
        )

    for _ in range(rounds):
        for step in range(3):
            activations = vtensor.empty(0, grow_dim=0, capacity=64 * MIB, dtype=torch.uint8, pool=pool)
            for _layer in range(8):
                activations.extend((3 + step) * MIB // 2)
                note(activations.length, True)
            activations.close()
        pool.trim()
        pool.sleep(tag="optimizer", contents="host")
        slots, lengths = [cache.alloc() for _ in range(4)], cache.lengths
        for length in range(32, 4096, 32):
            for slot in slots:
                lengths[slot] = length
            if not cache.step(lengths):
                break  # the budget is full
            note(0, False)
        for slot in slots:
            cache.free(slot)
        pool.trim()
        pool.wake(tag="optimizer")
    pool.close()
    return phases


def picture(phases: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    kinds = list(COLORS)
    axes.stackplot(
        range(len(phases)),
        [[phase[kind] for phase in phases] for kind in kinds],
        labels=kinds,
        colors=[COLORS[kind] for kind in kinds],
    )
    axes.axhline(160, color="#444444", linewidth=1, linestyle="--")
    axes.text(1, 162, "budget", fontsize=9, color="#444444")
    axes.set_xlim(0, len(phases) - 1)
    axes.set_ylim(0, 178)
    axes.set_xlabel("training and serving in turn, step by step")
    axes.set_ylabel("MiB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncol=4, frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
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
    copy, going, coming = (times[of] for of in ("plain copy of the file", "sleep, a file", "wake, a file"))
    plain = times["plain write, memory freed"] + times["plain read, new memory"]
    ratios = {
        "to a file, in the speed of a plain copy of it": copy / going,
        "back, in that speed": copy / coming,
        "to a file and back, in the speed of one plain copy": copy / (going + coming),
        "both ways, in that of plain writing and reading, memory freed and taken": plain / (going + coming),
    }
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f}")
    phases = in_turn(2)
    if options.plot:
        picture(phases, options.plot)
    if options.json:
        figures = {"mib": options.mib, "seconds": times, "ratios": ratios}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

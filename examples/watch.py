"""A process that watches the KV cache of another one while it serves: each slot's length, and their memory.

    python examples/watch.py [picture.png]

The picture needs matplotlib: ``pip install 'vtensor[plot]'``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import vtensor

LAYERS, HEADS, HEAD_DIM, SLOTS, LONGEST = 2, 4, 64, 8, 512
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 2  # K and V in bfloat16


def serve(pipe: Connection) -> None:
    """The other process: requests come and go. It does nothing for its watcher but one send."""
    random.seed(0)
    pool = vtensor.Pool("cpu", page_size=4096, shareable=True)
    cache = vtensor.KVCache(LAYERS, HEADS, HEAD_DIM, SLOTS, LONGEST, torch.bfloat16, pool=pool)
    pipe.send(cache)
    pipe.recv()  # the watcher has it
    ends: dict[int, int] = {}
    for step in range(600):
        if step % 20 == 0 and len(ends) < SLOTS:
            ends[cache.alloc()] = random.randint(50, LONGEST)
        lengths = cache.lengths
        for slot in ends:
            lengths[slot] += random.randint(1, 4)
        assert cache.step([min(length, LONGEST) for length in lengths])
        for slot in [slot for slot, end in ends.items() if lengths[slot] >= end]:
            cache.free(slot)
            del ends[slot]
        time.sleep(0.002)
    cache.close()


def bars(lengths: list[int]) -> str:
    rows = [f"slot {slot}  {'#' * (n * 48 // LONGEST):48} {n:4} tokens" for slot, n in enumerate(lengths)]
    return "\n".join([*rows, f"together {sum(lengths) * TOKEN_BYTES / 2**20:6.2f} MiB"])


def draw(seen: list[list[int]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3))
    by_slot = [[lengths[slot] * TOKEN_BYTES / 2**20 for lengths in seen] for slot in range(SLOTS)]
    axes.stackplot(range(len(seen)), by_slot, labels=[f"slot {slot}" for slot in range(SLOTS)])
    axes.set(xlabel="syncs that found something new", ylabel="MiB", xlim=(0, len(seen) - 1))
    figure.tight_layout()
    figure.savefig(path)


def main(picture: Path | None) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    cache = ours.recv()
    ours.send("go on")
    seen: list[list[int]] = []
    try:
        while True:
            if cache.sync():
                seen.append(cache.lengths)
                if sys.stdout.isatty():
                    print(bars(cache.lengths) + f"\x1b[{SLOTS}A\r", end="", flush=True)
            time.sleep(0.01)
    except vtensor.Closed as end:
        print(f"{bars(max(seen, key=sum))}\n{end}")
    process.join()
    assert process.exitcode == 0 and len(seen) > 10 and sum(max(seen, key=sum)) > LONGEST
    if picture:
        draw(seen, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", type=Path, nargs="?", help="where to save one, such as watch.png")
    main(parser.parse_args().picture)

"""Two engines of vLLM in one memory, whose bursts come in turn: a shared budget beside static halves.

``scripts/vllm.sh engines`` runs it. Four processes: two engines of stock vLLM, each with half of the memory,
and two on vtensor that share the whole. All four run the same bursts, one engine at a time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from vllm_engines import ask, end, make_model, save
from vllm_plugin import REQUESTS, start

MEMORY = 48 << 20  # bytes of K and V; a burst wants some 100 MiB
ROUNDS = 6


def measure(folder: str) -> dict[str, list[float]]:
    """Seconds of each burst, of the two engines in turn."""
    shared = {"VTENSOR_VLLM_BUDGET": str(MEMORY), "VTENSOR_VLLM_SHARED": f"bench-{os.getpid()}"}
    engines = {
        "halves": [start(folder, False, MEMORY // 2) for _ in range(2)],
        "shared": [start(folder, True, 4 * MEMORY, **shared) for _ in range(2)],
    }
    for workers in engines.values():
        for worker in workers:
            ask(worker)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(-2, ROUNDS):  # the first of each engine warms up
        for name in sorted(engines, reverse=seed % 4 > 1):
            burst = ask(engines[name][seed % 2], str(seed + 2))
            print(f"burst {seed + 1} of {ROUNDS}, {name}: {burst['seconds']:.2f} s", file=sys.stderr)
            if seed >= 0:
                seconds[name].append(burst["seconds"])
    for workers in engines.values():
        for worker in workers:
            end(worker)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the result goes as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        seconds = measure(folder)
    ratios = [a / b for a, b in zip(seconds["shared"], seconds["halves"], strict=True)]
    figures = {
        "requests of a burst": REQUESTS,
        "MiB of K and V in all": MEMORY / 2**20,
        "seconds of a burst, static halves": statistics.median(seconds["halves"]),
        "seconds of a burst, one budget": statistics.median(seconds["shared"]),
        "one budget / halves, median": statistics.median(ratios),
        "one budget / halves, least": min(ratios),
        "one budget / halves, most": max(ratios),
    }
    for name, value in figures.items():
        print(f"{name:50s} {value:10,.3f}")
    save(arguments.out, figures, bursts=seconds)


if __name__ == "__main__":
    main()

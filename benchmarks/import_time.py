"""What ``import vtensor`` adds to ``import torch``, in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

from .harness import Bar, Figure, Settings, Spread, interleave, slowdown

WITH = """
from time import perf_counter
start = perf_counter()
import torch
torch_done = perf_counter()
import vtensor
print(torch_done - start, perf_counter() - torch_done)
"""
WITHOUT = """
from time import perf_counter
start = perf_counter()
import torch
print(perf_counter() - start)
"""


def run(settings: Settings) -> list[Figure]:
    added: list[float] = []

    def both() -> float:
        torch_seconds, vtensor_seconds = seconds_of(WITH)
        added.append(vtensor_seconds)
        return torch_seconds + vtensor_seconds

    def torch_alone() -> float:
        return seconds_of(WITHOUT)[0]

    warmup = settings.pick(1, 0)
    samples = {"both": both, "torch": torch_alone, "control": torch_alone}
    taken = interleave(samples, settings.pick(8, 1), warmup)
    spread = Spread.of(added[warmup:])
    return [
        Figure(
            "import vtensor", "a process that has torch", "ms", spread.scaled(1e3), bar=Bar(60), ours=spread
        ),
        slowdown("import torch, vtensor", "import torch", taken["both"], taken["torch"], taken["control"]),
    ]


def seconds_of(code: str) -> list[float]:
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return [float(word) for word in finished.stdout.split()]

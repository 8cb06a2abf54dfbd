"""``append`` of one token at 32k tokens, against ``torch.cat`` and a copy into preallocated memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import vtensor

from .harness import Bar, Figure, Settings, clock, clock_steps, interleave, quantile, slowdown, speedup

HEADS, HEAD_DIM = 8, 128  # float32: a token is 4 KiB


@dataclass
class Steps:
    """A sample of `count` steps: gives their median, and keeps their mean and 99th percentile."""

    step: Callable[[int], object]  # takes the number of the step
    count: int
    settings: Settings
    reset: Callable[[], object] = lambda: None
    means: list[float] = field(default_factory=list)
    slowest: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        self.reset()
        ordered = sorted(clock_steps(self.step, self.count, self.settings.wait))
        self.means.append(sum(ordered) / len(ordered))
        self.slowest.append(quantile(ordered, 0.99))
        return quantile(ordered, 0.5)


def run(settings: Settings) -> list[Figure]:
    start = settings.pick(32768, 512)
    steps = settings.pick(256, 32)  # in 16 pages
    rounds, warmup = settings.pick(60, 3), 1
    device, wait = settings.device, settings.wait
    x = torch.randn(1, 1, HEADS, HEAD_DIM, device=device)

    def growable(room: int) -> vtensor.VTensor:
        options = {"grow_dim": 1, "capacity": start + room, "dtype": torch.float32, "device": device}
        t = vtensor.empty(1, 0, HEADS, HEAD_DIM, **options)
        return t.append(torch.ones(1, start, HEADS, HEAD_DIM, device=device))

    # The limit: memory for all tokens, there and touched before the first of them.
    sliced, narrowed, second = (
        torch.ones(1, start + steps, HEADS, HEAD_DIM, device=device) for _ in range(3)
    )
    fresh, kept = growable(steps * (rounds + warmup)), growable(steps)
    grown = torch.ones(1, start, HEADS, HEAD_DIM, device=device)

    def slice_copy(buffer: torch.Tensor) -> Callable[[int], object]:
        return lambda i: buffer[:, start + i : start + i + 1].copy_(x)

    def cat() -> float:
        nonlocal grown

        def step() -> None:
            nonlocal grown
            grown = torch.cat((grown, x), dim=1)

        return clock(step, wait)

    cases = {
        "fresh": Steps(lambda _: fresh.append(x), steps, settings),
        "kept": Steps(lambda _: kept.append(x), steps, settings, lambda: kept.truncate(start)),
        "slice": Steps(slice_copy(sliced), steps, settings),
        "control": Steps(slice_copy(second), steps, settings),
        "narrow": Steps(lambda i: narrowed.narrow(1, start + i, 1).copy_(x), steps, settings),
    }
    taken = interleave({**cases, "cat": cat}, rounds, warmup)
    fresh.close()
    kept.close()
    means = {name: case.means[warmup:] for name, case in cases.items()}
    slowest = {name: case.slowest[warmup:] for name, case in cases.items()}

    bar = Bar(2000, at_least=True)
    figures = [speedup("append, fresh pages, mean", "torch.cat", means["fresh"], taken["cat"], bar=bar)]
    statistics = (("median", taken, Bar(1.0)), ("mean", means, None), ("99th percentile", slowest, None))
    for name in ("fresh", "kept"):
        what = f"append, {name} pages, "
        for statistic, of, bar in statistics:
            figures.append(
                slowdown.among(of, what + statistic, "copy_ to slice", name, "slice", "control", bar)
            )
        figures.append(slowdown.among(taken, what + "median", "copy_ to narrow()", name, "narrow"))
    return figures

"""Interleaved measurement, its statistics, and the figures that come out of it.

Times on a shared machine drift by more than what is measured. So whatever is compared is sampled in turn,
in one process and in an order that changes from round to round, and the comparison is made inside each
round: a figure is the median over rounds of "ours / baseline of the same round", with its 10th and 90th
percentile. Beside it stands a control, the same comparison of the baseline with a second copy of itself: a
difference that the control shows too is no difference.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter_ns

import torch

Sample = Callable[[], float]  # does its own set-up, and returns what it measured: seconds


class Skipped(Exception):
    """Raised by a benchmark that cannot run here; says why."""


@dataclass(frozen=True)
class Settings:
    """How to run: ``quick`` shows in seconds that everything works; its times mean nothing."""

    quick: bool = False
    device: str = "cpu"

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def wait(self) -> None:
        """Waits for the work that was launched on the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Spread:
    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        return cls(quantile(ordered, 0.5), quantile(ordered, 0.1), quantile(ordered, 0.9))

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.p10 * factor, self.p90 * factor)


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted values, linear between neighbours (type 7 of Hyndman and Fan, 1996)."""
    if not ordered:
        raise ValueError("no values")
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Bar:
    """What a figure's median has to hold."""

    limit: float
    at_least: bool = False  # otherwise at most

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class Figure:
    """One line of the result. `value` and `control` are in `unit`, `ours` and `baseline` in seconds."""

    name: str
    against: str
    unit: str
    value: Spread
    control: Spread | None = None
    bar: Bar | None = None
    ours: Spread | None = None
    baseline: Spread | None = None
    counted: bool = False  # the same in every run, so worth gating
    passed: bool | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed", None if self.bar is None else self.bar.holds(self.value.median))


def interleave(
    samples: Mapping[str, Sample], rounds: int | Iterable[int], warmup: int = 1
) -> dict[str, list[float]]:
    """Takes one sample of each in every round, in an order that changes, with the collector off.

    The order is shuffled because what ran just before decides what is in the processor's caches. ``rounds``
    may also be what counts them, such as a generator that stops in time.
    """
    order = random.Random(0)
    names = list(samples)
    taken: dict[str, list[float]] = {name: [] for name in names}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for done in chain(range(-warmup, 0), range(rounds) if isinstance(rounds, int) else rounds):
            order.shuffle(names)
            for name in names:
                seconds = samples[name]()
                if done >= 0:
                    taken[name].append(seconds)
    finally:
        if was_enabled:
            gc.enable()
    return taken


def keep_awake(seconds: float = 0.0005) -> None:
    """Runs for so long: a core that slept needs up to 0.2 ms to be at its speed again."""
    until = perf_counter_ns() + int(seconds * 1e9)
    while perf_counter_ns() < until:
        pass


def clock(operation: Callable[[], object], wait: Callable[[], None] | None = None) -> float:
    """Seconds that one call took, on the device too where `wait` waits for it."""
    start = perf_counter_ns()
    operation()
    if wait is not None:
        wait()
    return (perf_counter_ns() - start) / 1e9


def clock_steps(
    step: Callable[[int], object], count: int, wait: Callable[[], None] | None = None
) -> list[float]:
    """Seconds that each of step(0), step(1), ... took. What reading the clock takes is taken off."""
    stamps = [perf_counter_ns()]
    for i in range(count):
        step(i)
        if wait is not None:
            wait()
        stamps.append(perf_counter_ns())
    return [max(0.0, (b - a) / 1e9 - _clock_seconds()) for a, b in zip(stamps, stamps[1:], strict=False)]


_clock_cost: list[float] = []


def _clock_seconds() -> float:
    if not _clock_cost:
        stamps = [perf_counter_ns()]
        for _ in range(2000):
            stamps.append(perf_counter_ns())
        steps = sorted(b - a for a, b in zip(stamps, stamps[1:], strict=False))
        _clock_cost.append(quantile(steps, 0.5) / 1e9)
    return _clock_cost[0]


@dataclass(frozen=True)
class Comparison:
    """Makes a figure of samples that were taken in the same rounds."""

    unit: str
    of: Callable[[float, float], float]  # ours and the baseline of one round

    def __call__(
        self,
        name: str,
        against: str,
        ours: Sequence[float],
        baseline: Sequence[float],
        control: Sequence[float] | None = None,
        bar: Bar | None = None,
    ) -> Figure:
        def spread(measured: Sequence[float]) -> Spread:
            return Spread.of(self.of(a, b) for a, b in zip(measured, baseline, strict=True))

        of_control = None if control is None else spread(control)
        return Figure(
            name, against, self.unit, spread(ours), of_control, bar, Spread.of(ours), Spread.of(baseline)
        )

    def among(
        self,
        taken: Mapping[str, Sequence[float]],
        name: str,
        against: str,
        ours: str,
        baseline: str,
        control: str | None = None,
        bar: Bar | None = None,
    ) -> Figure:
        """Of samples by their names."""
        of_control = None if control is None else taken[control]
        return self(name, against, taken[ours], taken[baseline], of_control, bar)


slowdown = Comparison("x", lambda ours, baseline: ours / baseline)
speedup = Comparison("x faster", lambda ours, baseline: baseline / ours)
excess = Comparison("us more", lambda ours, baseline: (ours - baseline) * 1e6)


def count(
    name: str, against: str, value: float, unit: str, bar: Bar | None = None, counted: bool = True
) -> Figure:
    """One number: the same in every run, unless it is not `counted`."""
    return Figure(name, against, unit, Spread(value, value, value), bar=bar, counted=counted)

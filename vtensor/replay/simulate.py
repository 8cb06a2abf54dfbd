"""A discrete-event simulation of one server.

The trace gives the arrivals, a model of the device the duration of iterations. The memory manager decides
which requests fit. All managers run in the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vtensor.errors import InvalidArgument
from vtensor.replay.traces import Row
from vtensor.serving import KVCacheManager, Plan, Request, Scheduler

__all__ = ["ReplayCache", "Result", "Sample", "ServiceModel", "replay"]

_SAMPLES = 512  # at most: stats() of a KVCache of 256 slots takes a millisecond


class CacheStats(Protocol):
    @property
    def unit(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def waste(self) -> float: ...

    @property
    def driver_calls(self) -> Mapping[str, Mapping[str, int]]: ...


class ReplayCache(KVCacheManager, Protocol):
    def stats(self) -> CacheStats: ...


@dataclass(frozen=True)
class ServiceModel:
    """The duration of an iteration: reading the weights, computing the tokens, and reading K and V.

    The defaults stand for an 8B model in bf16 on an A100 with 2 TB/s and 312 TFLOP/s: 16 GB of weights, 8 ms
    to read them, and about 60% of either peak. They are assumptions, the same for all managers. They are not
    measured.
    """

    step_seconds: float = 0.010
    """The fixed time of an iteration."""
    tokens_per_second: float = 10_000.0
    """The rate at which tokens are computed."""
    kv_bytes_per_second: float = 1.2e12
    """The rate at which K and V of each sequence's context are read."""
    call_seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of a driver call on the caller's thread, by its name. Other calls take no time."""

    def seconds(self, plan: Plan, token_bytes: int, calls: Mapping[str, int]) -> float:
        context = sum(stop for _, _, stop in plan.work)
        return (
            self.step_seconds
            + plan.tokens / self.tokens_per_second
            + context * token_bytes / self.kv_bytes_per_second
            + sum(self.call_seconds.get(name, 0.0) * n for name, n in calls.items())
        )


@dataclass(frozen=True)
class Sample:
    """The server at one moment."""

    seconds: float
    running: int
    queued: int
    tokens: int
    """Tokens whose K and V the requests hold."""


@dataclass(frozen=True)
class Result:
    """The result of a replay with one manager."""

    policy: str
    requests: int
    admitted: int
    finished: int
    failed: int
    """Requests too large for the manager's memory, or for its slots."""
    batch_mean: float
    """Mean number of running requests, over the time in which there were any."""
    batch_peak: int
    waste: float
    """Memory that the running requests hold beyond what their tokens need, as a share of that need. The mean
    over time."""
    prompt_tokens: int
    """Prompt tokens of admitted requests."""
    reused_tokens: int
    """Those of them that published prefixes covered."""
    computed_tokens: int
    recomputed: int
    """Preemptions that dropped computed tokens."""
    swapped: int
    calls_caller: int
    """Driver calls on the critical path: on the thread that plans iterations."""
    calls_mapper: int
    """Driver calls on the mapper's thread."""
    delay_p50: float
    """Seconds from a request's arrival to its first iteration."""
    delay_p99: float
    seconds: float
    """Simulated seconds from the first arrival to the end of the last request."""
    output_tokens: int
    samples: list[Sample]
    delays: list[float]

    @property
    def hit_rate(self) -> float:
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


def replay(
    policy: str,
    cache: ReplayCache,
    rows: Sequence[Row],
    *,
    token_bytes: int,
    service: ServiceModel | None = None,
    speed: float = 1.0,
    token_budget: int = 2048,
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """Serves a trace in simulated time.

    Args:
        policy: the manager's name, for the result.
        cache: an empty cache. Afterwards it holds published prefixes only.
        rows: the trace, in order of arrival.
        token_bytes: bytes of one token's K and V.
        service: the model of the device.
        speed: the factor by which requests come faster than recorded.
        token_budget: as for ``Scheduler``.
        progress: called with a line of text after each iteration.

    Raises:
        InvalidArgument: if ``speed`` is not over 0, or ``token_budget`` is not valid for ``Scheduler``.
    """
    if not speed > 0:
        raise InvalidArgument(f"[replay] speed={speed}: it must be over 0")
    return _Replay(policy, cache, rows, token_bytes, service or ServiceModel(), speed, token_budget).run(
        progress
    )


class _Replay:
    def __init__(
        self,
        policy: str,
        cache: ReplayCache,
        rows: Sequence[Row],
        token_bytes: int,
        service: ServiceModel,
        speed: float,
        token_budget: int,
    ) -> None:
        self.policy, self.cache, self.rows, self.token_bytes = policy, cache, rows, token_bytes
        self.service, self.speed = service, speed
        self.scheduler = Scheduler(cache, token_budget=token_budget)
        self.now = 0.0
        self.next_row = 0
        self.rejected = 0
        self.delays: list[float] = []
        self.samples: list[Sample] = []
        self.stride, self.iterations = 1, 0
        self.busy = self.batch_seconds = 0.0
        self.waste_seconds = self.waste_busy = self.unsampled = 0.0
        self.batch_peak = self.output_tokens = 0
        self.calls_before = self._calls()
        self.calls_seen = self.calls_before["caller"]

    def run(self, progress: Callable[[str], None]) -> Result:
        rows, scheduler = self.rows, self.scheduler
        while True:
            self._arrivals()
            if scheduler.unfinished:
                self._iterate()
            elif self.next_row < len(rows):
                self.now = rows[self.next_row].arrival / self.speed
            else:
                return self._result()
            stats = scheduler.stats
            done = stats.finished + stats.failed + self.rejected
            progress(f"{self.policy}: {done:,} of {len(rows):,} requests")

    def _arrivals(self) -> None:
        while self.next_row < len(self.rows):
            row = self.rows[self.next_row]
            if row.arrival / self.speed > self.now:
                return
            if row.prompt_tokens + row.output_tokens > self.cache.max_len:
                self.rejected += 1
            else:
                self.scheduler.add(Request(self.next_row, row.prompt, row.output_tokens))
            self.next_row += 1

    def _iterate(self) -> None:
        scheduler = self.scheduler
        began = self.now
        plan = scheduler.plan()
        for group in plan.admitted:
            index = group.request.id
            assert isinstance(index, int)
            self.delays.append(began - self.rows[index].arrival / self.speed)
        running = len(scheduler.running)
        took = self.service.seconds(plan, self.token_bytes, self._new_calls()) if plan else 0.0
        self.now += took
        self.busy += took
        self.batch_seconds += took * running
        self.batch_peak = max(self.batch_peak, running)
        self.output_tokens += len(plan.sampled)
        self.unsampled += took
        self._sample(began, running)
        scheduler.complete(plan)

    def _sample(self, began: float, running: int) -> None:
        """Samples the memory every few iterations, with a stride that bounds the number of samples."""
        self.iterations += 1
        if self.iterations % self.stride:
            return
        stats = self.cache.stats()
        self.waste_seconds += stats.waste * self.unsampled
        self.waste_busy += self.unsampled
        self.unsampled = 0.0
        queued = len(self.scheduler.waiting) + len(self.scheduler.swapped)
        self.samples.append(Sample(began, running, queued, stats.tokens))
        if len(self.samples) == _SAMPLES:
            del self.samples[::2]
            self.stride *= 2

    def _calls(self) -> dict[str, dict[str, int]]:
        # Without the calls of stats() itself, which reads pagemap on the host to find private copies.
        return {
            thread: {name: n for name, n in calls.items() if name != "pagemap"}
            for thread, calls in self.cache.stats().driver_calls.items()
        }

    def _new_calls(self) -> dict[str, int]:
        if not self.service.call_seconds:
            return {}
        before, self.calls_seen = self.calls_seen, self._calls()["caller"]
        return {name: n - before.get(name, 0) for name, n in self.calls_seen.items()}

    def _result(self) -> Result:
        stats, calls = self.scheduler.stats, self._calls()
        made = {
            thread: sum(calls[thread].values()) - sum(self.calls_before[thread].values())
            for thread in ("caller", "mapper")
        }
        delays = sorted(self.delays)
        return Result(
            policy=self.policy,
            requests=len(self.rows),
            admitted=stats.admitted,
            finished=stats.finished,
            failed=stats.failed + self.rejected,
            batch_mean=self.batch_seconds / self.busy if self.busy else 0.0,
            batch_peak=self.batch_peak,
            waste=self.waste_seconds / self.waste_busy if self.waste_busy else 0.0,
            prompt_tokens=stats.prompt_tokens,
            reused_tokens=stats.reused_tokens,
            computed_tokens=stats.computed_tokens,
            recomputed=stats.recomputed,
            swapped=stats.swapped,
            calls_caller=made["caller"],
            calls_mapper=made["mapper"],
            delay_p50=_quantile(delays, 0.50),
            delay_p99=_quantile(delays, 0.99),
            seconds=self.now,
            output_tokens=self.output_tokens,
            samples=self.samples,
            delays=delays,
        )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile by the nearest rank; 0 if there are no values."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

"""A discrete-event simulation of one server.

The trace gives the arrivals, a model of the device the duration of iterations. The memory manager decides
which requests fit. All managers run in the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from vtensor._base.terminal import quantile
from vtensor.errors import InvalidArgument, TimedOut
from vtensor.kv import KVCache
from vtensor.replay.managers import ReplayCache
from vtensor.replay.policies import POLICIES
from vtensor.replay.traces import Row
from vtensor.serving import Plan, Promises, Request, SampleGroup, Scheduler, SchedulerStats

SLO_TTFT = 3.0
"""The default promise: seconds to the first token."""
SLO_TPOT = 0.2
"""The default promise: seconds for each later token."""

_SAMPLES = 512  # at most: stats() of a KVCache of 256 slots takes a millisecond
_LONGEST_WAIT = 60.0  # for the mapper, even if an iteration lasts longer


@dataclass(frozen=True)
class ServiceModel:
    """The duration of an iteration: reading the weights, computing the tokens, and reading K and V. K and V
    are copied between device and host memory at the same time; if that takes longer, it is the duration.

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
    copy_bytes_per_second: float = 25e9
    """The rate of copies between device and host memory, each way, both at once."""
    call_seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of a driver call on the caller's thread, by its name. Other calls take no time."""

    def seconds(
        self, plan: Plan, token_bytes: int, calls: Mapping[str, int], bytes_out: int = 0, bytes_in: int = 0
    ) -> float:
        """The duration of a plan, with the driver calls of the caller's thread and the bytes copied to host
        memory and from it."""
        context = sum(stop for _, _, stop in plan.work)
        computes = (
            self.step_seconds
            + plan.tokens / self.tokens_per_second
            + context * token_bytes / self.kv_bytes_per_second
            + sum(self.call_seconds.get(name, 0.0) * n for name, n in calls.items())
        )
        return max(computes, max(bytes_out, bytes_in) / self.copy_bytes_per_second)


@dataclass(frozen=True)
class Sample:
    """The server at one moment."""

    seconds: float
    running: int
    queued: int
    tokens: int
    """Tokens of the requests whose K and V are in memory."""


def _quantile(times: str, q: float) -> property:
    return property(lambda result: quantile(getattr(result, times), q))


@dataclass(kw_only=True)
class Result(SchedulerStats):
    """The result of a replay with one manager. Requests fail that are too large for the manager's memory, or
    for its slots."""

    policy: str
    requests: int
    batch_mean: float = 0.0
    """Mean number of running requests, over the time with at least one."""
    batch_peak: int = 0
    waste: float = 0.0
    """Memory that the running requests hold beyond what their tokens need, as a share of that need. The mean
    over time."""
    copied_bytes: int = 0
    """K and V that moved to host memory, and back."""
    calls_caller: int = 0
    """Driver calls on the critical path: on the thread that plans iterations."""
    calls_mapper: int = 0
    """Driver calls on the mapper's thread."""
    slo_ttft: float
    slo_tpot: float
    broken: int = 0
    """Requests whose time to first token was over ``slo_ttft``, whose time per token was over ``slo_tpot``,
    or that failed."""
    seconds: float = 0.0
    """Simulated seconds from the first arrival to the end of the last request."""
    output_tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    """Seconds from a request's arrival to its first iteration. All times are in order of size."""
    ttfts: list[float] = field(default_factory=list)
    """Time to first token: seconds from a request's arrival to the end of the iteration that gave its first
    token. This and the time per token are those of finished requests."""
    tpots: list[float] = field(default_factory=list)
    """Time per output token: seconds from a request's first token to its last, divided by the tokens after
    the first, waits included. Of requests of two tokens and more."""

    delay_p50, delay_p99 = _quantile("delays", 0.50), _quantile("delays", 0.99)
    ttft_p50, ttft_p99 = _quantile("ttfts", 0.50), _quantile("ttfts", 0.99)
    tpot_p50, tpot_p99 = _quantile("tpots", 0.50), _quantile("tpots", 0.99)

    @property
    def tpot_mean(self) -> float:
        return sum(self.tpots) / len(self.tpots) if self.tpots else 0.0

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
    slo_ttft: float = SLO_TTFT,
    slo_tpot: float = SLO_TPOT,
    slower: float = 0.05,
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """Serves a trace in simulated time.

    The mapper of a :class:`vtensor.KVCache` works in real time. After each iteration is planned it gets as
    much real time as the iteration lasts, or less if it is done earlier.

    Args:
        policy: one of ``POLICIES``, which schedules the requests; or the name of another manager, whose
            requests are served as they come.
        cache: an empty cache. Afterwards it has published prefixes only.
        rows: the trace, in order of arrival.
        token_bytes: bytes of one token's K and V.
        service: the model of the device.
        speed: the factor by which requests come faster than recorded.
        token_budget: as for ``Scheduler``.
        slo_ttft, slo_tpot: the promises to each request, in seconds.
        slower: as for ``Promises``, if the policy keeps them.
        progress: called with a line of text after each iteration.

    Raises:
        InvalidArgument: if ``speed`` or a promise is not over 0, or ``token_budget`` is not valid for
            ``Scheduler``.
    """
    for name, number in {"speed": speed, "slo_ttft": slo_ttft, "slo_tpot": slo_tpot}.items():
        if not number > 0:
            raise InvalidArgument(f"[replay] {name}={number}: it must be over 0")
    service = service or ServiceModel()
    promises = Promises(slo_tpot, slo_ttft, slower)
    return _Replay(policy, cache, rows, token_bytes, service, speed, token_budget, promises).run(progress)


@dataclass
class _Replay:
    policy: str
    cache: ReplayCache
    rows: Sequence[Row]
    token_bytes: int
    service: ServiceModel
    speed: float
    token_budget: int
    promises: Promises

    def __post_init__(self) -> None:
        cache, promises, budget = self.cache, self.promises, self.token_budget
        self.pool = cache.pool if isinstance(cache, KVCache) else None
        self.now = 0.0
        way = POLICIES.get(self.policy)
        if way is not None and way.whole_prompts:
            budget = max(budget, cache.max_len + cache.max_batch)
        kept = promises if way is not None and way.keeps_promises else None
        self.scheduler = Scheduler(cache, token_budget=budget, clock=lambda: self.now, promises=kept)
        self.result = Result(
            policy=self.policy, requests=len(self.rows), slo_ttft=promises.ttft, slo_tpot=promises.tpot
        )
        self.next_row = 0
        self.first_tokens: dict[int, float] = {}  # their times, of requests that have not ended
        self.stride, self.iterations = 1, 0
        self.busy = self.batch_seconds = 0.0
        self.waste_seconds = self.sampled = 0.0  # `sampled`: the busy time up to the last sample
        self.calls_before = self._calls()
        self.calls_seen = self.calls_before["caller"]

    def run(self, progress: Callable[[str], None]) -> Result:
        rows, scheduler = self.rows, self.scheduler
        while True:
            if scheduler.unfinished:
                self._iterate()
            elif self.next_row < len(rows):
                self.now = rows[self.next_row].arrival / self.speed
                self._arrivals()
            else:
                return self._result()
            stats = scheduler.stats
            done = stats.finished + stats.failed + self.result.failed
            progress(f"{self.policy}: {done:,} of {len(rows):,} requests")

    def _arrivals(self) -> None:
        while self.next_row < len(self.rows):
            row = self.rows[self.next_row]
            if row.arrival / self.speed > self.now:
                return
            if row.prompt_tokens + row.output_tokens > self.cache.max_len:
                self.result.failed += 1
            else:
                self.scheduler.add(Request(self.next_row, row.prompt, row.output_tokens))
            self.next_row += 1

    def _iterate(self) -> None:
        scheduler, result = self.scheduler, self.result
        began = self.now
        plan = scheduler.plan()
        for group in plan.admitted:
            result.delays.append(began - self._arrival(group))
        running = len(scheduler.running)
        took = 0.0
        if plan:
            took = self.service.seconds(plan, self.token_bytes, self._new_calls(), *self._moved(plan))
        self.now += took
        self.busy += took
        self.batch_seconds += took * running
        result.batch_peak = max(result.batch_peak, running)
        result.output_tokens += len(plan.sampled)
        self._sample(began, running)
        self._arrivals()
        if self.pool is not None and took > 0:  # the mapper's thread gets the time of the iteration
            with suppress(TimedOut):
                self.pool.wait_idle(min(took, _LONGEST_WAIT))
        for _, sequence in plan.sampled:
            if sequence.generated == 0:
                self.first_tokens[_row_of(sequence.group)] = self.now
        for group in scheduler.complete(plan):
            self._finished(group)

    def _moved(self, plan: Plan) -> tuple[int, int]:
        """Bytes to host memory and bytes from it, of requests that are swapped out or come back."""
        slots = [sequence.slot for group in plan.preempted for sequence in group.holders]
        out = sum(self.cache.length(slot) for slot in slots if slot is not None)  # None: computed again
        back = sum(self.cache.length(slot) for slot in plan.swapped_in)
        self.result.copied_bytes += (out + back) * self.token_bytes
        return out * self.token_bytes, back * self.token_bytes

    def _arrival(self, group: SampleGroup) -> float:
        return self.rows[_row_of(group)].arrival / self.speed

    def _finished(self, group: SampleGroup) -> None:
        result, first = self.result, self.first_tokens.pop(_row_of(group))
        ttft = first - self._arrival(group)
        result.ttfts.append(ttft)
        tokens = group.request.max_new_tokens
        tpot = (self.now - first) / (tokens - 1) if tokens > 1 else 0.0
        if tokens > 1:
            result.tpots.append(tpot)
        if ttft > self.promises.ttft or tpot > self.promises.tpot:
            result.broken += 1

    def _sample(self, began: float, running: int) -> None:
        """Samples the memory every few iterations, with a stride that bounds the number of samples."""
        self.iterations += 1
        if self.iterations % self.stride:
            return
        stats = self.cache.stats()
        self.waste_seconds += stats.waste * (self.busy - self.sampled)
        self.sampled = self.busy
        queued = len(self.scheduler.waiting) + len(self.scheduler.swapped)
        samples = self.result.samples
        samples.append(Sample(began, running, queued, stats.tokens))
        if len(samples) == _SAMPLES:
            del samples[::2]
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
        result, calls = self.result, self._calls()
        for name, counted in vars(self.scheduler.stats).items():
            setattr(result, name, getattr(result, name) + counted)
        result.broken += result.failed
        result.calls_caller, result.calls_mapper = (
            sum(calls[thread].values()) - sum(self.calls_before[thread].values())
            for thread in ("caller", "mapper")
        )
        if self.busy:
            result.batch_mean = self.batch_seconds / self.busy
        if self.sampled:
            result.waste = self.waste_seconds / self.sampled
        result.seconds = self.now
        for times in (result.delays, result.ttfts, result.tpots):
            times.sort()
        return result


def _row_of(group: SampleGroup) -> int:
    index = group.request.id
    assert isinstance(index, int)
    return index

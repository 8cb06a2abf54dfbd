"""Growth off the critical path: what is left of a page crossing once the mapper has been there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch.nn.functional import scaled_dot_product_attention

import vtensor

from .harness import (
    Bar,
    Figure,
    Sample,
    Settings,
    Skipped,
    Spread,
    clock,
    count,
    interleave,
    keep_awake,
    quantile,
    slowdown,
)
from .native import load_bare_mmap

HEADS, HEAD_DIM = 8, 128


def run(settings: Settings) -> list[Figure]:
    if settings.device != "cpu":
        raise Skipped("counts and maps host pages")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other core is the mapper's, as on a machine that serves
    try:
        return [
            *crossing_steps(settings),
            *ready_pages(settings),
            *many_tensors(settings),
        ]
    finally:
        torch.set_num_threads(threads)


def growing_tensor(capacity: int, pool: vtensor.Pool) -> vtensor.VTensor:
    sizes = (1, 0, HEADS, HEAD_DIM)
    return vtensor.empty(*sizes, grow_dim=1, capacity=capacity, dtype=torch.bfloat16, pool=pool)


def caller_calls(pool: vtensor.Pool) -> int:
    return sum(pool.stats().driver_calls["caller"].values())


# --- decode steps


STEPS, ROUNDS = (4096, 192), (5, 1)  # in full, and quick
LAYERS = 4  # of a model; all cross in the same step, and what the first one runs is cold
STEP_PAGE = 1 << 20
STEP_TOKEN = 32 << 10  # bytes of K, and of V: 64 heads of 128 in float32; 32 tokens a page
WINDOW = 16  # tokens that a step's attention reads, so that the step is short


@dataclass
class Layer:
    """K and V, one token a step; `add` is what differs."""

    add: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = self.add(k, v)
        recent = (x[:, -WINDOW:].transpose(1, 2) for x in (keys, values))
        scaled_dot_product_attention(q, *recent)


def growing(pool: vtensor.Pool, capacity: int) -> Layer:
    shape = (1, 0, STEP_TOKEN // 4 // HEAD_DIM, HEAD_DIM)
    keys, values = (
        vtensor.empty(*shape, grow_dim=1, capacity=capacity, dtype=torch.float32, pool=pool) for _ in range(2)
    )
    return Layer(lambda k, v: (keys.append(k), values.append(v)))


def preallocated(capacity: int) -> Layer:
    keys, values = (torch.zeros(1, capacity, STEP_TOKEN // 4 // HEAD_DIM, HEAD_DIM) for _ in range(2))
    length = 0

    def add(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal length
        keys[:, length].copy_(k[:, 0])
        values[:, length].copy_(v[:, 0])
        length += 1
        return keys[:, :length], values[:, :length]

    return Layer(add)


def crossing_steps(settings: Settings) -> list[Figure]:
    """Of a decode loop, the steps that cross a page: with a mapper, and without one."""
    mapper, calls = crossings(settings, None)
    synchronous, _ = crossings(settings, 0)

    def tail(name: str) -> Spread:
        ratio = quantile(sorted(mapper[name]), 0.99) / quantile(sorted(mapper["preallocated"]), 0.99)
        return Spread(ratio, ratio, ratio)

    def compared(name: str, taken: dict[str, list[float]], bar: Bar) -> Figure:
        return slowdown.among(taken, name, "preallocated", "growing", "preallocated", "control", bar)

    limit = Bar(1.1)
    what, steps = "decode step that crosses a page", settings.pick(*STEPS) * settings.pick(*ROUNDS)
    return [
        compared(f"{what}, mapper", mapper, limit),
        Figure(f"{what}, mapper, p99", "preallocated, p99", "x", tail("growing"), tail("control"), limit),
        compared(f"{what}, prefetch=0", synchronous, Bar(5, at_least=True)),
        # Not a count to gate: a mapper that gets no processor for long enough is overtaken.
        count(f"{steps:,} decode steps", "driver calls of the caller", calls, "calls", Bar(0), counted=False),
    ]


def crossings(settings: Settings, ahead: int | None) -> tuple[dict[str, list[float]], int]:
    """Seconds of the steps that cross, of caches that go through the same steps in turn, and the driver calls
    that the growing one's caller made once it was under way. One pool at a time: what another populates
    would take the memory's time from the mapper."""
    steps = settings.pick(*STEPS)
    per_page = STEP_PAGE // STEP_TOKEN
    heads = STEP_TOKEN // 4 // HEAD_DIM
    k, v = (torch.randn(1, 1, heads, HEAD_DIM) for _ in range(2))
    q = torch.randn(1, heads, 1, HEAD_DIM)
    work = torch.randn(512, 1024), torch.randn(1024)  # what a layer does besides, in part
    taken: dict[str, list[float]] = {"growing": [], "preallocated": [], "control": []}
    calls = 0
    for _ in range(settings.pick(*ROUNDS)):
        pool = vtensor.Pool("cpu", page_size=STEP_PAGE, prefetch=ahead)
        caches = {"growing": [growing(pool, steps) for _ in range(LAYERS)]}
        caches |= {name: [preallocated(steps) for _ in range(LAYERS)] for name in ("preallocated", "control")}

        def step(layers: list[Layer]) -> None:
            for layer in layers:
                torch.mv(*work)
                layer.step(q, k, v)

        samples: dict[str, Sample] = {
            name: lambda layers=layers: clock(lambda: step(layers)) for name, layers in caches.items()
        }
        interleave(samples, 2 * per_page, warmup=0)
        before = caller_calls(pool)
        # The first steps of a run are slower than others, and the very first crosses.
        each = interleave(samples, steps - 3 * per_page, warmup=per_page)
        calls += caller_calls(pool) - before
        for name, seconds in each.items():
            taken[name] += seconds[::per_page]
        del caches, samples
        pool.close()
    return taken, calls


# --- extend over ready pages


PAUSE = 0.0002  # before each call: a token takes longer, but a processor's caches forget as much in less
STOLEN = 50e-6  # a call that took so long was interrupted by the host of this virtual machine
PAGE_TOKENS = 32  # of 8 heads of 128 in bfloat16 in a page of 64 KiB


def ready_pages(settings: Settings) -> list[Figure]:
    """``extend(1)`` of a tensor that crosses pages, beside one that stays inside a page.

    The pages are ready before, and calls follow one another at once; then with a pause before each, which
    leaves code that runs once in a page colder than what runs in every call; then the mapper makes the pages
    ready meanwhile, woken by some of the calls.
    """
    pages, window = settings.pick(320, 8), settings.pick(16, 2)
    crossing, whole, calls = extends(pages, window, prepared=True, pause=0)
    cold_crossing, cold, cold_calls = extends(pages, window, prepared=True, pause=PAUSE)
    _, woken, woken_calls = extends(pages, window, prepared=False, pause=PAUSE)

    def compared(name: str, samples: list[tuple[float, float]], bar: Bar | None = None) -> Figure:
        ours, inside = zip(*samples, strict=True)
        return slowdown(name, "inside a page", ours, inside, None, bar)

    mean = f"extend(1), mean over pages of {PAGE_TOKENS} tokens"
    return [
        compared("extend(1) into a ready page", crossing, Bar(3)),
        compared(f"{mean} that are ready", whole, Bar(1.05)),
        compared("extend(1) into a ready page, after pauses", cold_crossing),
        compared(f"{mean} that are ready, after pauses", cold),
        compared(f"{mean}, waking the mapper for them, after pauses", woken),
        count("extend(1)", "driver calls of the caller", calls + cold_calls + woken_calls, "calls", Bar(0)),
    ]


def extends(
    pages: int, window: int, *, prepared: bool, pause: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]], int]:
    """Seconds of extends that cross, of the mean over each `window` pages, and the crossing caller's calls.

    Each beside the same call of a tensor that stays inside a page.
    """
    pools = [vtensor.Pool("cpu", page_size=size) for size in (64 << 10, 64 << 20)]
    tensors = [growing_tensor((pages + 2) * PAGE_TOKENS, pool) for pool in pools]

    def timed(t: vtensor.VTensor) -> float:
        if pause:
            keep_awake(pause)
        return clock(lambda: t.extend(1))

    def beside() -> tuple[float, float]:
        crossing, inside = tensors
        return timed(crossing), timed(inside)

    for _ in range(2 * PAGE_TOKENS):
        beside()
    if prepared:
        tensors[0].prepare(pages * PAGE_TOKENS)
    for pool in pools:
        pool.wait_idle()
    before = caller_calls(pools[0])
    crossing: list[tuple[float, float]] = []
    whole: list[tuple[float, float]] = []
    for _ in range(pages // window):
        calls = [beside() for _ in range(window * PAGE_TOKENS)]
        crossing += calls[::PAGE_TOKENS]
        undisturbed = [both for both in calls if max(both) < STOLEN] or calls
        ours, inside = zip(*undisturbed, strict=True)
        whole.append((fmean(ours), fmean(inside)))
    calls_made = caller_calls(pools[0]) - before
    for t, pool in zip(tensors, pools, strict=True):
        t.close()
        pool.close()
    return crossing, whole, calls_made


# --- many tensors in one request


def many_tensors(settings: Settings) -> list[Figure]:
    """``prepare`` for 64 tensors: the mapper's time for it, against the same calls in a C loop."""
    tensors, page = 64, 64 << 10
    bare = load_bare_mmap(populate=True)
    pool = vtensor.Pool("cpu", page_size=page, cache=0)
    made = [
        vtensor.empty(0, page, grow_dim=0, capacity=64, dtype=torch.uint8, pool=pool) for _ in range(tensors)
    ]
    for t in made:
        t.extend(1)

    def mapper() -> float:
        with vtensor.trace.record() as recording:
            for t in made:
                t.prepare(1)
            pool.wait_idle()
        events = [e for e in recording.events() if e.role == "mapper" and e.what == "driver_call"]
        for t in made:
            t.truncate(1)
        pool.wait_idle()
        return (max(e.time_ns + e.duration_ns for e in events) - min(e.time_ns for e in events)) / 1e9

    def calls() -> float:
        return bare(tensors, page, 64 * page)

    each = interleave({"mapper": mapper, "bare": calls, "control": calls}, settings.pick(100, 5))
    for t in made:
        t.close()
    pool.close()
    what = "a batch for 64 tensors, in the mapper"
    return [slowdown.among(each, what, "C loop", "mapper", "bare", "control", Bar(1.1))]

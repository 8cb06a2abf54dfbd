"""``extend(1)``, against the cheapest call that changes a tensor's size from Python: ``as_strided_``."""

from __future__ import annotations

from collections.abc import Callable

import torch

import vtensor

from .harness import Bar, Figure, Settings, clock, count, interleave, slowdown

HEADS, HEAD_DIM = 8, 128
TOKEN_BYTES = HEADS * HEAD_DIM * 4


def run(settings: Settings) -> list[Figure]:
    return [*inside_a_page(settings), *across_pages(settings)]


def tensor(length: int, capacity: int, pool: vtensor.Pool) -> vtensor.VTensor:
    sizes = (1, length, HEADS, HEAD_DIM)
    return vtensor.empty(*sizes, grow_dim=1, capacity=capacity, dtype=torch.float32, pool=pool)


def as_strided_loop(t: torch.Tensor, times: int, wait: Callable[[], None]) -> float:
    """Seconds of one call with arguments made beforehand, which is less than growing in truth takes."""
    size, stride = (1, 100, HEADS, HEAD_DIM), (TOKEN_BYTES // 4 * 100, TOKEN_BYTES // 4, HEAD_DIM, 1)

    def loop() -> None:
        for _ in range(times):
            t.as_strided_(size, stride)

    return clock(loop, wait) / times


def extend_loop(t: vtensor.VTensor, start: int, by: int, times: int, wait: Callable[[], None]) -> float:
    """Seconds of one ``extend(by)``, from `start` tokens on, and back to `start`."""

    def loop() -> None:
        for _ in range(times):
            t.extend(by)

    seconds = clock(loop, wait) / times
    t.truncate(start)
    return seconds


def inside_a_page(settings: Settings) -> list[Figure]:
    times = settings.pick(400, 50)
    pool = vtensor.Pool(settings.device, page_size=2 << 20)  # 512 tokens
    t = tensor(1, 512, pool)
    plain, second = (torch.zeros(1, 512, HEADS, HEAD_DIM, device=settings.device) for _ in range(2))
    before = pool.stats().driver_calls["caller"]
    taken = interleave(
        {
            "extend": lambda: extend_loop(t, 1, 1, times, settings.wait),
            "as_strided_": lambda: as_strided_loop(plain, times, settings.wait),
            "control": lambda: as_strided_loop(second, times, settings.wait),
        },
        settings.pick(200, 3),
    )
    made = sum(pool.stats().driver_calls["caller"].values()) - sum(before.values())
    t.close()
    pool.close()
    what = "extend(1) inside a mapped page"
    return [
        slowdown.among(taken, what, "as_strided_", "extend", "as_strided_", "control", Bar(2.0)),
        count(what, "driver calls", made, "calls", Bar(0)),
    ]


def across_pages(settings: Settings) -> list[Figure]:
    """Every call needs one more page: of a row that never grew before, and over pages it had already."""
    times = settings.pick(200, 20)
    plain, second = (torch.zeros(1, 512, HEADS, HEAD_DIM, device=settings.device) for _ in range(2))
    pool = vtensor.Pool(settings.device, page_size=2 << 20 if settings.device == "cuda" else 64 << 10)
    page = pool.page_size // TOKEN_BYTES
    kept = tensor(0, times * page, pool)
    kept.extend(times * page).truncate(0)
    before = pool.stats().driver_calls["caller"]
    extend_loop(kept, 0, page, times, settings.wait)
    made = {name: n - before.get(name, 0) for name, n in pool.stats().driver_calls["caller"].items()}

    def fresh() -> float:
        t = tensor(0, times * page, pool)
        seconds = extend_loop(t, 0, page, times, settings.wait)
        t.close()
        pool.trim()
        return seconds

    taken = interleave(
        {
            "fresh": fresh,
            "kept": lambda: extend_loop(kept, 0, page, times, settings.wait),
            "as_strided_": lambda: as_strided_loop(plain, times, settings.wait),
            "control": lambda: as_strided_loop(second, times, settings.wait),
        },
        settings.pick(50, 3),
    )
    kept.close()
    pool.close()
    figures = [
        slowdown.among(taken, f"extend by one {state} page", "as_strided_", state, "as_strided_", "control")
        for state in ("fresh", "kept")
    ]
    if settings.device == "cpu":
        figures.append(count("extend by one page", "mmap calls", made["mmap"] / times, "calls", Bar(1)))
    return figures

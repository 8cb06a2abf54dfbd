"""Mapping many host pages in one ``extend``, against a bare C loop that makes the same ``mmap`` calls."""

from __future__ import annotations

from pathlib import Path

import torch

import vtensor

from .harness import Bar, Comparison, Figure, Settings, Skipped, clock, count, excess, interleave, slowdown
from .native import load_bare_mmap

PAGE_SIZE = 64 << 10
PAGES = 1000
ROW_PAGES = 4  # of address range, in the scattered case


def run(settings: Settings) -> list[Figure]:
    if settings.device != "cpu":
        raise Skipped("maps host pages")
    size, microseconds = PAGES * PAGE_SIZE, Bar(20)
    adjacent = (1, PAGES, PAGES), (1, size, size)
    # 1,000 rows that grow by one page each: as many mappings, none of which can merge.
    scattered = (PAGES, 1, ROW_PAGES), (PAGES, PAGE_SIZE, ROW_PAGES * PAGE_SIZE)
    return [
        *growths(settings, "1,000 adjacent pages", *adjacent, excess, microseconds),
        *growths(settings, "1,000 scattered pages", *scattered, slowdown, Bar(1.15)),
        *growing_in_order(settings),
    ]


def pages_of(rows: int, capacity: int, pool: vtensor.Pool) -> vtensor.VTensor:
    """A tensor each of whose positions is one page of a row."""
    return vtensor.empty(rows, 0, PAGE_SIZE, grow_dim=1, capacity=capacity, dtype=torch.uint8, pool=pool)


def first_growth(rows: int, pages: int, capacity: int) -> tuple[float, int]:
    """Seconds and mmap calls of the first ``extend``, by `pages` pages a row, in a pool of its own."""
    pool = vtensor.Pool("cpu", page_size=PAGE_SIZE, prefetch=0)
    t = pages_of(rows, capacity, pool)
    before = pool.stats().driver_calls["caller"].get("mmap", 0)
    seconds = clock(lambda: t.extend(pages))
    made = pool.stats().driver_calls["caller"]["mmap"] - before
    t.close()
    pool.close()
    return seconds, made


def later_growth(t: vtensor.VTensor, pages: int) -> float:
    """Seconds of an ``extend`` over pages that the tensor had before and gave back."""
    seconds = clock(lambda: t.extend(pages))
    t.truncate(0)
    return seconds


def growths(
    settings: Settings,
    what: str,
    shape: tuple[int, int, int],
    bare: tuple[int, int, int],
    figure: Comparison,
    bar: Bar,
) -> list[Figure]:
    """Of rows that grow by so many pages each, with so many pages of addresses, beside the bare calls."""
    loop, against = load_bare_mmap(), "one mmap" if bare[0] == 1 else "C loop"
    rows, pages, capacity = shape
    pool = vtensor.Pool("cpu", page_size=PAGE_SIZE, prefetch=0)
    t = pages_of(rows, capacity, pool)
    later_growth(t, pages)
    taken = interleave(
        {
            "first": lambda: first_growth(*shape)[0],
            "later": lambda: later_growth(t, pages),
            "bare": lambda: loop(*bare),
            "control": lambda: loop(*bare),
        },
        settings.pick(100 if rows > 1 else 200, 5),
    )
    t.close()
    pool.close()
    return [
        figure.among(taken, f"{what}, first growth", against, "first", "bare", "control", bar),
        figure.among(taken, f"{what}, again", against, "later", "bare", "control", bar),
        count(what, "mmap calls", first_growth(*shape)[1], "calls", Bar(bare[0])),
    ]


def kernel_mappings(t: vtensor.VTensor) -> int:
    """Writable kernel mappings inside the tensor's address range."""
    end = t.address + t.nbytes_reserved
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, permissions = line.split()[:2]
        first, last = (int(part, 16) for part in extent.split("-"))
        found += first < end and t.address < last and permissions.startswith("rw")
    return found


def growing_in_order(settings: Settings) -> list[Figure]:
    """Tensors that take pages in turn, as the layers of a model do."""
    layers, rows, pages = 8, 4, settings.pick(100, 20)
    pool = vtensor.Pool("cpu", page_size=PAGE_SIZE, prefetch=0)
    tensors = [pages_of(rows, pages + 1, pool) for _ in range(layers)]
    for _ in range(pages):
        for t in tensors:
            t.extend(1)
    most = max(kernel_mappings(t) for t in tensors) / rows
    pool.close()
    return [count("a row that grows in order, beside others", "kernel mappings", most, "a row", Bar(1))]

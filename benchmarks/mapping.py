"""Mapping many host pages in one ``extend``, against a bare C loop that makes the same ``mmap`` calls."""

from __future__ import annotations

from pathlib import Path

import torch

import vtensor

from .harness import Bar, Figure, Settings, Skipped, clock, count, excess, interleave, slowdown
from .native import load_bare_mmap

PAGE_SIZE = 64 << 10
PAGES = 1000
ROW_PAGES = 4  # of address range, in the scattered case


def run(settings: Settings) -> list[Figure]:
    if settings.device != "cpu":
        raise Skipped("maps host pages")
    return [*adjacent(settings), *scattered(settings), *growing_in_order(settings)]


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


def adjacent(settings: Settings) -> list[Figure]:
    bare = load_bare_mmap()
    pool = vtensor.Pool("cpu", page_size=PAGE_SIZE, prefetch=0)
    t = pages_of(1, PAGES, pool)
    later_growth(t, PAGES)
    size = PAGES * PAGE_SIZE
    taken = interleave(
        {
            "first": lambda: first_growth(1, PAGES, PAGES)[0],
            "later": lambda: later_growth(t, PAGES),
            "bare": lambda: bare(1, size, size),
            "control": lambda: bare(1, size, size),
        },
        settings.pick(200, 5),
    )
    t.close()
    pool.close()
    bar = Bar(20)  # microseconds
    return [
        excess(
            "1,000 adjacent pages, first growth",
            "one mmap",
            taken["first"],
            taken["bare"],
            taken["control"],
            bar,
        ),
        excess(
            "1,000 adjacent pages, again", "one mmap", taken["later"], taken["bare"], taken["control"], bar
        ),
        count("1,000 adjacent pages", "mmap calls", first_growth(1, PAGES, PAGES)[1], "calls", Bar(1)),
    ]


def scattered(settings: Settings) -> list[Figure]:
    """1,000 rows that grow by one page each: as many mappings, none of which can merge."""
    bare = load_bare_mmap()
    pool = vtensor.Pool("cpu", page_size=PAGE_SIZE, prefetch=0)
    t = pages_of(PAGES, ROW_PAGES, pool)
    later_growth(t, 1)
    stride = ROW_PAGES * PAGE_SIZE
    taken = interleave(
        {
            "first": lambda: first_growth(PAGES, 1, ROW_PAGES)[0],
            "later": lambda: later_growth(t, 1),
            "bare": lambda: bare(PAGES, PAGE_SIZE, stride),
            "control": lambda: bare(PAGES, PAGE_SIZE, stride),
        },
        settings.pick(100, 5),
    )
    t.close()
    pool.close()
    bar = Bar(1.15)
    made = first_growth(PAGES, 1, ROW_PAGES)[1]
    return [
        slowdown(
            "1,000 scattered pages, first growth",
            "C loop",
            taken["first"],
            taken["bare"],
            taken["control"],
            bar,
        ),
        slowdown(
            "1,000 scattered pages, again", "C loop", taken["later"], taken["bare"], taken["control"], bar
        ),
        count("1,000 scattered pages", "mmap calls", made, "calls", Bar(PAGES)),
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

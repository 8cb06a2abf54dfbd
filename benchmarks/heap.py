"""The allocator for torch: a freed size asked for again, and 512 MiB stitched from scattered pages, against
the bare calls that do the same."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import vtensor
from vtensor import _core
from vtensor._torch.memory import entered

from .harness import Bar, Figure, Settings, Skipped, Spread, interleave, slowdown
from .native import load_heap

MIB = 1 << 20
PAGE = 2 * MIB  # as on CUDA


def run(settings: Settings) -> list[Figure]:
    if settings.device != "cpu":
        raise Skipped("stitches pages of the host")
    return [*freed_again(settings), stitching(settings)]


def _exported() -> tuple[int, int]:
    """The C functions that torch calls."""
    library = ctypes.CDLL(_core.__file__)
    names = ("vtensor_allocate", "vtensor_free")
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    return found[0] or 0, found[1] or 0


@contextmanager
def _heap(budget: int) -> Iterator[vtensor.Pool]:
    pool = vtensor.Pool("cpu", page_size=PAGE, budget=budget, cache=budget)
    try:
        with entered(pool._heap("benchmark", "memory")):
            yield pool
    finally:
        pool.close()


def freed_again(settings: Settings) -> list[Figure]:
    native, (allocate, free) = load_heap(), _exported()
    sizes = {"1 KiB": 1024, "2 MiB": PAGE, "20 MiB": 20 * MIB, "512 MiB": 512 * MIB}
    rounds = settings.pick(500, 20)
    with _heap(1024 * MIB):
        samples = {
            name: lambda nbytes=nbytes: native.allocate_and_free(allocate, free, nbytes, rounds)
            for name, nbytes in sizes.items()
        }
        taken = interleave(samples, settings.pick(30, 3))
    return [
        Figure(
            f"allocate and free {name}, freed before", "none", "us", Spread.of(times).scaled(1e6), bar=Bar(2)
        )
        for name, times in taken.items()
    ]


def stitching(settings: Settings) -> Figure:
    """Half of the budget in every second of its pages, asked for at once."""
    native, (allocate, _) = load_heap(), _exported()
    pages = settings.pick(256, 8)
    end = ctypes.CDLL(_core.__file__).vtensor_free
    end.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

    def one(nbytes: int) -> tuple[float, int]:
        at = ctypes.c_void_p()
        seconds = native.allocate_once(allocate, nbytes, ctypes.byref(at))
        if at.value is None:
            raise MemoryError(_core.take_heap_refusal())
        return seconds, at.value

    def ours() -> float:
        with _heap(2 * pages * PAGE) as pool:
            made = [one(PAGE)[1] for _ in range(2 * pages)]
            for address in made[::2]:
                end(address, PAGE, 0, None)
            pool.wait_idle()
            seconds, whole = one(pages * PAGE)
            for address in [whole, *made[1::2]]:
                end(address, 0, 0, None)
            return seconds

    def bare() -> float:
        return native.bare_stitch(pages, PAGE)

    taken = interleave({"ours": ours, "bare": bare, "control": bare}, settings.pick(7, 2))
    name = f"{pages * PAGE // MIB} MiB from scattered pages"
    return slowdown.among(taken, name, "C loop", "ours", "bare", "control", Bar(1.15))

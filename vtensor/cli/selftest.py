"""The self-test: grows, shares and frees real memory of a device, and checks vtensor's invariants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import vtensor
from vtensor import testing

_PAGES = 16
_NAMES = ("reserve", "grow", "share", "free")


@dataclass(frozen=True)
class Step:
    """One step of the self-test."""

    name: str
    ok: bool
    detail: str
    milliseconds: float


def self_test(pool: vtensor.Pool) -> list[Step]:
    """Runs the steps on a pool of at least 32 free pages. Stops at the first step that fails."""
    steps: list[Step] = []
    test = _steps(pool)
    while True:
        start = time.perf_counter()
        try:
            detail = next(test)
        except StopIteration:
            return steps
        except (AssertionError, vtensor.VTensorError, RuntimeError) as error:
            steps.append(Step(_NAMES[len(steps)], False, str(error), _since(start)))
            return steps
        steps.append(Step(_NAMES[len(steps)], True, detail, _since(start)))


def _since(start: float) -> float:
    return round(1e3 * (time.perf_counter() - start), 3)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _steps(pool: vtensor.Pool) -> Iterator[str]:
    """Yields a description of each step that passed. Raises if a check fails."""
    page = pool.page_size
    t = vtensor.empty(0, page, grow_dim=0, capacity=1024, dtype=torch.uint8, pool=pool)
    mapped = pool.stats().pages_mapped
    _require(mapped == 0, f"an empty tensor has {mapped} pages mapped")
    yield f"{t.nbytes_reserved:,} bytes of addresses, no memory"

    address = t.address
    for number in range(_PAGES):
        t.append(torch.full((1, page), number, dtype=torch.uint8, device=t.device))
    expected = torch.arange(_PAGES, dtype=torch.uint8, device=t.device)
    _require(t.address == address == t.data_ptr(), "the address changed while the tensor grew (I1)")
    _require(bool((t == expected[:, None]).all()), "what was written changed while the tensor grew (I2)")
    yield f"{_PAGES} pages of {page:,} bytes at one address, nothing copied"

    child = t.fork()
    used = pool.stats().pages_used
    _require(used == _PAGES, f"a fork took {used - _PAGES} pages")
    child.unshare(0, 1)  # on CUDA, a write through a view such as child[:1] copies no page
    child[:1].fill_(255)
    _require(bool((t[0] == 0).all()), "a write through a fork is seen through its parent (I6)")
    taken = pool.stats().pages_used - used
    _require(bool((child[0] == 255).all()) and taken == 1, f"one page was written to, {taken} were taken")
    testing.check_invariants(pool)
    yield "a fork took no page, and a write to one of its pages took one"

    t.shrink(_PAGES // 2)
    t.extend(_PAGES // 2)
    t.close()
    child.close()
    pool.wait_idle()
    pool.trim()
    stats = pool.stats()
    left = (stats.pages_used, stats.pages_mapped, stats.nbytes_reserved, stats.tensors)
    _require(left == (0, 0, 0, 0), f"pages used and mapped, bytes reserved and tensors that are left: {left}")
    yield "no page, mapping or address is left"

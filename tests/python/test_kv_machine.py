"""The random programs of vtensor.testing over a KVCache of every shape, on the host and on the simulated
libcuda, and beside a mapper that looks ahead."""

from __future__ import annotations

import pytest
from hypothesis import settings

import vtensor
from kv_support import PAGE, SHAPES, options_of
from support import open_pool, simcuda_library
from vtensor.testing.cache_machine import BUDGET_PAGES, CacheMachine


class Machine(CacheMachine):
    """On the drivers that the tests name."""

    kind = "host"
    ahead = 0  # bytes

    def open_pool(self) -> vtensor.Pool:
        return open_pool(self.kind, BUDGET_PAGES, page_size=PAGE, ahead=self.ahead)


def case(kind: str, shape: str, ahead: int = 0, **options):
    name = "".join(word.title() for word in f"{kind} {shape} {'mapper' if ahead else ''}".split())
    fixed = {"kind": kind, "ahead": ahead, "looks_ahead": ahead > 0, "options": options_of(shape, **options)}
    test = type(name, (Machine,), fixed).TestCase
    test.settings = settings(max_examples=12, stateful_step_count=40)
    return pytest.mark.skipif(
        kind == "simcuda" and simcuda_library() is None, reason="libsimcuda.so is not built"
    )(test)


for _kind in ("host", "simcuda"):
    for _shape in SHAPES:
        globals()[f"Test{_kind}{_shape}".replace(" ", "_")] = case(_kind, _shape)
    for _shape in ("sliced", "tiles"):
        globals()[f"Test{_kind}{_shape}mapper"] = case(_kind, _shape, ahead=8 * PAGE, lookahead=20)

"""The random programs of vtensor.testing over a KVCache of every shape, on the host and on the simulated
libcuda, and beside a mapper that looks ahead."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import vtensor
from kv_support import PAGE, SHAPES, options_of
from machines import case
from support import draws, open_pool
from vtensor.testing.cache_machine import BUDGET_PAGES, CacheMachine


class Machine(CacheMachine):
    """On the drivers that the tests name."""

    kind = "host"
    prefetch = 0  # bytes

    def open_pool(self) -> vtensor.Pool:
        return open_pool(self.kind, BUDGET_PAGES, page_size=PAGE, prefetch=self.prefetch)


def machine(kind: str, shape: str, prefetch: int = 0, **options) -> type[Machine]:
    name = "".join(word.title() for word in f"{kind} {shape} {'mapper' if prefetch else ''}".split())
    fixed = {
        "kind": kind,
        "prefetch": prefetch,
        "looks_ahead": prefetch > 0,
        "options": options_of(shape, **options),
    }
    return type(name, (Machine,), fixed)


for _kind in ("host", "simcuda"):
    for _shape in SHAPES:
        globals()[f"Test{_kind}{_shape}".replace(" ", "_")] = case(machine(_kind, _shape), 12, 40)
    for _shape in ("sliced", "tiles"):
        _looking = machine(_kind, _shape, prefetch=8 * PAGE, lookahead=20)
        globals()[f"Test{_kind}{_shape}mapper"] = case(_looking, 12, 40)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", ["sliced", "tiles"])
def test_the_same_draws_make_the_same_requests(kind, shape):
    """Whatever the mapper has done by then: Hypothesis draws by what there is, and draws the same twice."""
    histories = []
    for _ in range(2):
        history = []

        class Recorded(machine(kind, shape, prefetch=8 * PAGE, lookahead=20)):
            def check(self, history=history):
                super().check()
                history.append([(len(r.values), r.swapped) for r in self.requests.values()])

        same = settings(max_examples=draws(20), stateful_step_count=40, derandomize=True, database=None)
        run_state_machine_as_test(Recorded, settings=same)
        histories.append(history)
    assert histories[0] == histories[1]

"""The random programs of vtensor.testing over a KVCache of every shape, on the host and on the simulated
libcuda, and beside a mapper that looks ahead."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

import vtensor
from kv_support import PAGE, SHAPES, options_of
from machines import case
from stream_support import SimulatedDevice
from support import draws, open_pool
from vtensor.testing.cache_machine import BUDGET_PAGES, CacheMachine
from vtensor.testing.machine import which


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


class StreamMachine(machine("simcuda", "two sizes", prefetch=8 * PAGE, lookahead=20)):
    """Beside kernels that read slots in two streams, and run on while the requests go on (I3). Each stream is
    named by the call after the launch. Contents are compared once the kernels have ended."""

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.device = SimulatedDevice()
        self.streams = [self.device.stream(), self.device.stream()]
        self.drained = True

    def read(self, slot: int, index: int) -> int:
        """Launches the kernels of all layers over the slot's tokens, behind one that takes a moment."""
        stream = self.streams[index % 2]
        if slot in self.deferred:
            self.wait_for_prefix(sorted(self.deferred).index(slot), None)
        self.drained = False
        self.device.occupy(stream, 5)
        for states in (x for layer in range(len(self.cache)) for x in self.cache[layer]):
            self.device.kernel(stream, states[slot, : len(self.requests[slot].values)])
        return stream

    @precondition(lambda self: self.in_use())
    @rule(index=which, stream=which, percent=st.sampled_from([0, 50, 100]), call=st.integers(0, 2))
    def read_and_go_on(self, index: int, stream: int, percent: int, call: int) -> None:
        slot = self.slot(index)
        read = self.read(slot, stream)
        if call == 0:
            self.cache.record_stream(read)
        elif call == 1:
            self.free(list(self.requests).index(slot), read)
        else:
            self.truncate(index, percent, read)

    @precondition(lambda self: len(self.in_use()) >= 2)
    @rule(picks=st.lists(which, min_size=2, max_size=4), stream=which)
    def read_and_reorder(self, picks: list[int], stream: int) -> None:
        (read,) = {self.read(slot, stream) for slot in self.in_use()[: len(picks)]}
        self.reorder(picks, read)

    @rule()
    def drain(self) -> None:
        for slot in set(self.in_use()) - self.deferred:
            self.cache.wait(slot)
        until = time.monotonic() + 20
        while any(self.device.pending(stream) for stream in (0, *self.streams)):
            assert time.monotonic() < until
            time.sleep(0.0003)
        self.drained = True
        assert self.device.illegal_accesses() == 0

    def check(self) -> None:
        if self.drained:
            super().check()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "device"):
            assert self.device.end() == 0


TestStreams = case(StreamMachine, 40, 40)
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

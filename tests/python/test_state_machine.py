"""The random programs of vtensor.testing, on the host and on the simulated libcuda (I1 to I9, I14)."""

from __future__ import annotations

import pytest
from hypothesis import settings

import vtensor
from support import draws, open_pool, simcuda_library
from vtensor.testing.machine import BUDGET_PAGES, PAGE_SIZES, TensorMachine


class Machine(TensorMachine):
    """On the drivers that the tests name."""

    kind = "host"

    def open_pools(self) -> list[vtensor.Pool]:
        return [open_pool(self.kind, BUDGET_PAGES, page_size=size) for size in PAGE_SIZES]


class CudaMachine(Machine):
    kind = "simcuda"


def case(machine):
    found = machine.TestCase
    found.settings = settings(max_examples=draws(settings.default.max_examples))
    # With look-ahead its draws would hang on time; test_mapper_machine.py has that.
    found.pytestmark = [pytest.mark.seconds(300), pytest.mark.thorough, pytest.mark.exact]
    return found


TestHost = case(Machine)
TestSimulatedCuda = pytest.mark.skipif(
    simcuda_library() is None, reason="libsimcuda.so is not built (set VTENSOR_SIMCUDA to its path)"
)(case(CudaMachine))

"""The random programs of vtensor.testing, on the host and on the simulated libcuda (I1 to I9, I14)."""

from __future__ import annotations

import pytest

import vtensor
from cuda_support import assert_mapped_as_told
from machines import case
from support import open_pool
from vtensor.testing.machine import BUDGET_PAGES, PAGE_SIZES, TensorMachine


class Machine(TensorMachine):
    """On the drivers that the tests name."""

    kind = "host"

    def open_pools(self) -> list[vtensor.Pool]:
        return [open_pool(self.kind, BUDGET_PAGES, page_size=size) for size in PAGE_SIZES]


class CudaMachine(Machine):
    kind = "simcuda"

    def check(self) -> None:
        super().check()
        for t in getattr(self, "tensors", ()):
            assert_mapped_as_told(t.actual)


# With look-ahead its draws would hang on time; test_mapper_machine.py has that.
TestHost = case(Machine, None, None, pytest.mark.exact, seconds=300)
TestSimulatedCuda = case(CudaMachine, None, None, pytest.mark.exact, seconds=300)

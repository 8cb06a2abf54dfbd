from __future__ import annotations

import os
from itertools import count

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import precondition, rule
from your_project import History

import vtensor
from vtensor import testing
from vtensor.testing.machine import TensorMachine, which

PAGE = 4096


@pytest.fixture
def pool():
    with testing.host_pool(page_size=PAGE, budget=64 * PAGE) as pool:
        yield pool


def test_keeps_the_newest(pool) -> None:
    history = History(width=8, window=100, pool=pool)
    for step in range(50):
        history.add(torch.full((7, 8), float(step)))
    assert history.states.length == 100 and history.states[-1, 0] == 49
    assert torch.equal(history.mean(), torch.stack(list(history.states)).mean(dim=0))
    history.close()


def test_refused_memory_changes_nothing(pool) -> None:
    for n in count():
        history = History(width=256, window=8, pool=pool)
        history.add(torch.ones(4, 256))
        with testing.fail_after(pool, n) as refusals:
            try:
                history.add(torch.zeros(8, 256))
            except vtensor.DriverError:
                assert history.states.length == 4 and history.mean()[0] == 1
        history.close()
        if not refusals:
            break
    assert n > 0


class WithMean(TensorMachine):
    """Random programs over tensors; yours is one of the operations."""

    @precondition(lambda self: self.tensors)
    @rule(index=which)
    def takes_the_mean(self, index) -> None:
        tensor = self.tensor(index)
        if tensor.dtype is torch.int64:
            assert (
                torch.equal(tensor.actual.double().mean(), tensor.expected().double().mean())
                or not tensor.actual.numel()
            )


TestWithMean = WithMean.TestCase
TestWithMean.settings = settings(max_examples=10, stateful_step_count=15, deadline=None)


@pytest.mark.skipif("VTENSOR_SIMCUDA" not in os.environ, reason="VTENSOR_SIMCUDA names no simulated libcuda")
def test_on_the_cuda_path() -> None:
    with testing.simulated_cuda_pool() as pool:
        history = History(width=8, window=100, pool=pool)
        history.add(torch.ones(7, 8))
        assert history.mean()[0] == 1
        history.close()

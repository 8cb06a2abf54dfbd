"""Pools on a real GPU, and over the simulated libcuda: each test is skipped, with the reason, where what it
runs on is not there."""

from __future__ import annotations

import gc

import pytest

from devices import DEVICES, PAGE
from vtensor import testing


@pytest.fixture(params=DEVICES)
def device(request):
    """The GPU, and the simulated device."""
    device = DEVICES[request.param]()
    yield device
    device.end()


@pytest.fixture
def pool(device):
    """256 pages of 2 MiB; at the end empty (I14), sound (I5) and closed."""
    pool = device.pool(page_size=PAGE, budget=256 * PAGE)
    yield pool
    gc.collect()
    pool.wait_idle()
    testing.check_invariants(pool)
    stats = pool.stats()
    pool.close()
    assert (stats.pages_used, stats.pages_mapped) == (0, 0)


@pytest.fixture
def bindings(device):
    """The driver's own view of what it was asked for."""
    return device.bindings()

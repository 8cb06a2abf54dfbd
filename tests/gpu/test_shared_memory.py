"""Another process reads what is on the device, while it grows."""

from __future__ import annotations

import os

import pytest
import torch

import vtensor
from devices import PAGE
from reader_process import Helper
from support import simcuda_library
from vtensor import sharing


class Reader(Helper):
    patience = 120  # seconds; a process makes a CUDA context


def read(library: str):
    """Answers each message with what the reader shows: its length, and the sum of all bytes."""
    os.environ["SIMCUDA_GRANULARITY"] = str(PAGE)
    sharing.cuda_library = library
    reader = None

    def show(message):
        nonlocal reader
        if isinstance(message, vtensor.VTensor):
            reader = message
        elif message == "close":
            return reader.close()
        return reader.sync(), reader.length, int(reader.sum(dtype=torch.int64))

    return show


@pytest.fixture
def reader(device):
    simulated = device.torch_device.type == "cpu"
    reader = Reader(read, str(simcuda_library()) if simulated else "")
    yield reader
    if reader.process.is_alive():
        reader("close")
    reader.end()
    assert reader.process.exitcode == 0


@pytest.fixture
def shareable(device):
    pool = device.pool(page_size=PAGE, budget=64 * PAGE, shareable=True)
    assert pool.stats().sharing in ("fabric", "descriptors")
    yield pool
    pool.wait_idle()
    pool.close()


def test_a_reader_follows_the_writer(reader, shareable, device):  # I2, I3
    t = vtensor.empty(100, grow_dim=0, capacity=32 * PAGE, dtype=torch.uint8, pool=shareable).fill_(1)
    assert reader(t)[1:] == (100, 100)
    t.append(torch.full((5 * PAGE,), 2, dtype=torch.uint8, device=device.torch_device))
    assert reader("sync") == (True, 100 + 5 * PAGE, 100 + 10 * PAGE)
    assert reader("sync")[0] is False
    t.truncate(PAGE)
    assert reader("sync") == (True, PAGE, 2 * PAGE - 100)
    t.close()
    with pytest.raises(vtensor.Closed):
        reader("sync")


def test_pages_that_a_reader_holds_go_to_nobody(reader, shareable):  # I7
    t = vtensor.empty(4 * PAGE, grow_dim=0, capacity=8 * PAGE, dtype=torch.uint8, pool=shareable).fill_(1)
    assert reader(t)[1:] == (4 * PAGE, 4 * PAGE)
    t.truncate(0)
    shareable.wait_idle()
    assert shareable.stats().pages_held_by_readers == 4
    with pytest.raises(vtensor.OutOfPages):
        vtensor.empty(62 * PAGE, grow_dim=0, capacity=62 * PAGE, dtype=torch.uint8, pool=shareable)
    assert reader("sync") == (True, 0, 0)
    assert shareable.stats().pages_held_by_readers == 0
    vtensor.empty(62 * PAGE, grow_dim=0, capacity=62 * PAGE, dtype=torch.uint8, pool=shareable).close()
    t.close()

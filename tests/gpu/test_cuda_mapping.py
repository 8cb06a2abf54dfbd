"""What the driver itself says of our pages, and what memory the device has. Asked once the device has done
what it was given (`wait_idle`): pages are unmapped behind the work that may use them."""

from __future__ import annotations

import gc

import pytest
import torch

import vtensor
from cuda_support import READ, READ_WRITE
from devices import PAGE


def bytes_tensor(pool, pages: int, capacity: int = 64) -> vtensor.VTensor:
    return vtensor.empty(pages * PAGE, grow_dim=0, capacity=capacity * PAGE, dtype=torch.uint8, pool=pool)


def test_pages_stand_where_pages_says(pool, bindings):
    t = bytes_tensor(pool, 5)
    records = t.pages()
    assert [record.address for record in records] == [t.address + i * PAGE for i in range(5)]
    for record in records:
        assert bindings.is_mapped(record.address) and bindings.is_mapped(record.address + PAGE - 1)
        assert bindings.handle_at(record.address) == record.page_id
        assert bindings.access_at(record.address) == READ_WRITE
    assert not bindings.is_mapped(t.address + 5 * PAGE)
    t.truncate(2 * PAGE)
    pool.wait_idle()
    assert bindings.is_mapped(t.address + PAGE) and not bindings.is_mapped(t.address + 2 * PAGE)
    address = t.address
    t.close()
    pool.wait_idle()
    assert not bindings.is_mapped(address)


def test_shared_pages_are_one_handle_mapped_read_only(pool, bindings):  # I6
    parent = bytes_tensor(pool, 2).fill_(1)
    child = parent.fork()
    assert [r.page_id for r in parent.pages()] == [r.page_id for r in child.pages()]
    for t in (parent, child):
        assert [bindings.handle_at(r.address) for r in t.pages()] == [r.page_id for r in t.pages()]
    access = bindings.access_at(parent.address)
    child.unshare(0, 1)
    assert bindings.access_at(child.address) == READ_WRITE
    assert bindings.handle_at(child.address) != bindings.handle_at(parent.address)
    assert torch.equal(child, parent)
    parent.close()
    child.close()
    if access != READ:
        pytest.xfail(f"this device does not map its memory read-only: access {access}")


@pytest.mark.parametrize("pages", [1, 64])
def test_memory_is_taken_and_returned(pool, device, pages):  # I14
    bytes_tensor(pool, 1).close()  # modules and the scratch page are loaded
    pool.wait_idle()
    pool.trim()
    before = device.free_memory()
    t = bytes_tensor(pool, pages)
    assert before - device.free_memory() >= pages * PAGE
    t.close()
    pool.wait_idle()
    assert before - device.free_memory() >= pages * PAGE  # kept for the next tensor
    assert pool.stats().pages_spare == pages
    pool.trim()
    assert pool.stats().pages_spare == 0
    assert abs(before - device.free_memory()) <= device.others_memory


def test_closing_the_pool_returns_all_memory(device):
    def free_memory_of_a_life() -> int:
        pool = device.pool(page_size=PAGE, budget=128 * PAGE)
        t = bytes_tensor(pool, 60)
        fork = t.fork().add_(1)
        free = device.free_memory()
        del t, fork
        gc.collect()
        pool.close()
        return free

    free_memory_of_a_life()  # what is used first takes device memory when its module is loaded
    before = device.free_memory()
    assert before - free_memory_of_a_life() >= 120 * PAGE
    assert abs(before - device.free_memory()) <= device.others_memory


def test_a_full_device_raises_and_recovers(device):  # I9
    pool = device.pool(page_size=PAGE, budget=512 * PAGE)
    t = bytes_tensor(pool, 4, capacity=128).fill_(5)
    with device.nearly_full(left=32 * PAGE):
        with pytest.raises(vtensor.OutOfPages, match="memory"):
            for _ in range(64):  # CUDA may keep back some that it does not count as free
                t.extend(PAGE)
        length = t.length
        assert length < 68 * PAGE  # what it holds is compared below: a comparison takes device memory too
    t.extend(20 * PAGE)
    assert t.length == length + 20 * PAGE
    assert bool((t[: 4 * PAGE] == 5).all()) and not t[4 * PAGE :].any()
    t.close()
    pool.close()


def test_page_sizes_are_multiples_of_the_granularity(device):
    pool = device.pool(page_size=3 * PAGE, budget=12 * PAGE)  # no power of two
    t = vtensor.zeros(7 * PAGE, grow_dim=0, capacity=12 * PAGE, dtype=torch.uint8, pool=pool)
    assert len(t.pages()) == 3 and not t.any()
    t.close()
    pool.close()
    with pytest.raises(vtensor.InvalidArgument, match=f"page size of {PAGE // 2} bytes"):
        device.pool(page_size=PAGE // 2)


def test_growth_inside_a_page_makes_no_driver_call(pool):  # I15
    t = bytes_tensor(pool, 0).extend(1)
    before = pool.stats().driver_calls["caller"]
    t.extend(PAGE - 1)
    assert pool.stats().driver_calls["caller"] == before
    t.extend(4 * PAGE)
    made = {name: n - before.get(name, 0) for name, n in pool.stats().driver_calls["caller"].items()}
    assert (made["cuMemCreate"], made["cuMemMap"], made["cuMemSetAccess"]) == (4, 4, 1)
    t.close()


@pytest.mark.parametrize("rdma", [False, True])
def test_pages_are_shared_again_after_their_first_owner_went(device, rdma):  # I6
    """Driver 580 refuses that of memory for RDMA that was mapped read-only."""
    pool = device.pool(page_size=PAGE, budget=64 * PAGE, rdma=rdma)
    t = bytes_tensor(pool, 2).fill_(1)
    for value in range(2, 6):
        child = t.fork()
        t.close()
        pool.wait_idle()
        t = child.fill_(value)  # the only owner: its pages become writable where they are
    assert pool.stats().pages_used == 2
    fork = t.fork()
    assert bool((fork.add_(1) == 6).all()) and bool((t == 5).all())
    t.close(), fork.close()
    pool.close()

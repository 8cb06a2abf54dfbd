"""What the real driver says of our pages, asked through cuda-bindings, and what memory the device has."""

from __future__ import annotations

import gc

import pytest
import torch

import vtensor

MIB = 1 << 20
PAGE = 2 * MIB


def asked(answer):
    """The values of a cuda-bindings answer, whose first is the CUresult."""
    code, *rest = answer
    assert code.name == "CUDA_SUCCESS", code
    return rest[0] if rest else None


def is_mapped(driver, address: int) -> bool:
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
    code, value = driver.cuPointerGetAttribute(attribute, address)
    return code.name == "CUDA_SUCCESS" and bool(value)


def handle_at(driver, address: int) -> int:
    handle = asked(driver.cuMemRetainAllocationHandle(address))
    asked(driver.cuMemRelease(handle))
    return int(handle)


def access_at(driver, address: int) -> str:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = torch.cuda.current_device()
    flags = asked(driver.cuMemGetAccess(location, address))
    return driver.CUmemAccess_flags(int(flags)).name


def bytes_tensor(pool, pages: int, **kw) -> vtensor.VTensor:
    return vtensor.empty(pages * PAGE, grow_dim=0, capacity=64 * PAGE, dtype=torch.uint8, pool=pool, **kw)


def free_memory() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_pages_stand_where_pages_says(pool, driver):
    t = bytes_tensor(pool, 5)
    records = t.pages()
    assert [record.address for record in records] == [t.address + i * PAGE for i in range(5)]
    for record in records:
        assert is_mapped(driver, record.address) and is_mapped(driver, record.address + PAGE - 1)
        assert handle_at(driver, record.address) == record.page_id
        assert access_at(driver, record.address).endswith("READWRITE")
    assert not is_mapped(driver, t.address + 5 * PAGE)
    t.truncate(2 * PAGE)
    assert is_mapped(driver, t.address + PAGE) and not is_mapped(driver, t.address + 2 * PAGE)
    address = t.address
    t.close()
    assert not is_mapped(driver, address)


def test_shared_pages_are_one_handle_mapped_read_only(pool, driver):  # I6
    parent = bytes_tensor(pool, 2).fill_(1)
    child = parent.fork()
    assert [r.page_id for r in parent.pages()] == [r.page_id for r in child.pages()]
    for t in (parent, child):
        assert [handle_at(driver, r.address) for r in t.pages()] == [r.page_id for r in t.pages()]
    access = access_at(driver, parent.address)
    child.own(0, 1)
    assert access_at(driver, child.address).endswith("READWRITE")
    assert handle_at(driver, child.address) != handle_at(driver, parent.address)
    assert torch.equal(child, parent)
    parent.close()
    child.close()
    if not access.endswith("PROT_READ"):
        pytest.xfail(f"this device does not map its memory read-only: {access}")


@pytest.mark.parametrize("pages", [1, 16])
def test_memory_is_taken_and_returned(pool, pages):  # I14
    bytes_tensor(pool, 1).close()  # modules and the scratch page are loaded
    pool.trim()
    before = free_memory()
    t = bytes_tensor(pool, pages)
    assert before - free_memory() >= pages * PAGE
    t.close()
    assert before - free_memory() >= pages * PAGE  # kept for the next tensor
    assert pool.stats().pages_cached == pages
    pool.trim()
    assert pool.stats().pages_cached == 0
    assert abs(before - free_memory()) < PAGE


def test_closing_the_pool_returns_all_memory(gpu):
    vtensor.Pool("cuda", budget=64 * MIB).close()
    before = free_memory()
    pool = vtensor.Pool("cuda", budget=256 * MIB)
    t = bytes_tensor(pool, 60)
    fork = t.fork().add_(1)
    assert before - free_memory() >= 120 * PAGE
    del t, fork
    gc.collect()
    pool.close()
    assert abs(before - free_memory()) < PAGE


def test_a_full_device_raises_and_recovers(gpu):  # I9
    pool = vtensor.Pool("cuda", budget=1024 * MIB)
    t = bytes_tensor(pool, 4).fill_(5)
    torch.cuda.empty_cache()
    filler = torch.empty(max(free_memory() - 64 * MIB, 0), dtype=torch.uint8, device="cuda")
    with pytest.raises(vtensor.OutOfPages, match="memory"):
        for _ in range(50):
            t.extend(PAGE)
    length = t.length
    assert length < 40 * PAGE and bool((t[: 4 * PAGE] == 5).all())
    del filler
    torch.cuda.empty_cache()
    t.extend(20 * PAGE)
    assert t.length == length + 20 * PAGE
    assert bool((t[: 4 * PAGE] == 5).all()) and not t[4 * PAGE :].any()
    t.close()
    pool.close()


def test_page_sizes_are_multiples_of_the_granularity(gpu):
    pool = vtensor.Pool("cuda", page_size=3 * PAGE, budget=12 * PAGE)  # no power of two
    t = vtensor.zeros(7 * PAGE, grow_dim=0, capacity=12 * PAGE, dtype=torch.uint8, pool=pool)
    assert len(t.pages()) == 3 and not t.any()
    t.close()
    pool.close()
    with pytest.raises(vtensor.InvalidArgument, match="page_size"):
        vtensor.Pool("cuda", page_size=PAGE // 2)


def test_growth_inside_a_page_makes_no_driver_call(pool):  # I15
    t = bytes_tensor(pool, 0).extend(1)
    before = pool.stats().driver_calls["caller"]
    t.extend(PAGE - 1)
    assert pool.stats().driver_calls["caller"] == before
    t.extend(4 * PAGE)
    made = {name: n - before.get(name, 0) for name, n in pool.stats().driver_calls["caller"].items()}
    assert (made["cuMemCreate"], made["cuMemMap"], made["cuMemSetAccess"]) == (4, 4, 1)
    t.close()

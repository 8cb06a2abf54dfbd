"""Bad input: the error class that DESIGN names, a message that says what was asked, what there is and what to
do, and everything as it was (I8)."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

import vtensor
from support import filled, page_ids, quarter, run_snippet, same_bytes, simcuda_library
from vtensor import testing

# "[operation] what was asked, what there is: what to do"
SHAPE_OF_A_MESSAGE = re.compile(r"^\[[\w. ]+\] \S.*: \S.*", re.DOTALL)


def state(pool, *tensors):
    """What an operation that fails may not change."""
    stats = pool.stats()
    counts = tuple(
        getattr(stats, name)
        for name in (
            "pages_used",
            "pages_free",
            "pages_mapped",
            "pages_active",
            "pages_pinned",
            "nbytes_reserved",
            "tensors",
        )
    )
    return counts, [(t.length, t.capacity, t.address, t.stride(), page_ids(t), t.clone()) for t in tensors]


@contextlib.contextmanager
def refused(error, pool, *tensors, says=()):
    """The body raises `error`, its message names all of `says`, and nothing has changed by it."""
    counts, before = state(pool, *tensors)
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert SHAPE_OF_A_MESSAGE.match(message), message
    for word in says:
        assert str(word) in message, (word, message)
    assert isinstance(caught.value, vtensor.VTensorError)
    counts_after, after = state(pool, *tensors)
    assert counts_after == counts
    for (*facts, contents), (*facts_after, contents_after) in zip(before, after, strict=True):
        assert facts == facts_after and same_bytes(contents, contents_after)
    testing.check_invariants(pool)


# --- lengths and capacities -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [-1, -(2**62), -(2**80)])
def test_negative_amounts(pool, n):
    t = filled(pool, 6, 3, rows=(2,))
    for operation in (t.extend, t.shrink, t.truncate, t.prepare, t.reallocate):
        with refused((vtensor.InvalidArgument, vtensor.CapacityExceeded), pool, t):
            operation(n)
    with refused(vtensor.InvalidArgument, pool, t, says=[-1]):
        t.extend(-1)


@pytest.mark.parametrize("n", [10**6, 2**31, 2**62, 2**63, 2**64 - 1, 2**80])
def test_huge_amounts(pool, n):
    t = filled(pool, 6, 3, rows=(2,))
    with refused((vtensor.CapacityExceeded, vtensor.InvalidArgument), pool, t):
        t.extend(n)
    with refused((vtensor.CapacityExceeded, vtensor.InvalidArgument), pool, t):
        t.prepare(n)
    with refused((vtensor.CapacityExceeded, vtensor.InvalidArgument), pool, t):
        t.shrink(n)
    with refused((vtensor.CapacityExceeded, vtensor.InvalidArgument), pool, t):
        t.truncate(n)
    assert t.extend(1).length == 7


def test_over_capacity_names_both_and_the_remedy(pool):
    t = filled(pool, 6, capacity=8)
    with refused(vtensor.CapacityExceeded, pool, t, says=[3, 6, 8, "reallocate"]):
        t.extend(3)
    with refused(vtensor.CapacityExceeded, pool, t, says=[8, "reallocate"]):
        t.append(torch.ones(3, t.shape[1], dtype=t.dtype))
    with pytest.raises(ValueError):
        t.extend(3)


def test_capacity_that_front_shrinks_used_up_names_the_option(pool):
    t = filled(pool, 6, capacity=8)
    assert t.when_full == "raise" and vtensor.empty_like(t).when_full == "raise"
    t.shrink(4, front=True)
    with refused(vtensor.CapacityExceeded, pool, t, says=['when_full="move"', 4, "reallocate"]):
        t.extend(3)


def test_what_is_like_another_does_the_same_when_full(pool):
    t = filled(pool, 6, capacity=8, when_full="move")
    for twin in (t, vtensor.empty_like(t), t.fork()):
        assert twin.when_full == "move"
        assert twin.shrink(4, front=True).extend(5).length == 7
    assert vtensor.empty_like(t, when_full="raise").when_full == "raise"


def test_shrink_by_more_than_there_is(pool):
    t = filled(pool, 6)
    for front in (False, True):
        with refused(vtensor.InvalidArgument, pool, t, says=[7, 6]):
            t.shrink(7, front=front)
    with refused(vtensor.InvalidArgument, pool, t, says=[7, 6]):
        t.truncate(7)


@pytest.mark.parametrize("n", [1.5, "3", None, torch.ones(2), [1]])
def test_amounts_that_are_no_integers(pool, n):
    t = filled(pool, 6)
    for operation in (t.extend, t.shrink, t.truncate, t.prepare, t.reallocate):
        before = state(pool, t)
        with pytest.raises((TypeError, vtensor.InvalidArgument)):
            operation(n)
        assert state(pool, t)[0] == before[0] and t.length == 6


def test_integers_of_other_kinds_are_taken(pool):
    import numpy as np

    t = quarter(pool)
    t.extend(np.int64(3)).extend(torch.tensor(2)).extend(True).shrink(np.uint8(1))
    assert t.length == 5


@pytest.mark.parametrize("start, stop", [(-1, 3), (3, 99), (4, 2), (7, 7)])
def test_own_outside_the_tensor(pool, start, stop):
    t = filled(pool, 6)
    with refused(vtensor.InvalidArgument, pool, t, says=[start, stop, 6]):
        t.unshare(start, stop)


# --- creation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [2**40, 2**50, 2**61, 2**62, 2**63 - 1, 2**64, 2**100])
def test_a_capacity_that_overflows(pool, capacity):
    refusals = (vtensor.CapacityExceeded, vtensor.InvalidArgument, vtensor.DriverError)
    with refused(refusals, pool, says=["capacity"]):
        vtensor.empty(4, 0, 2**20, grow_dim=1, capacity=capacity, dtype=torch.float64, pool=pool)


def test_sizes_that_overflow(pool):
    for sizes in ((2**40, 0, 2**40), (2**62, 0, 4), (1, 0, 2**62)):
        with refused((vtensor.CapacityExceeded, vtensor.InvalidArgument, vtensor.DriverError), pool):
            vtensor.empty(*sizes, grow_dim=1, capacity=4, dtype=torch.float64, pool=pool)


@pytest.mark.parametrize(
    "change",
    [
        {"capacity": -1},
        {"capacity": 3},  # below the initial length
        {"grow_dim": 3},
        {"grow_dim": -4},
        {"sizes": (2, -4, 8)},
        {"sizes": (-2, 4, 8)},
        {"sizes": ()},
        {"when_full": "explode"},
        {"dtype": torch.quint8},
    ],
    ids=str,
)
def test_creation_with_wrong_arguments(pool, change):
    arguments = {"sizes": (2, 4, 8), "grow_dim": 1, "capacity": 16, "dtype": torch.float32} | change
    sizes = arguments.pop("sizes")
    with refused((vtensor.InvalidArgument, vtensor.CapacityExceeded), pool):
        vtensor.empty(*sizes, pool=pool, **arguments)


@pytest.mark.parametrize(
    "change",
    [{"capacity": 1.5}, {"capacity": None}, {"dtype": "float32"}, {"grow_dim": "1"}, {"sizes": ("a",)}],
    ids=str,
)
def test_creation_with_wrong_types(pool, change):
    arguments = {"sizes": (2, 4, 8), "grow_dim": 1, "capacity": 16, "dtype": torch.float32} | change
    sizes = arguments.pop("sizes")
    with pytest.raises((TypeError, vtensor.InvalidArgument)):
        vtensor.empty(*sizes, pool=pool, **arguments)
    assert pool.stats().tensors == 0


def test_a_device_that_is_not_the_pools(host):
    with refused(vtensor.InvalidArgument, host, says=["cuda", "cpu"]):
        vtensor.empty(2, 4, grow_dim=0, capacity=8, device="cuda", pool=host)


def test_creation_that_does_not_fit_the_budget(pool):
    t = filled(pool, 4)
    with refused(vtensor.OutOfPages, pool, t, says=[65, 63, 64]):
        quarter(pool, 65 * 4, capacity=1000)
    with refused(vtensor.OutOfPages, pool, t):
        vtensor.from_tensor(torch.ones(65, pool.page_size, dtype=torch.uint8), 0, 100, pool=pool)


def test_from_tensor_that_requires_grad(pool):
    with refused(vtensor.InvalidArgument, pool, says=["grad"]):
        vtensor.from_tensor(torch.ones(3, 4, requires_grad=True), grow_dim=0, capacity=9, pool=pool)


# --- append -----------------------------------------------------------------------------------------------


def test_append_of_a_wrong_shape(pool):
    t = vtensor.zeros(2, 3, 5, 7, grow_dim=1, capacity=100, dtype=torch.float32, pool=pool)
    wrong = ((2, 1, 5, 6), (2, 1, 7, 5), (1, 1, 5, 7), (3, 1, 5, 7), (2, 5, 7), (2, 1, 5, 7, 1), (), (35,))
    for shape in wrong:
        with refused(vtensor.InvalidArgument, pool, t, says=[", ".join(map(str, shape)), "(2, 3, 5, 7)"]):
            t.append(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.complex64], ids=str)
def test_append_of_a_wrong_dtype(pool, dtype):
    t = vtensor.zeros(3, 7, grow_dim=0, capacity=100, dtype=torch.float32, pool=pool)
    with refused(vtensor.InvalidArgument, pool, t, says=[dtype, torch.float32]):
        t.append(torch.ones(1, 7, dtype=dtype))


def test_append_of_a_wrong_device(pool):
    t = vtensor.zeros(3, 7, grow_dim=0, capacity=100, dtype=torch.float32, pool=pool)
    with refused(vtensor.InvalidArgument, pool, t, says=["meta", "cpu"]):
        t.append(torch.ones(1, 7, device="meta"))


def test_append_of_no_dense_tensor(pool):
    t = vtensor.zeros(3, 7, grow_dim=0, capacity=100, dtype=torch.float32, pool=pool)
    with refused(vtensor.VTensorError, pool, t):
        t.append(torch.ones(1, 7).to_sparse())
    for x in ([[1.0] * 7], None, 3.0):
        with pytest.raises((TypeError, vtensor.InvalidArgument)):
            t.append(x)
        assert t.length == 3


def test_append_out_of_budget(pool):
    t = filled(pool, 60 * 4, 1, capacity=400)
    x = torch.ones(20, t.shape[1], dtype=t.dtype)
    with refused(vtensor.OutOfPages, pool, t, says=["VTensor.append", 5, 4, 64]):
        t.append(x)
    assert t.append(x[:16]).eq(1).all()


def test_out_of_pages_at_a_copy_on_write(pool_factory, kind):
    pool = pool_factory(kind, pages=3)
    t = filled(pool, 10, 1)
    f = t.fork()
    with refused(vtensor.OutOfPages, pool, t, f):
        f.extend(1)  # the page to grow in is shared: it must be copied
    with refused(vtensor.OutOfPages, pool, t, f):
        f.unshare(0, 10)
    t.close()
    assert f.extend(1)[:10].eq(1).all()


# --- pools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2048, 4095, 4097, 12288, 3 * 65536, -4096, 2**63, 2**70])
def test_a_host_page_size_that_is_no_power_of_two_from_4096(page_size):
    with pytest.raises(vtensor.InvalidArgument, match=r"^\[.*\] .*page[_ ]size.*: ") as caught:
        vtensor.Pool("cpu", page_size=page_size)
    assert "4096" in str(caught.value) or "4 KiB" in str(caught.value)


def test_a_cuda_page_size_that_is_no_multiple_of_the_granularity(simcuda):
    wrong = simcuda.page_size + simcuda.page_size // 2
    with pytest.raises(vtensor.InvalidArgument, match=f"page size of {wrong} .* multiples of 4096"):
        testing.simulated_cuda_pool(str(simcuda_library()), page_size=wrong)


@pytest.mark.parametrize("budget", [1, 4095, 0, -1, 2**70])
def test_a_budget_below_one_page_or_beyond_reason(budget):
    with pytest.raises(vtensor.InvalidArgument, match=r"^\[.*\] .*budget.*: "):
        vtensor.Pool("cpu", page_size=4096, budget=budget)


def test_a_cuda_budget_below_one_page(simcuda):
    with pytest.raises(vtensor.InvalidArgument, match="budget"):
        testing.simulated_cuda_pool(str(simcuda_library()), budget=simcuda.page_size - 1)


def test_a_budget_is_whole_pages():
    pool = vtensor.Pool("cpu", page_size=4096, budget=3 * 4096 + 100, prefetch=0)
    stats = pool.stats()
    assert stats.pages_free == 3 and stats.pages_used + stats.pages_free == stats.budget // 4096
    with refused(vtensor.OutOfPages, pool):
        quarter(pool, 13)
    pool.close()


def test_a_default_budget_is_set_by_what_the_machine_has():
    pool = vtensor.Pool("cpu")
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal"))
    assert 0 < pool.budget <= total  # I9: beyond memory there is no error, only the kernel's killer
    pool.close()


@pytest.mark.parametrize("arguments", [{"zero": "sometimes"}, {"prefetch": -1}, {"zero": None}])
def test_wrong_pool_options(arguments):
    with pytest.raises((vtensor.InvalidArgument, TypeError)):
        vtensor.Pool("cpu", budget=2**20, **arguments)


@pytest.mark.parametrize("device", ["meta", "tpu", "mps", ""])
def test_a_device_that_has_no_pages(device):
    with pytest.raises((vtensor.InvalidArgument, RuntimeError)) as caught:
        vtensor.Pool(device)
    assert str(caught.value)
    with pytest.raises((vtensor.InvalidArgument, RuntimeError)):
        vtensor.empty(2, 3, grow_dim=0, capacity=8, device=device)


def test_a_failing_driver_call_names_the_call_and_the_code(pool, kind):
    t = filled(pool, 6)
    names = set()
    for skip in range(60):
        pool.trim()  # or the page that an earlier try made would be there
        try:
            with testing.fail_after(pool, skip):
                t.extend(4)
            t.truncate(6)  # past the last call, or refused as out of memory and tried again
        except vtensor.DriverError as error:
            names.add(error.call)
            assert error.name in str(error) and SHAPE_OF_A_MESSAGE.match(str(error))
            assert isinstance(error.code, int) and error.code != 0
        assert t.length == 6 and t.eq(1).all()  # I8
    assert names >= ({"mmap"} if kind == "host" else {"cuMemMap", "cuMemSetAccess"})
    t.extend(4)


# --- CUDA that is not there -------------------------------------------------------------------------------


def test_no_libcuda():
    with pytest.raises(vtensor.VTensorError, match="libcuda") as caught:
        testing.simulated_cuda_pool("libcuda-that-is-not-there.so.1")
    assert SHAPE_OF_A_MESSAGE.match(str(caught.value))


def test_a_library_that_is_no_libcuda():
    with pytest.raises(vtensor.VTensorError) as caught:
        testing.simulated_cuda_pool("libc.so.6")
    assert "cu" in str(caught.value) and SHAPE_OF_A_MESSAGE.match(str(caught.value))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_cuda_pool_without_a_gpu():
    for make in (
        lambda: vtensor.Pool("cuda"),
        lambda: vtensor.default_pool("cuda"),
        lambda: vtensor.empty(2, 3, grow_dim=0, capacity=8, device="cuda"),
    ):
        for _ in range(2):
            with pytest.raises(vtensor.VTensorError) as caught:
                make()
            assert SHAPE_OF_A_MESSAGE.match(str(caught.value)) and "use the CPU" in str(caught.value)
    assert vtensor.empty(1, 3, grow_dim=0, capacity=8).shape == (1, 3)


needs_simcuda = pytest.mark.skipif(simcuda_library() is None, reason="libsimcuda.so is not built")

SIMULATED = """
control = simcuda_control()
control.simcuda_configure.argtypes = (ctypes.c_char_p, ctypes.c_uint64)
def configure(**settings):
    for name, value in settings.items():
        assert control.simcuda_configure(name.encode(), value) == 0

def pool_is_refused(*words):
    for _ in range(2):
        try:
            testing.simulated_cuda_pool(str(simcuda_library()))
        except vtensor.VTensorError as error:
            assert all(word in str(error) for word in words), error
            assert str(error).startswith("[") and ": " in str(error), error
        else:
            raise AssertionError("a pool was made")
        assert not simcuda_leaks(), simcuda_leaks()
"""


@needs_simcuda
def test_a_driver_without_vmm():
    run_snippet(
        SIMULATED
        + """
configure(vmm=0)
pool_is_refused("virtual memory management")
configure(vmm=1)
pool = testing.simulated_cuda_pool(str(simcuda_library()), budget=1 << 26)
assert not quarter(pool, 5).any()
pool.close()
"""
    ).check()


@needs_simcuda
def test_a_driver_without_a_device():
    run_snippet(
        SIMULATED
        + """
configure(devices=0)
pool_is_refused('use the CPU')
"""
    ).check()


@needs_simcuda
@pytest.mark.parametrize("device", [1, 7, -1])
def test_a_device_that_is_not_there(device):
    with pytest.raises(vtensor.VTensorError) as caught:
        testing.simulated_cuda_pool(str(simcuda_library()), device=device)
    assert SHAPE_OF_A_MESSAGE.match(str(caught.value)) and str(device) in str(caught.value)


@needs_simcuda
def test_pages_as_real_devices_have_them():
    run_snippet(
        SIMULATED
        + """
pool = testing.simulated_cuda_pool(str(simcuda_library()), budget=1 << 26)
assert pool.page_size == 2 << 20 and pool.budget == 1 << 26
t = vtensor.zeros(2, 0, 8, 128, grow_dim=1, capacity=4096, dtype=torch.bfloat16, pool=pool)
x = torch.ones(2, 1500, 8, 128, dtype=torch.bfloat16)
assert t.append(x).eq(1).all() and pool.stats().pages_used == 4
t.fork().add_(1)
assert t.eq(1).all()
t.close(); pool.close()
for page_size in (1 << 20, 3 << 20, (2 << 20) + 4096):
    try:
        testing.simulated_cuda_pool(str(simcuda_library()), page_size=page_size)
    except vtensor.InvalidArgument as error:
        assert str(page_size) in str(error) and str(2 << 20) in str(error), error
    else:
        raise AssertionError(page_size)
assert not simcuda_leaks(), simcuda_leaks()
"""
    ).check()


@needs_simcuda
def test_the_devices_memory_ends_before_the_budget():
    run_snippet(
        SIMULATED
        + """
configure(memory=8 << 21)
pool = testing.simulated_cuda_pool(str(simcuda_library()), budget=100 << 21)
t = quarter(pool, 5 * PER_PAGE, capacity=400); t.fill_(3)
for i in range(3):
    try:
        t.extend(4 * PER_PAGE)
    except vtensor.OutOfPages as error:
        assert isinstance(error, MemoryError) and "memory" in str(error), error
    else:
        raise AssertionError("nine pages of eight")
    assert t.length == 5 * PER_PAGE and t.eq(3).all() and pool.stats().pages_used == 5
testing.check_invariants(pool)
t.extend(3 * PER_PAGE)  # what is there can be had
t.truncate(1)
u = quarter(pool, 7 * PER_PAGE)
assert not u.any() and t.eq(3).all()
pool.close()
assert not simcuda_leaks(), simcuda_leaks()
"""
    ).check()

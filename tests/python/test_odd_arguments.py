"""Whatever leaves vtensor for odd arguments, too little memory or a broken file is one of its errors."""

from __future__ import annotations

import gzip
import json
import pickle
import re

import numpy as np
import pytest
import torch

import vtensor
from support import filled, in_words, quarter, run_snippet
from vtensor import testing

WORDS = re.compile(r"^\[[\w. ]+\] \S.*: \S.*", re.DOTALL)
NO_INTEGERS = (1.5, "3", None, [1], {}, object(), torch.ones(2), np.float32(1), 2 + 1j, b"1", float("nan"))
OUT_OF_RANGE = (-1, 2**31, 2**63, 2**64, 2**100, -(2**64), -(2**100))
BYTES = ("page_size", "budget", "prefetch", "cache", "spare", "device_reserve")
NO_TENSORS = (5, None, "x", [1.0], object())


def refused(call, *arguments, **named):
    with pytest.raises(vtensor.VTensorError) as caught:
        call(*arguments, **named)
    assert WORDS.match(str(caught.value)), caught.value
    assert "incompatible" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("value", [*NO_INTEGERS, *OUT_OF_RANGE], ids=in_words)
def test_sizes_of_a_tensor(pool, value):
    t = filled(pool, 6, rows=(2,))
    calls = [t.extend, t.shrink, t.truncate, t.prepare, t.reallocate]
    if isinstance(value, int) and value >= 2**31:
        calls.append(lambda n: t.unshare(0, n))
        calls.append(lambda n: t.reindex([n]))
        calls.remove(t.reallocate)  # of so many positions there may be addresses
        if value >= 2**63:
            refused(t.reallocate, value)
    elif not isinstance(value, int):  # reindex counts it from the end
        calls += [lambda n: t.unshare(0, n), lambda n: t.unshare(n, 3), lambda n: t.reindex([n])]
    for call in calls:
        refused(call, value)
        assert t.length == 6 and not t.closed
    assert t.eq(1).all() and t.extend(1).length == 7


def test_indices(pool):
    t = filled(pool, 6, rows=(2,))
    square, scalar = torch.ones(2, 2, dtype=torch.long), torch.tensor(1)
    for index in (5, None, [], [[0], [1]], ["a"], "ab", square, scalar, [5], object()):
        refused(t.reindex, index)
    assert t.reindex(np.array([1, 0])).eq(1).all() and t.reindex((1, 0)).eq(1).all()
    assert t.reindex(i for i in (0, 1)).eq(1).all()


def test_what_is_no_tensor(pool):
    t = filled(pool, 6)
    with vtensor.KVCache(
        num_layers=1, num_kv_heads=1, head_dim=16, max_batch=1, max_len=16, dtype=torch.float32, device="cpu"
    ) as cache:
        for x in (*NO_TENSORS, cache):
            refused(t.append, x)
            refused(vtensor.from_tensor, x, 0, 9, pool=pool)
            refused(vtensor.empty_like, x, grow_dim=0, capacity=3)
            refused(vtensor.lease, t, x)
    refused(vtensor.lease, t, stream="x")
    assert t.length == 6 and pool.stats().tensors == 1


def test_what_a_tensor_is_made_of(pool):
    def make(*sizes, **change):
        return vtensor.empty(*sizes, **({"grow_dim": 1, "capacity": 16, "pool": pool} | change))

    for value in (*NO_INTEGERS, *OUT_OF_RANGE[1:]):
        refused(make, 2, 4, value)
        refused(make, 2, 4, 8, grow_dim=value)
        if value is not OUT_OF_RANGE[1]:
            refused(make, 2, 4, 8, capacity=value)
    for change in (
        {"dtype": "float32"},
        {"dtype": []},
        {"when_full": []},
        {"when_full": torch.ones(2)},
        {"pool": 5},
        {"pool": "cpu"},
        {"device": "blah"},
        {"device": []},
        {"device": "blah", "pool": None},
        {"device": 1.5, "pool": None},
    ):
        refused(make, 2, 4, 8, **change)
    assert pool.stats().tensors == 0 and pool.stats().nbytes_reserved == 0


@pytest.mark.parametrize("value", [v for v in NO_INTEGERS if v is not None], ids=in_words)
def test_options_of_pools(host, value):
    nbytes = "3 pages" if value == "3" else value  # "3" is a number of bytes
    for option in BYTES:
        refused(vtensor.Pool, "cpu", **{option: nbytes})
    refused(setattr, host, "budget", nbytes)
    refused(testing.host_pool, page_size=nbytes)
    refused(vtensor.trace.record, value)
    refused(vtensor.Pool, "cpu", zero=value)
    for skip, refuse in ((value, 1), (0, value)):
        refused(testing.fail_after(host, skip, refuse).__enter__)
    refused(testing.simulated_cuda_pool, "libcuda-that-is-not-there.so.1", device=value)


def test_numbers_of_pools(host):
    for value in OUT_OF_RANGE[3:]:
        for option in BYTES:
            refused(vtensor.Pool, "cpu", **{option: value})
        refused(setattr, host, "budget", value)
        refused(vtensor.trace.record, value)
        refused(testing.fail_after(host, value).__enter__)
        refused(testing.simulated_cuda_pool, "libcuda-that-is-not-there.so.1", device=value)
    for value in ("x", [], 2 + 1j, 0, -1, float("nan"), float("inf"), 10**400):
        refused(host.wait_idle, value)
        refused(testing.host_pool, patience=value)
    refused(host.wait_idle, None)
    assert host.budget == 64 * 4096


def test_what_is_no_device_or_pool():
    for value in ("blah", [], 1.5, object(), "cuda:x"):
        refused(vtensor.Pool, value)
        refused(vtensor.default_pool, value)
    for value in (5, None, "cpu", object()):
        refused(testing.assert_no_leaks(value).__enter__)
        refused(testing.check_invariants, value)
        refused(testing.fail_after(value, 0).__enter__)
    refused(testing.simulated_cuda_pool, 5)


# --- too little of something ------------------------------------------------------------------------------


def test_out_of_pages_is_torchs_too(pool):
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        quarter(pool, 65 * 4, capacity=1000)
    error = caught.value
    assert type(error) is vtensor.OutOfPages and isinstance(error, (MemoryError, torch.OutOfMemoryError))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is vtensor.OutOfPages and str(again) == str(error)


LIMITED = """
import re, resource
def limit(more):
    held = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (held + more, resource.RLIM_INFINITY))
def no_limit():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_no_thread_for_the_mapper():
    """A thread's stack is addresses: of those there are too few."""
    run_snippet(
        LIMITED
        + """
import threading
go_on = threading.Event()  # for threads that take the stacks which glibc keeps for reuse
others = [threading.Thread(target=go_on.wait) for _ in range(8)]
for thread in others: thread.start()
limit(4 << 20)
try:
    vtensor.Pool("cpu", page_size=4096, budget=1 << 20)
except vtensor.DriverError as error:
    assert (error.call, error.name) == ("pthread_create", "EAGAIN") and "ulimit" in str(error), error
else:
    raise AssertionError("a thread was had")
finally:
    no_limit()
    go_on.set()
for thread in others: thread.join()
vtensor.Pool("cpu", page_size=4096, budget=1 << 20).close()
"""
    ).check()


def test_no_memory_for_a_long_index():
    run_snippet(
        LIMITED
        + """
pool = vtensor.Pool("cpu", page_size=4096, budget=1 << 20, prefetch=0)
t = filled(pool, 6, rows=(2,))
index = [0] * (8 << 20)
limit(16 << 20)
try:
    t.reindex(index)
except vtensor.OutOfPages as error:
    assert isinstance(error, MemoryError) and "ulimit" in str(error), error
else:
    raise AssertionError("there was memory")
no_limit()
assert t.shape[:2] == (2, 6) and t.eq(1).all()
t.extend(1)
pool.close()
"""
    ).check()


# --- broken files -----------------------------------------------------------------------------------------

EVENT = {
    "name": "map",
    "cat": "vtensor",
    "ts": 1.0,
    "dur": 2.0,
    "tid": 5,
    "args": {"address": "0x10", "nbytes": 4096, "tensor": "0x10", "role": "caller"},
}


def trace_of(**change):
    event = json.loads(json.dumps(EVENT))
    arguments = event["args"]
    for key, value in change.items():
        (arguments if key in arguments else event)[key] = value
    return json.dumps({"traceEvents": [event]})


BROKEN = {
    "nothing": "",
    "no json": "{",
    "another's json": "[1, 2]",
    "a number": "5",
    "events of another kind": '{"traceEvents": {"a": 1}}',
    "no events": '{"traceEvents": [1, null, "x"]}',
    "nested": '{"traceEvents": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "nested inside": '{"traceEvents": [], "a": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}",
    "base": '{"baseTimeNanoseconds": "x", "traceEvents": []}',
    "long base": '{"baseTimeNanoseconds": 1' + "0" * 400 + ', "traceEvents": []}',
    "cut short": gzip.compress(trace_of().encode())[:-9],
    "no text": b"\xff\xfe\x00\x81",
    "null": b"\x1f\x8b",
}
ODD_EVENTS = {
    "no number": {"ts": "x"},
    "no end": {"ts": float("inf")},
    "not a number": {"dur": float("nan")},
    "no address": {"address": 5},
    "no hexadecimal": {"tensor": "zz"},
    "no size": {"nbytes": "much"},
    "no thread": {"tid": None},
    "no role": {"role": []},
    "no name": {"name": {}},
    "no arguments": {"args": 5},
}


def written(tmp_path, content):
    file = tmp_path / "trace.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_trace(tmp_path, broken):
    file = written(tmp_path, BROKEN[broken])
    refused(vtensor.trace.load, file)
    with vtensor.trace.record() as recording:
        pass
    refused(recording.export, tmp_path / "out.json", profile=file)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("odd", ODD_EVENTS)
def test_an_odd_event(tmp_path, odd):
    assert len(vtensor.trace.load(written(tmp_path, trace_of()))) == 1
    refused(vtensor.trace.load, written(tmp_path, trace_of(**ODD_EVENTS[odd])))


def test_a_profile_with_odd_names_is_kept(tmp_path):
    theirs = {"traceEvents": [{"ph": "M", "pid": [1], "tid": {}}, {"ph": "M"}, {"name": "x"}]}
    with vtensor.trace.record() as recording:
        pass
    recording.export(tmp_path / "out.json", profile=written(tmp_path, json.dumps(theirs)))
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"][:3] == theirs["traceEvents"]


def test_what_is_no_path_or_profiler(tmp_path):
    with vtensor.trace.record() as recording:
        pass
    for path in (5, None, [], object()):
        refused(vtensor.trace.load, path)
        refused(recording.export, path)
    for profile in (5, [], object()):
        refused(recording.export, tmp_path / "out.json", profile=profile)
    for path in (tmp_path, tmp_path / "none" / "there"):
        with pytest.raises(OSError):
            vtensor.trace.load(path)


def test_bytes_in_words_and_in_numbers():
    """One parser for options and for the command line."""
    for nbytes in ("64KiB", "64 kib", "65536", 65536, 65536.0, np.float64(65536), np.int64(65536)):
        with vtensor.Pool("cpu", page_size=4096, budget=nbytes) as pool:
            assert pool.budget == 65536
            pool.budget = nbytes
    with vtensor.Pool("cpu", page_size="64KiB", budget=1e9, prefetch="0", cache="1.5MiB") as pool:
        assert pool.page_size == 65536 and pool.budget == 10**9 // 65536 * 65536
    for value in ("1GB", "-1", "1e9", "", "GiB", "1 000", 1.5, float("inf"), b"1GiB", torch.ones(2)):
        for option in BYTES:
            message = str(refused(vtensor.Pool, "cpu", **{option: value}))
            assert re.match(rf"\[Pool\] {option} is .*: (write it as '40GiB'|give a )", message), message


def test_what_a_cache_is_made_of(host):
    def make(**change):
        sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "max_batch": 1, "max_len": 16}
        return vtensor.KVCache(**(sizes | {"pool": host, "dtype": torch.float32} | change))

    for value in (v for v in NO_INTEGERS if v is not None):
        for size in ("num_layers", "num_kv_heads", "head_dim", "max_batch", "max_len", "layer_group"):
            refused(make, **{size: value})
        refused(make, lookahead=value)
        refused(make, windows=[value])
    for change in (
        {"dtype": "float32"},
        {"dtype": torch.int64},
        {"device": "blah"},
        {"device": []},
        {"device": "cuda:3"},
        {"device": "blah", "pool": None},
        {"pool": "cpu"},
        {"layout": "page"},
        {"layout": []},
        {"windows": 5},
        {"windows": {0: 5}},
        {"tile": "x"},
        {"value_head_dim": "x"},
    ):
        refused(make, **change)
    assert host.stats().tensors == 0
    with make() as cache:
        for tokens in ("hello", b"hello", 5, 1.5, [1.5], ["a"], torch.ones(2), [2**63]):
            refused(cache.alloc, tokens=tokens)
        assert cache.stats().slots_used == 0


def test_defaults_of_torch(host):
    """What is not named is as torch has it: the device, and the dtype."""
    sizes = {"num_layers": 3, "num_kv_heads": 1, "head_dim": 16, "max_batch": 1, "max_len": 16}
    torch.set_default_dtype(torch.float64)
    try:
        with vtensor.KVCache(**sizes, pool=host) as cache:
            assert cache.dtype is torch.float64 and cache.num_layers == len(cache) == 3
    finally:
        torch.set_default_dtype(torch.float32)
    makes = (
        lambda **more: vtensor.KVCache(**sizes, **more),
        lambda **more: vtensor.empty(0, grow_dim=0, capacity=8, **more),
        lambda **more: vtensor.zeros(0, grow_dim=0, capacity=8, **more),
    )
    for make in makes:
        with torch.device("meta"):
            assert "device is meta: vtensor has drivers for cpu and cuda" in str(refused(make))
            make(device="cpu").close()
            make(pool=host).close()
        made = make()
        assert made.pool.device.type == "cpu"
        made.close()


def test_a_lease_takes_a_list_or_one_by_one(host):
    k, v = filled(host, 6), filled(host, 6)
    for given in ((k, v), ([k, v],), ((k, v),), ([k],), (k,)):
        with vtensor.lease(*given):
            pass
    for wrong in (([k, 5],), ([k], [v]), ([[k]],)):
        refused(lambda wrong=wrong: vtensor.lease(*wrong).__enter__())

"""What torch.multiprocessing may do with memory of ours: nothing, which it says before it copies a byte (I1).

The remedy that it names works: a plain copy.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import vtensor
from kv_support import make_cache
from support import filled, quarter, ramp, same_bytes

STRATEGIES = ("file_descriptor", "file_system")


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield request.param
    torch.multiprocessing.set_sharing_strategy(before)


def older_view(t):
    view = t[1:3]
    t.extend(40)  # into other pages: torch alone keeps the storage that the view is over
    return view


OF_A_TENSOR = {
    "view": lambda t: t[1:3],
    "empty view": lambda t: t[2:2],
    "strided view": lambda t: t[::2, 3:],
    "view of another dtype": lambda t: t[1:3].view(torch.uint8),
    "older view": older_view,
    "alias": lambda t: t.alias(),
    "detached": lambda t: t.detach(),
    "copy.copy": copy.copy,
    "data": lambda t: t.data,
    "parameter": lambda t: torch.nn.Parameter(t[1:3], requires_grad=False),
    "view of a fork": lambda t: t.fork()[1:3],
    "view of a closed tensor": lambda t: (t[1:3], t.close())[0],
}
OF_A_CACHE = {
    "layer": lambda cache: cache[1][0],
    "slot": lambda cache: cache[0][1][2, :5],
    "alias": lambda cache: cache[0][0].detach().transpose(1, 2),
}


def by_queue(context):
    return lambda x: multiprocessing.get_context(context).SimpleQueue().put(x)


def by_pipe(x):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver, sender:
        sender.send(x)


def as_a_modules_parameter(x):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(x, requires_grad=False)
    module.share_memory()


WAYS = {
    "pickler": ForkingPickler.dumps,
    "nested": lambda x: ForkingPickler.dumps({"x": [x]}),
    "pipe": by_pipe,
    "queue": by_queue("fork"),
    "queue of spawned": by_queue("spawn"),
    "torch queue": lambda x: torch.multiprocessing.SimpleQueue().put(x),
    "argument": lambda x: multiprocessing.get_context("spawn").Process(target=print, args=(x,)).start(),
    "share_memory_": lambda x: x.share_memory_(),
    "typed storage": lambda x: x._typed_storage()._share_memory_(),
    "storage": lambda x: x.untyped_storage().share_memory_(),
    "module": as_a_modules_parameter,
}


def shared_files() -> list[str]:
    """What this process made in shared memory."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


def refused(share, x):
    """In words that name the remedy, and nothing of it is left; the remedy works."""
    before = x.data_ptr(), x.untyped_storage().data_ptr(), shared_files()
    with pytest.raises(vtensor.VTensorError, match=r"^\[[\w.]+\] .*clone\(\)"):
        share(x)
    assert (x.data_ptr(), x.untyped_storage().data_ptr(), shared_files()) == before
    assert not x.is_shared()


@pytest.mark.parametrize(
    ("of", "strategy"),
    [("view", "file_system"), *((of, "file_descriptor") for of in OF_A_TENSOR)],
    indirect=["strategy"],
)
def test_no_view_of_a_tensor_is_shared(pool, of, strategy):
    t = filled(pool, 12, dtype=torch.float32)
    x = OF_A_TENSOR[of](t)
    for share in WAYS.values():
        refused(share, x)
    if not t.closed:
        assert t.append(torch.full_like(t[:1], 2))[-1].eq(2).all()  # nor does it find its storage taken away


@pytest.mark.parametrize("shares_pages", [False, True])
def test_no_tensor_is_shared(pool, strategy, shares_pages):
    t = filled(pool, 12, dtype=torch.float32)
    forked = t.fork() if shares_pages else None
    for way, share in WAYS.items():
        if way != "module":  # a parameter is a view
            refused(share, t)
    assert t.extend(1)[:12].eq(1).all()
    del forked


@pytest.mark.parametrize("of", OF_A_CACHE)
def test_nothing_of_a_cache_is_shared(pool_factory, kind, strategy, of):
    with make_cache(pool_factory(kind, 400)) as cache:
        slots = [cache.alloc() for _ in range(3)]
        assert cache.step([5 if slot in slots else 0 for slot in range(cache.max_batch)])
        layer = cache[0][0]
        address = layer.data_ptr()
        for share in WAYS.values():
            refused(share, OF_A_CACHE[of](cache))
        assert cache[0][0].data_ptr() == address
        cache[0][0][slots[2], :5].fill_(3)
        assert layer[slots[2], :5].eq(3).all()


def test_a_queue_with_a_thread_says_so_too(pool, strategy, capfd):
    """`put` of a Queue pickles on a thread of the queue's, which prints what it meets."""
    t = filled(pool, 12)
    queue = multiprocessing.get_context("spawn").Queue()
    address = t.data_ptr()
    queue.put(t[1:3])
    queue.close()
    queue.join_thread()
    assert "x.clone()" in capfd.readouterr().err
    assert t.data_ptr() == address and not shared_files()
    t.append(torch.ones_like(t[:1]))


def test_copies_are_shared(pool, strategy):
    """By the remedy, and by what copies of itself: they are torch's alone."""
    t = quarter(pool, 12, dtype=torch.float32)
    t.copy_(ramp(t))
    view = t[2:5]
    queue = multiprocessing.SimpleQueue()
    for twin, of in (
        (t.clone(), t),
        (view.clone(), view),
        (copy.deepcopy(view), view),
        (pickle.loads(pickle.dumps(view)), view),
        (pickle.loads(pickle.dumps(t))[2:5], view),
    ):
        queue.put(twin)
        assert same_bytes(queue.get(), of)
        assert same_bytes(twin, of) and twin.share_memory_().is_shared()
    assert torch.is_storage(view.untyped_storage()) and type(view.untyped_storage()) is torch.UntypedStorage
    t.extend(1)


def test_a_tensor_that_dlpack_made_is_shared_as_a_copy(pool, strategy):
    """Its storage is not ours to see; ours stay where they are."""
    t = filled(pool, 12)
    address = t.data_ptr()
    made = torch.from_dlpack(t)
    assert made.data_ptr() == address
    assert made.share_memory_().is_shared() and made.data_ptr() != address
    made.fill_(2)
    assert t.data_ptr() == address and t.extend(1)[:12].eq(1).all()

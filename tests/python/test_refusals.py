"""What calls refuse: a call, an argument that makes no sense, and the words that the message must have."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import vtensor
from support import open_pool, run_snippet

WORDS = re.compile(r"^\[[\w. ]+\] \S.*: \S.*", re.DOTALL)
ZERO_DIM = torch.tensor(0)


class Four:
    """An integer, as numpy's are, that compares with none."""

    def __index__(self):
        return 4


def cache(scene, **sizes):
    options = {"num_layers": 4, "num_kv_heads": 1, "head_dim": 8, "max_batch": 4, "max_len": 16}
    return vtensor.KVCache(**(options | sizes), dtype=torch.float32, pool=scene.pool)


# Of each: the call, given a scene and the argument; the argument; the words.
CASES = [
    (lambda s, x: s.cache.step(x), torch.ones(4, device="meta"), "lengths is a Tensor without memory"),
    (lambda s, x: s.cache.fits(x), torch.ones(4, device="meta"), "lengths is a Tensor without memory"),
    (lambda s, x: s.cache.prepare(x), np.array(3), "lengths is array(3): give 4 integers"),
    (lambda s, x: s.cache.step(x), ZERO_DIM, "lengths is 0: give 4 integers"),
    (lambda s, x: s.cache.step([1, 0, 0, 0], bands=x), np.array(0), "bands is array(0): give their numbers"),
    (lambda s, x: s.cache.step([1, 0, 0, 0], bands=x), "0", "bands is '0': give their numbers"),
    (lambda s, x: s.cache.swap_out(x), {0: 1}, "slots is {0: 1}: give slots that alloc() returned"),
    (lambda s, x: s.cache.swap_out(x), torch.tensor(9), "slot 9: the cache has slots 0 to 3"),
    (lambda s, x: s.cache.swap_in(x), np.array(9), "slot 9: the cache has slots 0 to 3"),
    (lambda s, x: s.cache.swap_in(x), None, "slot is None: give what alloc() returned"),
    (lambda s, x: s.cache.reorder(x, [0]), None, "slot is None: give what alloc() returned"),
    (lambda s, x: s.cache.reorder([0], x), None, "slot is None: give what alloc() returned"),
    (lambda s, x: s.cache.reorder([0], x), "0", "slots is '0': give slots that alloc() returned"),
    (
        lambda s, x: s.cache.alloc(x),
        torch.ones(2, device="meta", dtype=torch.long),
        "tokens is a Tensor without",
    ),
    (lambda s, x: s.cache.write(0, x, 0, s.kv, s.kv), {0}, "slots is {0}: give an integer, or one for each"),
    (lambda s, x: s.cache.write(0, 0, 0, x, s.kv), torch.ones(1, 1, 8, device="meta"), "on meta"),
    (lambda s, x: s.t.append(x), torch.ones(1, 8, device="meta"), "the source on meta"),
    (
        lambda s, x: s.rows.reindex(x),
        torch.ones(1, device="meta", dtype=torch.int),
        "index is a Tensor without",
    ),
    (
        lambda s, x: vtensor.Blocks(s.arena, 2, x),
        None,
        "parts is None: give a sequence of (offset, stride, size)",
    ),
    (lambda s, x: vtensor.Blocks(s.arena, 2, x), [None], "a part is None: give a sequence"),
    (lambda s, x: vtensor.Blocks(s.arena, 2, x), ["abc"], "a part is 'abc': give a sequence"),
    (lambda s, x: vtensor.Blocks(s.arena, 2, x), [(0, 1, 2.5)], "parts is a float: give an integer"),
    (lambda s, x: vtensor.Blocks(s.arena, x, [(0, 0, 1)]), 10**13, "TiB of host memory for its tables"),
    (lambda s, x: vtensor.Arena(4096, pool=x), 1, "pool is a int: give a Pool"),
    (lambda s, x: vtensor.Arena(x, zeros=True, pool=s.pool), 2**50, "of host memory for its tables"),
    (
        lambda s, x: cache(s, max_batch=x),
        2**64,
        "max_batch is 18446744073709551616: it must be at most 2**62",
    ),
    (lambda s, x: cache(s, max_batch=x), 10**9, "max_batch 1000000000 needs"),
    (lambda s, x: cache(s, max_len=x), 2**64, "max_len is"),
    (lambda s, x: cache(s, max_len=x), 2**62, "pass the address space"),
    (lambda s, x: cache(s, tile=x), 2**64, "tile is"),
    (lambda s, x: cache(s, num_layers=x), 2**64, "num_layers is"),
    (lambda s, x: cache(s, num_layers=x), 10**9, "num_layers 1000000000 needs"),
    (lambda s, x: cache(s, num_kv_heads=x), 2**62, "each token takes"),
    (lambda s, x: cache(s, num_kv_heads=x, layout="HND"), 2**61, "each token takes"),
    (lambda s, x: cache(s, head_dim=x), 2**64, "head_dim is"),
    (lambda s, x: cache(s, head_dim=x), "8", "head_dim is a str: give an integer"),
    (lambda s, x: cache(s, value_head_dim=x), -1, "value_head_dim is -1: it must be at least 0"),
    (lambda s, x: cache(s, bands=x), 1.5, "bands is a float: give an integer"),
    (lambda s, x: cache(s, bands=x), 5, "bands is 5: 4 layers"),
    (lambda s, x: cache(s, layer_group=x), 2**64, "layer_group is"),
    (lambda s, x: cache(s, windows=x), [1.5] * 4, "a window is a float: give an integer"),
    (
        lambda s, x: vtensor.Pool(budget=4096, page_size=4096, shared_budget=x),
        "\udc80",
        "give the name of a shared",
    ),
    (
        lambda s, x: vtensor.Pool(budget=4096, page_size=4096, shared_budget=x),
        "a\0b",
        "give the name of a shared",
    ),
    (lambda s, x: vtensor.Pool(budget=4096, page_size=4096, shared_budget=x), "a/b", "shared"),
    (lambda s, x: vtensor.Pool(budget=4096, page_size=4096, shared_budget=x), "x" * 65, "1 to 64"),
    (
        lambda s, x: vtensor.Pool(budget=4096, page_size=4096, shared_budget=x),
        "",
        "give the name of a shared",
    ),
    (lambda s, x: vtensor.Pool(budget=4096, page_size=4096, shared_budget=x), 5, "give the name of a shared"),
    (lambda s, x: vtensor.Pool(shared_budget=x), "a", "budget is not given"),
]


class Scene:
    def __init__(self, pool):
        self.pool = pool
        self.t = vtensor.empty(0, 8, grow_dim=0, capacity=64, pool=pool)
        self.rows = vtensor.zeros(2, 1, grow_dim=1, capacity=64, pool=pool)
        self.arena = vtensor.Arena(4 * 4096, pool=pool)
        self.cache = vtensor.KVCache(4, 1, 8, 4, 16, torch.float32, bands=2, pool=pool)
        self.slot = self.cache.alloc()
        self.cache.step([1, 0, 0, 0])
        self.kv = torch.ones(1, 1, 8)


@pytest.fixture
def scene():
    with open_pool("host") as pool:
        yield Scene(pool)


@pytest.mark.parametrize(("call", "argument", "words"), CASES, ids=[words[:40] for _, _, words in CASES])
def test_it_is_refused_in_words(scene, call, argument, words):
    before = scene.pool.stats().pages_used
    with pytest.raises((vtensor.InvalidArgument, vtensor.CapacityExceeded)) as caught:
        call(scene, argument)
    message = str(caught.value)
    assert words in message and WORDS.match(message), message
    assert scene.cache.lengths == [1, 0, 0, 0] and scene.pool.stats().pages_used == before


@pytest.mark.parametrize(
    "number", [4, Four(), np.int64(4), torch.tensor(4)], ids=["int", "index", "numpy", "torch"]
)
def test_integers_of_any_kind(host, number):
    """As torch takes them."""
    with vtensor.KVCache(
        num_layers=number,
        num_kv_heads=number,
        head_dim=number,
        max_batch=number,
        max_len=number,
        value_head_dim=number,
        bands=number,
        layer_group=1,
        tile=number,
        lookahead=number,
        windows=[number] * 4,
        pool=host,
        dtype=torch.float32,
    ) as made:
        assert made[3][0].shape == (4, 4, 4, 4) and len(made.bands) == 4


@pytest.mark.parametrize(
    "one", [torch.tensor(0), np.array(0), np.int64(0), torch.tensor([0]), np.array([0]), (0,)]
)
def test_a_slot_of_any_kind(scene, one):
    scene.cache.swap_out(one)
    assert scene.cache.lengths == [0, 0, 0, 0]
    scene.pool.wait_idle()
    assert scene.cache.swap_in(one)
    assert scene.cache.lengths == [1, 0, 0, 0]


def test_tables_are_refused_before_they_are_made():
    """Under a limit of addresses that they pass many times."""
    run_snippet(
        """
        import resource
        have = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (have + (1 << 30),) * 2)
        for sizes in ({"max_batch": 10**9}, {"num_layers": 10**9}):
            options = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "max_batch": 1, "max_len": 16}
            try:
                vtensor.KVCache(**(options | sizes), device="cpu")
            except vtensor.CapacityExceeded as error:
                assert "GiB free" in str(error) or "MiB free" in str(error), error
            else:
                raise AssertionError(sizes)
        """
    ).check()


@pytest.mark.parametrize("kind", ["RuntimeError", "MemoryError"])
def test_host_memory_that_is_refused_while_falling_asleep(host, monkeypatch, kind):
    def refuse(*sizes, **options):
        raise {"RuntimeError": RuntimeError, "MemoryError": MemoryError}[kind]("you tried to allocate")

    t = vtensor.empty(3, grow_dim=0, capacity=64, pool=host).fill_(3)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", refuse)
        with pytest.raises(vtensor.OutOfPages, match=r"\[Pool.sleep\] need .* host memory.*you tried"):
            host.sleep(contents="host")
    assert t.eq(3).all() and host.stats().nbytes_asleep == 0
    t.close()

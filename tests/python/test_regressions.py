"""Defects that the rest of the tests had once let pass."""

from __future__ import annotations

import copy
import os
import sys
import textwrap
import time
import weakref
from contextlib import suppress
from itertools import count
from unittest.mock import Mock

import pytest
import torch
from vtensor.integrations.flash_attention import flash_attn_with_kvcache
from vtensor.integrations.flex_attention import CacheMask
from vtensor.integrations.full_extent import FullExtent

import vtensor
from interrupts import Interrupt
from support import received, run_process, run_snippet
from vtensor import plot, sharing, testing
from vtensor.pool import open_pools
from vtensor.replay import read_trace

PAGE = 1024  # float32 in 4 KiB


def empty(pool, length=0, make=vtensor.empty, **options):
    t = make(0, grow_dim=0, capacity=64 * PAGE, pool=pool, **options)
    return t.extend(length)


@pytest.fixture
def shareable():
    pool = vtensor.Pool("cpu", page_size=4096, shareable=True)
    yield pool
    pool.close()


def test_a_fork_shows_nothing_that_its_parent_truncated(pool):
    """I7: a fork is a new owner of what it grows into."""
    t = empty(pool, 10)
    t.fill_(9)
    f = t.truncate(2).fork().extend(5)
    assert f.tolist() == [9, 9, 0, 0, 0, 0, 0]
    assert t.extend(2).tolist() == [9, 9, 9, 9]  # its own bytes


def test_rows_chosen_from_a_fork_show_nothing_that_its_parent_truncated(pool):
    """I7: neither in place nor in a range of their own."""
    t = vtensor.empty(2, 10, grow_dim=1, capacity=100, dtype=torch.uint8, pool=pool).fill_(9)
    f = t.truncate(2).fork()
    f.reindex([1, 0, 1])
    assert f.extend(5).tolist() == [[9, 9, 0, 0, 0, 0, 0]] * 3


def test_a_tensor_that_moved_with_a_view_alive_can_be_written(simcuda):
    """I6 on CUDA: its pages are shared with the view, and a write to it unshares them."""
    page = simcuda.page_size // 4
    t = vtensor.empty(0, grow_dim=0, capacity=8 * page, pool=simcuda, when_full="move").extend(6 * page)
    t.fill_(1)
    t.shrink(2 * page, front=True)
    view = t[:10]
    t.extend(3 * page).fill_(3)
    assert t.eq(3).all() and view.eq(1).all()


@pytest.mark.parametrize("pages", [1, 3])
def test_a_failed_own_leaves_its_bytes_to_no_tensor(pool_factory, pages):
    """I7: a page that got our bytes and was put back is zeroed for its last owner too, also if only some of
    the pages were copied."""
    cuda = pool_factory("simcuda")
    page = cuda.page_size // 4
    length = pages * page
    refused = set()
    for skip in range(60):  # some refusals are met by trying again
        other = vtensor.empty(0, grow_dim=0, capacity=2 * length, pool=cuda).extend(length)
        other.fill_(5)
        t = vtensor.empty(0, grow_dim=0, capacity=2 * length, pool=cuda).extend(length)
        t.fill_(1234)
        f = t.fork()
        other.truncate(0)
        try:
            with testing.fail_after(cuda, skip):
                t.unshare(0, length)
        except vtensor.DriverError as error:
            refused.add(error.call)
        other.extend(length)
        assert not other.eq(1234).any(), skip
        t.close(), f.close(), other.close()
    assert {"cuMemcpyDtoDAsync", "cuEventRecord", "cuMemMap"} <= refused


def test_a_pool_closes_all_it_can_and_closes_again(host):
    t, u = empty(host, 3), empty(host, 3)
    with testing.fail_after(host, 0, refuse=1000):
        host.close()
    assert t.closed and u.closed and host.closed
    host.close()
    testing.check_invariants(host)


@pytest.mark.parametrize("refused", [False, True])
def test_an_interrupted_close_leaves_a_pool_as_open_as_it_was(host, monkeypatch, refused):
    """Open, unless a close before it was refused."""
    t = empty(host, 3)
    for error in [vtensor.TimedOut] * refused + [KeyboardInterrupt]:
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(vtensor.VTensor, "close", Mock(side_effect=error))
            host.close()
    assert host.closed == refused and not t.closed


def test_a_reallocation_that_cannot_be_published_leaves_the_tensor(host, monkeypatch):
    t = empty(host, 7)
    t.fill_(3)
    with monkeypatch.context() as patch:
        patch.setattr("vtensor.tensor._coreless", lambda *args: object())  # which torch gives no storage
        with pytest.raises(TypeError):
            t.reallocate(1 << 20)
    assert not t.closed and t.tolist() == [3] * 7 and t.extend(1).length == 8


@pytest.fixture
def interrupt(monkeypatch):
    """Interrupts the making of the n-th torch storage from now on."""

    def at(n):
        made = count(1)

        def init(self, *args, **options):
            if next(made) == n:
                raise Interrupt

        monkeypatch.setattr(torch.storage._StorageBase, "__init__", init)

    return at


def test_an_interrupted_reserve_leaves_a_capacity_that_is_reserved(host, interrupt):
    t = empty(host)
    interrupt(2)
    with pytest.raises(Interrupt):
        vtensor.together.reserve(t, 16)
    assert t.capacity == 16
    with pytest.raises(vtensor.CapacityExceeded):
        t.extend(17)
    assert t.extend(16).length == 16


def test_an_interrupted_shrink_asks_for_no_page(pool_factory, kind, interrupt):
    """I2, I3, I17: no memory is left for pages of its own."""
    pool = pool_factory(kind, 4, prefetch=0)
    t = empty(pool, 4 * PAGE)
    t.fill_(3)
    f = t.fork()
    interrupt(1)
    with pytest.raises(Interrupt):
        f.truncate(0)
    assert f.length == t.length and f.eq(3).all() and f.fork().eq(3).all()
    testing.check_invariants(pool)


def test_a_finalizer_may_ask_for_the_default_pool_while_it_is_made():
    """I11, I12."""
    run_snippet("""
        import gc, vtensor.pool

        made = []

        class Cycle:
            def __init__(self):
                self.itself = self
            def __del__(self):
                made.append(vtensor.empty(1, grow_dim=0, capacity=4))

        class Collected(vtensor.Pool):
            def __init__(self, *args):
                gc.collect()  # as the allocation of any object may
                super().__init__(*args)

        vtensor.pool.Pool = Collected
        gc.disable()
        Cycle()
        made.append(vtensor.empty(1, grow_dim=0, capacity=4))
        assert len(made) == 2 and made[0].pool is made[1].pool is vtensor.default_pool()
    """).check()


def test_none_among_the_options_of_empty_like_stands_for_its_tensor(pool):
    t = vtensor.empty(3, grow_dim=0, capacity=9, dtype=torch.float64, pool=pool)
    like = vtensor.empty_like(t, dtype=None, device=None, grow_dim=None, when_full=None)
    assert (like.dtype, like.pool, like.grow_dim, like.when_full) == (t.dtype, pool, 0, "raise")
    plain = torch.ones(3, dtype=torch.float64)
    assert vtensor.empty_like(plain, 9, pool, grow_dim=0, dtype=None).dtype == plain.dtype


def test_a_cache_on_device_0_of_the_cpu_takes_a_pool_of_the_cpu(host):
    with vtensor.KVCache(1, 1, 4, 3, 64, device="cpu:0", pool=host) as cache:
        assert cache.pool is host
    with pytest.raises(vtensor.InvalidArgument, match="leave one of them out"):
        vtensor.KVCache(1, 1, 4, 3, 64, device="cuda:0", pool=host)


def test_a_closed_reader_says_so(shareable):
    t = vtensor.zeros(3, 4, grow_dim=0, capacity=16, pool=shareable)
    reader = received(t)
    assert torch.equal(reader.alias(), t)
    reader.close()
    for read in (
        lambda: reader.alias(),
        lambda: reader.numpy(),
        lambda: reader.data,
        lambda: copy.copy(reader),
        lambda: reader.pages(),
        lambda: reader.capacity,
        lambda: reader.address,
    ):
        with pytest.raises(vtensor.Closed, match="receive the tensor again"):
            read()


def test_a_reader_whose_close_was_refused_is_closed(shareable, monkeypatch):
    reader = received(vtensor.zeros(3, 4, grow_dim=0, capacity=16, pool=shareable))
    core = reader._core
    with monkeypatch.context() as patch, pytest.raises(vtensor.TimedOut):
        patch.setattr(sharing, "ReaderCore", Mock(close=Mock(side_effect=vtensor.TimedOut)))
        reader.close()
    assert reader.closed and not core.closed and repr(reader) == "<Reader, closed>"
    with pytest.raises(vtensor.Closed):
        reader.sync()
    reader.close()
    assert core.closed


class Rotary(torch.nn.Linear):
    """With a buffer that state dicts leave out, as rotary embeddings have one, and an empty parameter."""

    def __init__(self, **options) -> None:
        super().__init__(4, 4, **options)
        self.absent = torch.nn.Parameter(torch.ones(0, 4, **options))
        self.register_buffer("frequencies", torch.ones(4), persistent=False)


def test_a_reader_of_a_module_has_the_state_dict_of_that_module(shareable):
    module = torch.nn.Sequential(Rotary(), Rotary())
    vtensor.adopt(module, shareable)
    reader = received(vtensor.share(module))
    assert reader.state_dict().keys() == module.state_dict().keys()
    other = torch.nn.Sequential(Rotary(device="meta"), Rotary(device="meta"))
    other.load_state_dict(reader.state_dict(), assign=True)
    assert torch.equal(other(torch.ones(4)), module(torch.ones(4)))
    del other
    reader.close()
    with pytest.raises(vtensor.Closed):
        reader.state_dict()


def test_a_module_that_was_moved_again_is_read_where_it_is():
    pools = [vtensor.Pool("cpu", page_size=4096, budget=1 << 20, shareable=True) for _ in range(5)]
    module = torch.nn.Linear(4, 4)
    for pool in pools:
        vtensor.adopt(module, pool, tag="before")
    vtensor.adopt(module, pools[2])
    with received(vtensor.share(module)) as reader:
        module.weight.data.fill_(3)
        assert reader.state_dict()["weight"].eq(3).all()
    del module
    for pool in pools:
        pool.close()


class Scaled(torch.nn.Linear):
    """A module with a tensor in its state dict that is made for it, as those of FP8 layers have one."""

    def get_extra_state(self):
        return torch.ones(3)


def test_a_module_with_extra_state_can_be_read(shareable):
    module = Scaled(4, 4)
    vtensor.adopt(module, shareable)
    with received(vtensor.share(module)) as reader:
        assert set(reader.state_dict()) == {"weight", "bias"}


def test_a_reader_of_a_cache_is_indexed_as_the_cache_is(shareable):
    with vtensor.KVCache(3, 1, 4, 2, 16, pool=shareable) as cache, received(cache) as reader:
        assert len(list(reader)) == len(list(cache)) == 3
        assert reader[-1][0] is reader[2][0] and reader[1:] == [reader[1], reader[2]]
        with pytest.raises(IndexError, match="layers 0 to 2"):
            reader[3]


def test_a_row_of_a_mask_sees_nothing_before_its_start():
    """Also within the tile of 128 positions in which it starts."""
    starts, lengths = [130, 5], [300, 200]
    mask = CacheMask(None, 2, 1, 512).update(lengths, starts=starts)
    row, position, query = torch.arange(2)[:, None], torch.arange(512), torch.tensor(0)
    seen = mask.block_mask.mask_mod(row, query, query, position)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert seen[row].nonzero().flatten().tolist() == list(range(start, length))
    mask.update(lengths)
    assert mask.block_mask.mask_mod(torch.tensor(0), query, query, torch.tensor(0))


@pytest.mark.parametrize("numbers", [5.7, [5.0, 6.2], torch.tensor([5.7, 6.2]), torch.tensor([2**32 + 5, 7])])
def test_numbers_of_a_mask_are_not_rounded_nor_cut_to_32_bits(numbers):
    mask = CacheMask(None, 2, 1, 512)
    for name in ("lengths", "starts"):
        with pytest.raises(vtensor.InvalidArgument, match=f"{name} are .*: give integers"):
            mask.update(**{"lengths": 9, name: numbers})
    assert mask.known == [1, 1]


def test_what_is_made_in_inference_mode_is_used_outside(host):
    t = vtensor.zeros(2, 4, grow_dim=0, capacity=300, pool=host)
    with torch.inference_mode():
        mask, full = CacheMask(None, 2, 1, 300), FullExtent(t)
    assert mask.update([5, 7]).known == [5, 7]
    assert torch.equal(mask.block_mask.kv_num_blocks.flatten(), torch.tensor([1, 1]))
    full.tensor[:2].fill_(3)
    assert t.eq(3).all()
    with torch.inference_mode():
        mask.update([200, 7])
    del full


def test_nothing_is_appended_before_position_0_of_a_plain_cache():
    """I2: torch's narrow counts negative positions from the end."""
    k, v, new = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 2, 4), torch.ones(1, 1, 2, 4)
    with pytest.raises(vtensor.InvalidArgument, match="cache_seqlens is -1"):
        flash_attn_with_kvcache(new, k, v, new, new, cache_seqlens=-1, backend="torch")
    assert k.eq(0).all() and v.eq(0).all()


@pytest.mark.parametrize(
    "operation",
    [
        lambda pool: pool.wait_idle(),
        lambda pool: pool.sleep(contents="host"),
        lambda pool: testing.assert_no_leaks(pool).__enter__(),
        lambda pool: plot._reserved_now([]),
        lambda pool: pool.close(),
    ],
)
def test_a_tensor_is_made_while_a_pool_looks_through_its_tensors(monkeypatch, operation):
    """By a finalizer or a signal handler, which run between any two bytecodes."""
    pool = vtensor.Pool("cpu", page_size=4096, prefetch=0)
    made = [vtensor.zeros(3, grow_dim=0, capacity=64, pool=pool) for _ in range(3)]
    once = iter([1])

    def interrupted(through):
        def iterate(weak):
            for entry in through(weak):
                if weak is pool._tensors and next(once, None):
                    with suppress(vtensor.Closed):  # of a pool that is being closed
                        made.append(vtensor.zeros(3, grow_dim=0, capacity=64, pool=pool))
                yield entry

        return iterate

    for name in ("values", "items", "keys", "__iter__", "valuerefs", "itervaluerefs"):
        iterate = interrupted(getattr(weakref.WeakValueDictionary, name))
        monkeypatch.setattr(weakref.WeakValueDictionary, name, iterate)
    operation(pool)
    assert next(once, None) is None
    monkeypatch.undo()
    pool.close()
    assert all(t.closed for t in made)


def test_a_tensor_that_a_close_in_another_thread_meets_is_not_handed_out(monkeypatch):
    """That close is interrupted just behind it, and leaves the pool open."""
    pool = vtensor.Pool("cpu", page_size=4096, prefetch=0)
    register, close = pool._register, vtensor.VTensor.close

    def met(t):
        pool._closed = True
        register(t)

    def interrupted(t):
        close(t)
        pool._closed = False

    monkeypatch.setattr(pool, "_register", met)
    monkeypatch.setattr(vtensor.VTensor, "close", interrupted)
    with pytest.raises(vtensor.Closed):
        vtensor.zeros(3, grow_dim=0, capacity=64, pool=pool)
    monkeypatch.undo()
    pool.close()


def test_a_trace_without_a_time_zone_has_no_summer_time(monkeypatch, tmp_path):
    """Clocks in New York were put back at 2:00 that day, and forward at 2:00 the other."""
    file = tmp_path / "trace.csv"
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        for day in ("2023-11-05", "2023-03-12"):
            rows = [f"{day} 00:30:00.0000000,10,5", f"{day} 03:30:00.5000000,10,5"]
            file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
            assert [row.arrival for row in read_trace(file)] == [0, 3 * 3600 + 0.5]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_one_tensor_as_k_and_v_grows_once(host):
    t = vtensor.zeros(1, 3, 2, 4, grow_dim=1, capacity=64, pool=host)
    new = torch.randn(1, 1, 2, 4)
    out = flash_attn_with_kvcache(new, t, t, new, new, cache_seqlens=3, causal=True, backend="torch")
    assert t.length == 4 and torch.equal(t[:, 3:], new) and out.shape == new.shape


def test_pools_are_looked_through_where_the_stack_is_full(monkeypatch):
    """A RecursionError is a RuntimeError, as that of a set that changes is, and would come again for ever."""
    refused = iter([1])

    def too_deep(weak):
        if next(refused, None):
            raise RecursionError
        yield from ()

    monkeypatch.setattr(weakref.WeakSet, "__iter__", too_deep)
    with pytest.raises(RecursionError):
        open_pools()


def test_a_tensor_that_dlpack_cannot_describe_is_where_it_is():
    """torch's name of its device was read after it was freed. Python's debug allocator overwrites what is."""
    code = """
        import torch, vtensor
        t = vtensor.empty(0, 2, grow_dim=0, capacity=9, dtype=torch.bits8)
        t.append(torch.ones(3, 2, dtype=torch.uint8).view(torch.bits8))
        assert t[...].view(torch.uint8).tolist() == [[1, 1]] * 3
    """
    environment = {**os.environ, "PYTHONMALLOC": "debug"}
    run_process(sys.executable, "-c", textwrap.dedent(code), env=environment).check()

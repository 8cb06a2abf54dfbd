"""Torch's modes change what the program's own tensors are, and nothing of vtensor's."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import inspect
import sys

import pytest
import torch
from torch._C._functorch import _func_decrement_nesting, _func_increment_nesting
from torch._functorch.eager_transforms import grad_increment_nesting, jvp_increment_nesting
from torch._functorch.vmap import vmap_increment_nesting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vtensor
from support import received, run_snippet
from vtensor import testing, together
from vtensor._base.torch_modes import without_modes

PAGE = 4096
WIDTH = PAGE // 4  # int32 of a page


class Meta(TorchFunctionMode):
    """Puts on the meta device what names another one, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.tensor, torch.zeros, torch.as_tensor, torch.ones, torch.arange):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class Doubles(TorchDispatchMode):
    """Doubles what is copied."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            args = (args[0], args[1] * 2, *args[2:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def transformed():
    """What runs inside functions that torch.func has transformed."""
    with grad_increment_nesting(), vmap_increment_nesting(2, "error"), jvp_increment_nesting():
        _func_increment_nesting(True)
        try:
            yield
        finally:
            _func_decrement_nesting()


MODES = {
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "fake, real tensors allowed": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "a mode of functions": Meta,
    "a mode of operators": Doubles,
    "transforms": transformed,
}


class Given:
    """What the program hands over, made before the mode."""

    def __init__(self, pool):
        device = pool._tensor_device
        numbers = torch.arange(1, 3 * WIDTH + 1, dtype=torch.int32, device=device)
        self.rows = numbers.reshape(3, WIDTH)
        self.two = torch.stack([self.rows[:2], self.rows[1:]])
        self.index = torch.tensor([1, 0, 1])
        self.states = torch.arange(1, 9, dtype=torch.float32, device=device).reshape(4, 1, 2)
        self.keys, self.values = self.states[:3], self.states[1:]
        self.tokens = torch.tensor([1, 2])
        self.lengths = torch.tensor([3, 2, 0, 0])
        torch.manual_seed(0)
        self.module = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.module.parameters(), momentum=0.9)
        self.shared = torch.nn.Linear(2, 2)
        self.module(torch.ones(8)).sum().backward()
        self.optimizer.step()


class Walk:
    """Calls everything once, and notes what the memory holds."""

    def __init__(self, pool, given, folder):
        self.pool, self.given, self.folder, self.seen = pool, given, folder, []

    def note(self, name, t, *index):
        """The bytes of a part of a tensor, without the mode."""
        with without_modes():
            part = t[index or ...].contiguous()
            self.seen.append((name, type(t).__name__, ctypes.string_at(part.data_ptr(), part.nbytes)))

    def tensors(self):
        pool, given = self.pool, self.given
        options = {"dtype": torch.int32, "pool": pool}
        t = vtensor.empty(0, WIDTH, grow_dim=0, capacity=64, **options)
        t.append(given.rows).extend(1).shrink(1).prepare(2)
        self.note("append", t)
        self.note("alias", t.alias())
        fork = t.fork()
        fork.append(given.rows).unshare(0, 1)
        self.note("fork", fork)
        self.note("what was forked", t.truncate(2))
        self.note("deepcopy", copy.deepcopy(t))
        self.note("copy", copy.copy(t))
        self.note("data", t.data)
        t.record_stream(0)
        for what in (repr(t), t.pages(), t.address, t.nbytes_mapped, t.nbytes_reserved, t.when_full):
            assert what
        moved = t.reallocate(80)
        assert t.closed and moved.requires_grad_(False) is moved and moved.requires_grad is False
        self.note("reallocate", moved)
        together.reserve(moved, 90)
        self.note("reserve", moved)
        for refuse in (moved.share_memory_, moved.resize_, moved.resize_as_, moved.set_):
            with pytest.raises(vtensor.VTensorError):
                refuse()
        rows = vtensor.zeros(2, 0, WIDTH, grow_dim=1, capacity=8, **options).append(given.two)
        self.note("rows", rows.reindex([1, 0]))
        self.note("rows by a tensor", rows.reindex(given.index))
        together.reindex([rows], [[0, 2]])
        self.note("reindex", rows)
        self.note("from_tensor", vtensor.from_tensor(given.rows, 0, 9, pool=pool))
        assert vtensor.empty_like(moved).capacity == 90 and moved.length == 2 and moved.pool is pool
        with vtensor.lease(moved, rows), rows:
            pass
        assert str(moved).startswith("tensor([[") and moved.__dlpack__()
        if self.pool.device.type == "cpu":
            assert moved.numpy()[0, 0] == 1

    def cache(self):
        given = self.given
        cache = vtensor.KVCache(2, 1, 2, 4, 16, torch.float32, bands=2, pool=self.pool)
        first, second = cache.alloc([1, 2, 3]), cache.alloc()
        assert cache.fits(given.lengths) and not cache.waits_for_others(given.lengths)
        cache.prepare(given.lengths)
        assert cache.step(given.lengths) and cache.lengths == [3, 2, 0, 0]
        cache.write(0, first, 0, given.keys, given.values)
        cache.write(1, [first, second], [0, 0], given.states, given.states, counts=[2, 2])
        self.note("written", cache[0][0], first, slice(3))
        self.note("written in two", cache[1][1], first, slice(2))
        self.note("written in the other", cache[1][0], second, slice(2))
        cache.publish(first, given.tokens)
        cache.unshare(first, 0, 1)
        (fork,) = cache.fork(first)
        first, fork = cache.reorder([first, fork], [fork, fork])
        self.note("forked", cache[0][0], fork, slice(3))
        assert cache.bands and cache.bands_away(fork) == [] and cache.length(fork) == 3
        cache.swap_out(second)
        self.pool.wait_idle()
        assert cache.swap_in([second])
        cache.wait(second)
        self.note("swapped", cache[1][0], second, slice(2))
        cache.truncate(second, 1)
        cache.free(second)
        cache.record_stream()
        assert cache.pages(fork) and cache.stats().slots_used == 2 and repr(cache) and cache.num_layers == 2
        assert cache.pool is self.pool and not cache.closed
        with cache:
            pass

    def arena(self):
        arena = vtensor.Arena(8 * PAGE, pool=self.pool, tag="blocks")
        arena.prepare([(0, 9)])
        assert arena.map([(0, PAGE), (PAGE, 2 * PAGE)]) and arena.holds([(0, PAGE)])
        ctypes.memset(arena.tensor.data_ptr(), 7, PAGE)
        self.note("arena", arena.tensor, slice(PAGE))
        arena.unmap([(PAGE, 2 * PAGE)])
        assert arena.trim() >= 0 and arena.pages() and arena.stats().pages_active == 1
        blocks = vtensor.Blocks(arena, 8, [(0, PAGE, PAGE)])
        blocks.prepare([3])
        blocks.hold([4, 5])
        blocks.begin_step()
        blocks.release([4])
        blocks.end_step()
        assert len(blocks.whole([4, 5])) == 2 and blocks.mapped >= 1 and blocks.trim([4]) >= 0
        arena.record_stream()
        assert repr(blocks) and repr(arena) and arena.pool is self.pool and not arena.closed
        with arena:
            pass

    def sleep(self):
        pool, given = self.pool, self.given
        weights = vtensor.adopt(given.module, pool)
        assert weights and vtensor.adopt(given.optimizer, pool, tag="state")
        t = vtensor.empty(0, WIDTH, grow_dim=0, capacity=64, dtype=torch.int32, pool=pool).append(given.rows)
        for contents in ("host", self.folder, "discard"):
            assert pool.sleep(contents=contents) > 0
            pool.wake()
            self.note(f"slept: {contents == self.folder or contents}", t)
            self.note("weights", given.module.weight)
            (state,) = [s for p, s in given.optimizer.state.items() if p is given.module.weight]
            self.note("state", state["momentum_buffer"])

    def readers(self):
        given = self.given
        with testing.host_pool(page_size=PAGE, budget=64 * PAGE, strict_holes=False, shareable=True) as pool:
            t = vtensor.empty(0, WIDTH, grow_dim=0, capacity=64, dtype=torch.int32, pool=pool)
            reader = received(t.append(given.rows.cpu()))
            t.append(given.rows.cpu())
            assert reader.sync() and reader.length == 6 and reader.capacity == 64 and reader.grow_dim == 0
            self.note("read", reader)
            self.note("read by an alias", reader.alias())
            assert not reader.numpy().flags.writeable
            assert reader.address and reader.when_full == "raise" and len(reader.pages()) == 6
            assert reader.nbytes_mapped == 6 * PAGE and reader.nbytes_reserved == 64 * PAGE and repr(reader)
            with pytest.raises(vtensor.VTensorError):
                assert reader.pool
            reader.record_stream(0)
            for name, member in vars(vtensor.Reader).items():
                if (member.__doc__ or "").startswith("Raises VTensorError: a reader reads."):
                    with pytest.raises(vtensor.VTensorError, match=f"Reader.{name}"):
                        member(reader)
            reader.close()
            arena = vtensor.Arena(PAGE, pool=pool)
            arena.map([(0, PAGE)])
            ctypes.memset(arena.tensor.data_ptr(), 7, PAGE)
            with received(arena) as of_arena:
                self.note("read in an arena", of_arena.tensor)
            cache = vtensor.KVCache(1, 1, 2, 2, 16, torch.float32, pool=pool)
            with received(cache) as of_cache:
                slot = cache.alloc()
                cache.step([2 if i == slot else 0 for i in range(2)])
                assert of_cache.sync() and of_cache.lengths[slot] == 2
                assert of_cache[0][0].shape == cache[0][0].shape
            vtensor.adopt(given.shared, pool)
            of_module = received(vtensor.share(given.shared))
            assert not of_module.closed and of_module.sync() is False
            self.note("read of a module", of_module.state_dict()["weight"])
            of_module.close()
            arena.close()
            cache.close()

    def everything(self):
        pool = self.pool
        with vtensor.trace.record() as recording:
            for part in (self.tensors, self.cache, self.arena, self.sleep, self.readers):
                part()
        assert recording.events()
        pool.budget = pool.budget
        assert pool.trim() and pool.stats().budget == pool.budget and repr(pool) and pool.page_size == PAGE
        assert pool.device and vtensor.default_pool("cpu").device.type == "cpu"
        with pytest.raises(vtensor.VTensorError), vtensor.memory(pool):
            pass
        vtensor.explain_faults()
        pool.close()
        assert pool.closed
        return self.seen


def public_calls():
    """The names of all public functions, methods and properties."""
    found = set()
    for name in vtensor.__all__:
        thing = getattr(vtensor, name)
        if inspect.isfunction(thing):
            found.add(thing.__qualname__)
        elif inspect.isclass(thing) and not issubclass(thing, (Exception, tuple)):
            for key, member in vars(thing).items():
                member = getattr(member, "fget", member)
                if not key.startswith("_") and inspect.isfunction(member):
                    found.add(member.__qualname__)
    return found


@contextlib.contextmanager
def noting_calls():
    """The names of all functions called in the ``with``."""
    called = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_qualname) if event == "call" else None)
    try:
        yield called
    finally:
        sys.setprofile(None)


@pytest.fixture
def walked(pool_factory, tmp_path):
    """Walks in a new pool, under a mode."""

    def walk(kind, mode):
        pool = pool_factory(kind, pages=512)
        given = Given(pool)
        with mode():
            return Walk(pool, given, tmp_path).everything()

    return walk


def test_the_walk_has_every_public_call(pool_factory, tmp_path):
    pool = pool_factory("host", pages=512)
    walk = Walk(pool, Given(pool), tmp_path)
    with noting_calls() as called:
        walk.everything()
    wrapped = {"memory", "VTensor.numpy"}  # by contextlib; called on the host alone
    assert public_calls() - called - wrapped == set()


PLAIN: dict[str, list] = {}  # what the walk gives without a mode, by the kind of its pool


@pytest.mark.parametrize("mode", MODES)
def test_every_call_does_the_same_in_a_mode(walked, kind, mode):
    if kind not in PLAIN:
        PLAIN[kind] = walked(kind, contextlib.nullcontext)
    plain, moded = PLAIN[kind], walked(kind, MODES[mode])
    assert len(plain) > 25 and any(any(content) for _, _, content in plain)
    assert plain == moded


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_tensors_without_memory_are_refused(pool, mode):
    """Made in the mode, and given to calls that read them."""
    t = vtensor.empty(0, 4, grow_dim=0, capacity=64, pool=pool)
    rows = vtensor.zeros(2, 1, grow_dim=1, capacity=64, pool=pool)
    cache = vtensor.KVCache(1, 1, 2, 2, 16, torch.float32, pool=pool)
    slot = cache.alloc()
    cache.step([2, 0])
    with mode():
        numbers = torch.ones(2, dtype=torch.long)
        states = torch.ones(2, 1, 2)
        for call in (
            lambda: t.append(torch.ones(3, 4)),
            lambda: vtensor.from_tensor(torch.ones(3, 4), 0, 9, pool=pool),
            lambda: rows.reindex(numbers),
            lambda: cache.step(numbers),
            lambda: cache.alloc(numbers),
            lambda: cache.swap_out(numbers),
            lambda: cache.write(0, slot, 0, states, states),
            lambda: cache.write(0, numbers, numbers, states, states),
            lambda: vtensor.adopt([states], pool),
        ):
            with pytest.raises(vtensor.InvalidArgument, match=r"^\[.+\] .+: .+"):
                call()
    assert t.length == 0 and cache.lengths == [2, 0]
    cache.close()


def test_ranks_agree_under_a_default_device_without_memory():
    pytest.importorskip("transformers")
    run_snippet(
        """
        import torch.distributed as dist
        from transformers import DynamicCache
        from vtensor.integrations.tensor_parallel import in_agreement
        from vtensor.integrations.transformers import VTensorCache
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model, cache = torch.nn.Linear(2, 2), VTensorCache.over(DynamicCache())
        with torch.device("meta"), in_agreement(model, cache):
            pass
        print("agreed")
        """
    ).check()


def test_a_mask_is_updated_under_a_default_device_without_memory():
    from vtensor.integrations.flex_attention import CacheMask

    plain, moded = CacheMask(None, 2, 1, 512), CacheMask(None, 2, 1, 512)
    plain.update([150, 97])
    with torch.device("meta"):
        moded.update([150, 97])
    assert moded.lengths.tolist() == plain.lengths.tolist() == [150, 97]
    assert torch.equal(moded._indices, plain._indices) and torch.equal(moded._counts, plain._counts)

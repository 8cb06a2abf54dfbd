"""KVCache.write: K and V of one slot or of many, checked before anything is written."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

import vtensor
from kv_support import SHAPES, UNIT, grown, make_cache
from vtensor.testing import kv_model
from vtensor.testing.kv_model import check_contents, expected


def slots_of(cache, *lengths: int) -> list[int]:
    slots = [cache.alloc() for _ in lengths]
    for slot, length in zip(slots, lengths, strict=True):
        assert grown(cache, slot, length)
    return slots


def states(cache, layer: int, values) -> dict[str, torch.Tensor | None]:
    return dict(zip("kv", expected(cache, layer, values), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_of_many_slots_at_once(pool_factory, kind, shape):
    """I2: side by side, as varlen kernels take them, as a batch, and one slot alone."""
    with make_cache(pool_factory(kind, 400), shape) as cache:
        a, b, c = slots_of(cache, 9, 17, 6)
        contents = {a: list(range(9)), b: list(range(100, 117)), c: list(range(200, 206))}
        for layer in range(len(cache)):
            ragged = contents[c][:4] + contents[a][:7] + contents[b][:3]
            cache.write(layer, [c, a, b], (0, 0, 0), **states(cache, layer, ragged), counts=[4, 7, 3])
            cache.write(layer, b, 3, **states(cache, layer, contents[b][3:15]))
            batch = states(cache, layer, contents[a][7:] + contents[b][15:] + contents[c][4:])
            two = {name: side if side is None else side.unflatten(0, (3, 2)) for name, side in batch.items()}
            cache.write(layer, torch.tensor([a, b, c]), torch.tensor([7, 15, 4]), **two)
        for slot, values in contents.items():
            check_contents(cache, slot, values, SHAPES[shape].get("windows"))
        cache.write(0, [], [], **states(cache, 0, []), counts=[])


def test_a_batch_of_a_model_is_taken_as_it_is(cache):
    """[slots, heads, tokens, head_dim] transposed, and one token of each slot."""
    slots = slots_of(cache, 3, 5)
    k = torch.randn(2, 2, 1, 32)
    cache.write(1, slots, [2, 4], k.transpose(1, 2), 2 * k.transpose(1, 2))
    for i, (slot, at) in enumerate(zip(slots, (2, 4), strict=True)):
        assert torch.equal(cache[1][0][slot, at], k[i, :, 0])
        assert torch.equal(cache[1][1][slot, at], 2 * k[i, :, 0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_every_type_of_one_byte(pool, dtype):
    """torch writes some of them to one place alone."""
    with vtensor.KVCache(1, 2, 8, 2, 64, dtype, pool=pool) as cache:
        slots = slots_of(cache, 3, 2)
        k = torch.arange(80, dtype=torch.uint8).view(5, 2, 8).clamp(max=1).view(dtype)
        cache.write(0, slots, [0, 0], k, k, counts=[3, 2])
        seen = [cache[0][1][slot, :n].view(torch.uint8) for slot, n in zip(slots, (3, 2), strict=True)]
        assert torch.equal(torch.cat(seen), k.view(torch.uint8))


def test_v_of_a_cache_without_v(pool_factory):
    with make_cache(pool_factory("host", 400), "latent") as cache:
        (slot,) = slots_of(cache, 4)
        k = torch.ones(4, 1, 36)
        with pytest.raises(vtensor.InvalidArgument, match="no V, leave it out"):
            cache.write(0, slot, 0, k, k)
        cache.write(0, slot, 0, k)
        assert cache[0][0][slot, :4].eq(1).all()


def test_what_a_window_has_given_back(pool_factory):
    with make_cache(pool_factory("host", 400), "windows") as cache:
        (slot,) = slots_of(cache, 100)
        cache.write(1, slot, 0, **states(cache, 1, range(100)))  # its queries see them all
        assert grown(cache, slot, 101)
        cache.write(0, slot, 0, **states(cache, 0, range(100)))  # full attention
        with pytest.raises(
            vtensor.InvalidArgument, match="layer 1.*window of 20 has given back those before 81"
        ):
            cache.write(1, slot, 0, **states(cache, 1, range(100)))
        cache.write(1, slot, 81, **states(cache, 1, range(81, 100)))


def test_what_a_window_has_given_back_of_v_alone(pool_factory, kind):
    """A page of K has 8 tokens, one of V 4: V gives its pages back first."""
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 128, "value_head_dim": 256, "windows": [8]}
    with make_cache(pool_factory(kind, 400), **sizes) as cache:
        (slot,) = slots_of(cache, 0)
        for length in range(1, 23):
            assert grown(cache, slot, length)
        with pytest.raises(vtensor.InvalidArgument, match="has given back those before 12"):
            cache.write(0, slot, 9, **states(cache, 0, [1, 2]))
        cache.write(0, slot, 12, **states(cache, 0, range(12, 22)))
        check_contents(cache, slot, range(22), [8])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("several", [False, True])
def test_of_tokens_of_the_cache_itself(pool_factory, layout, several):
    """A slot's tokens move up by one. V is what K was before."""
    with make_cache(pool_factory("host", 400), layout=layout, layer_group=2) as cache:
        (slot,) = slots_of(cache, 8)
        kv_model.write(cache, slot, 0, range(8))
        k = kv_model.rows_of(cache, cache[1][0], slot)
        before = k.clone()
        slots, counts = ([slot, slot], [3, 4]) if several else (slot, None)
        cache.write(1, slots, [1, 4] if several else 1, k[:7], k[:7], counts=counts)
        assert torch.equal(k[1:8], before[:7])
        assert torch.equal(kv_model.rows_of(cache, cache[1][1], slot)[1:8], before[:7])


def test_pages_of_the_written_tokens_alone_are_unshared(pool_factory, kind):  # I6
    with make_cache(pool_factory(kind, 400)) as cache:
        (parent,) = slots_of(cache, 2 * UNIT)
        kv_model.write(cache, parent, 0, range(2 * UNIT))
        fork = cache.fork(parent)[0]
        before = cache.stats().pages_shared
        for layer in range(len(cache)):
            cache.write(layer, fork, 3, **states(cache, layer, [999]))
        assert cache.stats().pages_shared == before // 2
        check_contents(cache, parent, range(2 * UNIT))
        check_contents(cache, fork, [*range(3), 999, *range(4, 2 * UNIT)])


def test_pages_to_unshare_that_are_not_to_be_had(pool_factory):
    with make_cache(pool_factory("host", 4)) as cache:  # one page a range
        (parent,) = slots_of(cache, UNIT)
        kv_model.write(cache, parent, 0, range(UNIT))
        fork = cache.fork(parent)[0]
        with pytest.raises(vtensor.OutOfPages, match="KVCache.write"):
            cache.write(0, fork, 3, **states(cache, 0, [999]))
        check_contents(cache, parent, range(UNIT))
        check_contents(cache, fork, range(UNIT))


def test_behind_a_swap_in(cache):
    """A write over tokens that are being copied in is not overwritten by these."""
    (slot,) = slots_of(cache, 100)
    kv_model.write(cache, slot, 0, range(100))
    cache.swap_out(slot)
    assert cache.swap_in(slot)
    for layer in range(len(cache)):
        cache.write(layer, slot, 50, **states(cache, layer, [999]))
    cache.wait(slot)
    check_contents(cache, slot, [*range(50), 999, *range(51, 100)])


@pytest.mark.parametrize("leaves", ["close", "free", "sleep"])
def test_pages_leave_only_after_a_write(pool, monkeypatch, leaves):
    """Another thread that takes them away waits."""
    cache = make_cache(pool)
    [slot] = slots_of(cache, 5)
    away = {
        "close": cache.close,
        "free": lambda: (cache.free(slot), pool.trim()),
        "sleep": lambda: pool.sleep(contents="host"),
    }
    thread = Thread(target=away[leaves])

    def store_beside(*arguments, store=vtensor.kv.store):
        if not thread.ident:
            thread.start()
            thread.join(0.1)
        assert thread.is_alive()
        store(*arguments)

    monkeypatch.setattr("vtensor.kv.store", store_beside)
    cache.write(0, slot, 0, **states(cache, 0, list(range(5))))
    thread.join()
    pool.close()

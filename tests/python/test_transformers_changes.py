"""Changes of a whole VTensorCache, refused or interrupted anywhere: all layers as before, or all as after."""

from __future__ import annotations

import pytest
import torch

import vtensor
from vtensor import testing

pytest.importorskip("transformers")

import vtensor.integrations.transformers as package
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from vtensor.integrations.transformers import (
    VTensorCache,
    VTensorHybridLayer,
    VTensorHybridSlidingWindowLayer,
    VTensorLayer,
    VTensorSlidingWindowLayer,
)

from interrupts import at_every_bytecode, place
from support import all_calls
from tiny_models import before_and_after, one_thread, pages_left, same, states  # noqa: F401

BATCH, TOKENS, WINDOW = 3, 20, 8
ORDER = torch.tensor([1, 1, 0])
FULL, SLIDING, HYBRID, HYBRID_SLIDING = VTensorLayer, "sliding", VTensorHybridLayer, "hybrid sliding"
KINDS = {
    "sliding": lambda pool: VTensorSlidingWindowLayer(WINDOW, None, pool),
    "hybrid sliding": lambda pool: VTensorHybridSlidingWindowLayer(WINDOW, None, pool),
    "linear": lambda pool: LinearAttentionLayer(),
    FULL: lambda pool: VTensorLayer(None, pool),
    HYBRID: lambda pool: VTensorHybridLayer(None, pool),
}
ALL = (FULL, "linear", SLIDING, HYBRID, HYBRID_SLIDING)


def feed(cache, layer, new, seed=0, batch=BATCH):
    """One layer's part of a forward of ``new`` tokens."""
    if hasattr(layer, "update_conv_state"):
        g = torch.Generator().manual_seed(seed)
        layer.update_conv_state(torch.randn(batch, 4, 3, generator=g))
        layer.update_recurrent_state(torch.randn(batch, 2, 2, generator=g))
    if hasattr(layer, "update"):
        return cache.update(*states(batch, new, seed=seed), cache.layers.index(layer))
    return None


def filled(pool, kinds=ALL, tokens=TOKENS, record=False):
    cache = VTensorCache.over(DynamicCache())
    cache.layers = [KINDS[kind](pool) for kind in kinds]
    if record:
        cache.activate_past_recording()
    for number, layer in enumerate(cache.layers):
        for seed, new in enumerate((tokens - 2, 2)):
            feed(cache, layer, new, seed=10 * number + seed)
    return cache


def copied(t):
    return None if t is None else t.clone()


def content(cache):
    """What each layer holds."""
    found = []
    for layer in cache.layers:
        of_layer = []
        if isinstance(layer, VTensorLayer):
            of_layer += [layer.get_seq_length(), copied(layer.keys), copied(layer.values)]
        if isinstance(layer, LinearAttentionLayer):
            of_layer += map(copied, (*layer.conv_states.values(), *layer.recurrent_states.values()))
            of_layer += layer.has_previous_state.values()
        found.append(of_layer)
    return found


CHANGES = {
    "reorder": lambda cache: cache.reorder_cache(ORDER),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select none": lambda cache: cache.batch_select_indices([]),
}
KEPT = {"reorder": [1, 1, 0], "select": [2, 0], "repeat": [0, 0, 1, 1, 2, 2]}


@pytest.mark.parametrize("change", KEPT)
def test_every_layer_gets_the_same_sequences(pool_factory, kind, change):
    pool = pool_factory(kind, pages=4096)
    kinds = (
        ALL if change == "reorder" else tuple(kind for kind in ALL if kind != "linear")
    )  # which has no others
    cache = filled(pool, kinds)
    before = content(cache)
    CHANGES[change](cache)
    wanted = [[t[KEPT[change]] if isinstance(t, torch.Tensor) else t for t in layer] for layer in before]
    assert same(content(cache), wanted)
    for layer in cache.layers:
        feed(cache, layer, 2, seed=7, batch=len(KEPT[change]))
    testing.check_invariants(pool)


def update(cache):
    for number in range(len(cache.layers)):
        cache.update(*states(BATCH, 60, seed=number), number)


def convert(cache):
    cache.update(*(x.double() for x in states(BATCH, 60)), 0)


def prepare(cache):
    before = cache.layers[0].keys.shape
    cache.prepare(60)
    cache.prepare(2)
    assert cache.layers[0].keys.shape == before


def offload(cache):
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()


# Layers, and what is done to a cache of them.
CASES = {name: ((FULL, HYBRID, HYBRID_SLIDING), change) for name, change in CHANGES.items()} | {
    "reset": (ALL[:4], lambda cache: cache.reset()),
    "crop": ((FULL, SLIDING, HYBRID), lambda cache: cache.crop(-3)),
    "update": ((FULL, SLIDING), update),
    "another dtype": ((FULL,), convert),
    "prepare": ((FULL, SLIDING), prepare),
    "prepare a layer": ((FULL,), lambda cache: cache.layers[0].prepare(60)),
    "offload": ((FULL, SLIDING, HYBRID), offload),
}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    "change", [*KEPT, "update", "another dtype", "prepare", "prepare a layer", "offload"]
)
def test_a_refused_change_changes_no_layer(pool_factory, kind, monkeypatch, change, views):
    """I8, I9: whichever driver call of whichever layer is refused, and whichever page is missing; in place,
    and where views are outside and address ranges run out."""
    if views:
        monkeypatch.setattr("vtensor.integrations.transformers.layers._FIRST_CAPACITY", TOKENS)
    pool = pool_factory(kind, pages=4096)
    kinds, operation = CASES[change]
    cache = filled(pool, kinds)
    before, calls = content(cache), all_calls(pool)
    operation(cache)
    calls, wanted = all_calls(pool) - calls, content(cache)
    cache.reset()
    refused = {testing.fail_after: 0, pages_left: 0}
    for refusing, counts in ((testing.fail_after, range(0, calls, 1 + calls // 40)), (pages_left, range(8))):
        for n in counts:
            cache = filled(pool, kinds)
            used = pool.stats().pages_used
            kept = [layer.keys for layer in cache.layers] if views else []
            try:
                with refusing(pool, n):
                    operation(cache)
            except vtensor.VTensorError:
                refused[refusing] += 1
                assert views or change in (*KEPT, "offload") or pool.stats().pages_used == used
                assert same(content(cache), before)
                away = [layer for layer in cache.layers if layer._away is not None]
                assert not any(owner.length for layer in away for owner in layer.owners)  # no pages
            else:  # what a freed tensor left was given back, and the call made once more
                assert same(content(cache), wanted)
            kept.clear()
            testing.check_invariants(pool)
            cache.reset()
    assert refused[testing.fail_after] >= 3 or (change, kind) == ("offload", "host")  # where it stays
    assert refused[pages_left] == (0 if change in (*KEPT, "offload") else 8)


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_a_refused_update_finds_a_layer_away(simcuda, kind):
    """I8: a layer in host memory drops the step there. There are no pages for it to come back first."""
    cache = filled(simcuda, (kind, FULL))
    before = content(cache)
    cache.update(*states(BATCH, 60), 0)
    cache.layers[0].offload()
    with pytest.raises(vtensor.OutOfPages), pages_left(simcuda, 0):
        cache.update(*states(BATCH, 60), 1)
    assert cache.layers[0]._away is not None and same(content(cache), before)
    for layer in cache.layers:
        feed(cache, layer, 2, seed=5)
    assert torch.equal(cache.layers[0].keys[..., -2:, :], states(BATCH, 2, seed=5)[0])
    cache.reset()


def test_an_index_that_one_layer_has_not_changes_none(pages):
    cache = filled(pages, (HYBRID, FULL))
    before = content(cache)
    with pytest.raises(vtensor.InvalidArgument, match="out of range"):
        cache.reorder_cache(torch.tensor([0, 3]))
    assert same(content(cache), before)
    cache.layers[1].batch_select_indices([0])  # layers that came apart
    with pytest.raises(vtensor.InvalidArgument, match="out of range"):
        cache.reorder_cache(torch.tensor([2, 1, 0]))
    assert same(content(cache)[0], before[0])


@pytest.mark.parametrize("kinds", [(FULL, SLIDING), (SLIDING, FULL), (FULL, "linear")])
def test_a_refused_crop_shortens_no_layer(pages, kinds):
    """I8: a full window, and linear attention, cannot go back unless they recorded, not even by a token that
    is still held."""
    cache = filled(pages, kinds)
    before = content(cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    assert same(content(cache), before)
    for layer in cache.layers:
        feed(cache, layer, 1, seed=3)
    assert {layer.get_seq_length() for layer in cache.layers if isinstance(layer, VTensorLayer)} == {
        TOKENS + 1
    }


def test_a_crop_further_back_than_was_recorded_shortens_no_layer(pages):
    """I8."""
    cache = filled(pages, (FULL, SLIDING))
    cache.activate_past_recording()
    before = content(cache)
    with pytest.raises(vtensor.InvalidArgument, match="only the last 9 are held"):
        cache.crop(-4)
    assert same(content(cache), before)


def test_a_layer_that_keeps_none_is_as_new(pages):
    cache = filled(pages, (FULL, HYBRID))
    cache.batch_select_indices([])
    assert pages.stats().pages_used == 0
    for layer in cache.layers:
        feed(cache, layer, 3, batch=5)
    assert cache.layers[1].keys.shape[0] == cache.layers[1].conv_states[0].shape[0] == 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_emptied_cache_takes_another_batch(pages, mode):
    """As after a refused forward of a model with linear attention, which goes on with fewer sequences; also
    outside of the mode in which it was filled."""
    with mode():
        emptied = filled(pages, record=True)
    fresh = VTensorCache.over(DynamicCache())
    fresh.layers = [KINDS[kind](pages) for kind in ALL]
    fresh.activate_past_recording()
    emptied.reset()
    for cache in (emptied, fresh):
        for layer in cache.layers:
            feed(cache, layer, 3, batch=1)
            feed(cache, layer, 2, seed=1, batch=1)
    assert same(content(emptied), content(fresh))


# ---------------------------------------------------------------------- exceptions from outside


def usable(cache, pool, batch):
    for layer in cache.layers:
        seen = layer.get_seq_length() if isinstance(layer, VTensorLayer) else 0
        feed(cache, layer, 2, seed=5, batch=batch)
        if isinstance(layer, VTensorLayer):
            assert layer.get_seq_length() == seen + 2
            assert torch.equal(layer.keys[..., -2:, :], states(batch, 2, seed=5)[0])
    testing.check_invariants(pool)
    cache.reset()
    pool.wait_idle(timeout=10)
    assert pool.stats().pages_used == 0


@pytest.mark.parametrize("within", [package, vtensor], ids=["cache", "tensors"])
@pytest.mark.parametrize("change", CASES)
def test_an_interrupted_change_is_whole(pages, monkeypatch, change, within):
    """I17: all layers are as before, or all as after; in a forward each is by itself. With an address range
    that runs out and a window that moves."""
    monkeypatch.setattr("vtensor.integrations.transformers.layers._FIRST_CAPACITY", TOKENS)
    kinds, operation = CASES[change]

    def setup():
        return filled(pages, kinds, record=change == "crop")

    before, after = before_and_after(setup, operation, content)
    outcomes = set()

    def check(cache, outcome):
        now = content(cache)
        outcomes.add("before" if same(now, before) else "after" if same(now, after) else "between")
        if change == "update":
            assert all(
                same(layer, old) or same(layer, new)
                for layer, old, new in zip(now, before, after, strict=True)
            )
        else:
            assert "between" not in outcomes, outcome
        usable(cache, pages, BATCH if same(now, before) else len(KEPT.get(change, range(BATCH))))

    at_every_bytecode(setup, operation, check, within=within, each=place)
    assert "before" in outcomes or within is vtensor
    assert "after" in outcomes or same(before, after)


@pytest.mark.parametrize("change", KEPT)
def test_a_default_device_without_memory_changes_nothing(pool_factory, change):
    host = pool_factory("host", pages=4096)
    kinds = tuple(kind for kind in ALL if kind != "linear")
    plain, moded = filled(host, kinds), filled(host, kinds)
    CHANGES[change](plain)
    with torch.device("meta"):
        if change == "select":
            moded.batch_select_indices([2, 0])
        else:
            CHANGES[change](moded)
    assert same(content(moded), content(plain))


def test_a_window_made_under_such_a_default_device(host):
    with torch.device("meta"):
        layer = VTensorSlidingWindowLayer(WINDOW, None, host)
    assert int(layer._sliding_window_tensor) == WINDOW

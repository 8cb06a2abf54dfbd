"""Layers that see a window of the last tokens: pages behind it go back to the pool, nothing is copied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import vtensor
from vtensor import testing

pytest.importorskip("transformers")

from transformers import LlamaForCausalLM, MistralConfig
from transformers.cache_utils import DynamicSlidingWindowLayer
from vtensor.integrations.transformers import VTensorCache, VTensorSlidingWindowLayer

from model_zoo import WINDOW, caches, make
from tiny_models import (
    RECORDED_WINDOW,
    SIZES,
    SameKernelCache,
    assert_same_content,
    assert_same_output,
    before,
    make_llama,
    one_thread,  # noqa: F401
    prompt,
    run,
    states,
)

CONFIG = MistralConfig(**SIZES | {"sliding_window": WINDOW})
PAGE = 64  # tokens of one head in a page of 4 KiB


def both(pool, window=WINDOW):
    return VTensorSlidingWindowLayer(window, 4096, pool), DynamicSlidingWindowLayer(window)


def step(layers, new, seed=0, batch=1):
    """Gives both layers the same states, and compares what they return and what they keep."""
    results = [layer.update(*states(batch, new, seed=seed)) for layer in layers]
    for ours, theirs in zip(*results, strict=True):
        assert type(ours) is torch.Tensor
        assert torch.equal(ours, theirs)
    compare(layers)


def compare(layers):
    ours, theirs = layers
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    assert ours.get_seq_length() == ours.cumulative_length == theirs.get_seq_length()
    for query in (1, 7):
        assert ours.get_mask_sizes(query) == theirs.get_mask_sizes(query)
    assert ours.get_max_length() == theirs.get_max_length() and ours.is_sliding


@pytest.mark.parametrize("window", [2, 5, 24, 100])
def test_any_steps_give_what_hugging_faces_layer_gives(pages, window):
    layers = both(pages, window)
    for seed, new in enumerate([30, 1, 1, 40, 3, 90, 1, 64, 1]):
        step(layers, new, seed)
    testing.check_invariants(pages)


def test_head_pages_go_back_as_the_window_moves(pages):
    layer, _ = both(pages)
    rows = 2 * 2  # K and V, heads
    base = layer.update(*states(1, 1))[0].data_ptr()
    for token in range(1, 400):
        keys, values = layer.update(*states(1, 1, seed=token))
        held = min(token + 1, WINDOW)
        assert keys.shape[-2] == held
        assert keys.data_ptr() == base + (token + 1 - held) * 16 * 4  # I1: what is kept stays where it was
        del keys, values
        # I4: the pages that the held tokens touch, and no others.
        touched = token // PAGE - (token + 1 - held) // PAGE + 1
        assert pages.stats().pages_mapped == rows * touched
    layer.reset()


def test_nothing_is_copied_when_the_window_moves(pages):
    layer, _ = both(pages)
    layer.update(*states(1, 220))
    ids = {record.page_id for owner in layer.owners for record in owner.pages() if record.state == "mapped"}
    calls = pages.stats().driver_calls["caller"]
    for token in range(30):
        layer.update(*states(1, 1, seed=token))
    assert pages.stats().driver_calls["caller"] == calls  # within mapped pages no call is made
    assert ids >= {r.page_id for owner in layer.owners for r in owner.pages() if r.state == "mapped"}


def test_a_long_prompt_leaves_only_the_windows_pages(pages):
    layer, _ = both(pages)
    keys, values = layer.update(*states(1, 1000))
    assert keys.shape[-2] == 1000
    held = pages.stats().pages_pinned
    del keys, values
    assert held > 0 and pages.stats().pages_mapped <= 2 * 2 * 2


def test_a_view_outside_keeps_its_bytes_while_the_window_moves(pages):
    layer, _ = both(pages)
    view, _ = layer.update(*states(1, 200))
    kept = view.clone()
    for token in range(200):
        layer.update(*states(1, 1, seed=token))
    assert torch.equal(view, kept)  # I3


@pytest.mark.skipif(before("5.18"), reason=RECORDED_WINDOW)
@pytest.mark.parametrize("prompt", [10, 60])
@pytest.mark.parametrize("remove", [0, 1, 6])
def test_crop_while_the_past_is_recorded(pages, prompt, remove):
    layers = both(pages)
    step(layers, prompt)
    for layer in layers:
        layer.activate_past_recording()
    for seed in range(4):
        step(layers, 7, seed)
        for layer in layers:
            layer.crop(-remove)
        compare(layers)
    step(layers, 5, 9)
    step(layers, 5, 10)  # two steps without a crop between them
    testing.check_invariants(pages)


def test_crop_of_a_full_window_needs_recording(pages):
    ours, theirs = both(pages)
    step((ours, theirs), 40)
    with pytest.raises(RuntimeError):
        theirs.crop(-1)
    with pytest.raises(vtensor.InvalidArgument, match="activate_past_recording"):
        ours.crop(-1)
    ours.activate_past_recording()
    with pytest.raises(vtensor.InvalidArgument, match="only the last 23 are held"):
        ours.crop(-1)  # recording began after they were let go
    compare((ours, theirs))


def test_beams_and_selections(pages):
    layers = both(pages)
    step(layers, 50, batch=3)
    for layer in layers:
        layer.reorder_cache(torch.tensor([2, 0, 0]))
    compare(layers)
    step(layers, 2, batch=3)
    for layer in layers:
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([0, 3, 5]))
    compare(layers)
    step(layers, 70, batch=3)
    testing.check_invariants(pages)


def test_deepcopy_shares_the_window_until_one_side_writes(pages):
    ours, theirs = both(pages)
    step((ours, theirs), 200)
    used = pages.stats().pages_used
    branch = copy.deepcopy(ours)
    assert pages.stats().pages_used == used
    compare((branch, theirs))
    other = copy.deepcopy(theirs)
    for seed in range(80):
        step((branch, other), 1, seed)
        step((ours, theirs), 1, seed + 500)  # I6
    testing.check_invariants(pages)


@pytest.mark.keeps_pages
def test_pickle(pages):
    ours, theirs = both(pages)
    step((ours, theirs), 100)
    back = pickle.loads(pickle.dumps(ours))
    compare((back, theirs))
    step((back, theirs), 3)
    back.reset()


def test_reset(pages):
    ours, theirs = both(pages)
    step((ours, theirs), 100)
    ours.reset()
    assert pages.stats().pages_used == 0 and ours.get_seq_length() == 0 and ours.keys is None
    theirs = DynamicSlidingWindowLayer(WINDOW)  # whose reset() left zeros before 5.18
    step((ours, theirs), 30)


def test_offload_of_a_window(pool_factory):
    pool = pool_factory("simcuda", pages=64)
    ours, theirs = both(pool)
    step((ours, theirs), 100)
    step((ours, theirs), 1)
    ours.offload()
    assert pool.stats().pages_mapped == 0
    compare((ours, theirs))
    step((ours, theirs), 1)


def test_without_max_len_the_window_moves_on_for_ever(pages, monkeypatch):
    monkeypatch.setattr("vtensor.integrations.transformers.layers._FIRST_CAPACITY", 64)
    layers = VTensorSlidingWindowLayer(WINDOW, None, pages), DynamicSlidingWindowLayer(WINDOW)
    step(layers, 100)
    reserved = pages.stats().nbytes_reserved
    for token in range(600):
        step(layers, 1, token)
    assert pages.stats().nbytes_reserved <= 2 * reserved
    testing.check_invariants(pages)


# ---------------------------------------------------------------------- failures


def test_update_rolls_back_wherever_a_call_is_refused(pages):
    """I8: K, V, their growth, their front."""
    reached = 0
    for skip in range(14):
        ours, theirs = both(pages)
        step((ours, theirs), 40)
        step((ours, theirs), 50)
        try:
            with testing.fail_after(pages, skip):
                ours.update(*states(1, 200, seed=3))
        except vtensor.VTensorError:
            reached += 1
            compare((ours, theirs))
        else:  # a refused unmap is tried again later, and no error
            theirs.update(*states(1, 200, seed=3))
            compare((ours, theirs))
        testing.check_invariants(pages)
        step((ours, theirs), 1)
        ours.reset()
    assert reached >= 4


@pytest.mark.parametrize("name", ["Gemma 3", "Mistral"])
@pytest.mark.parametrize("budget", range(9, 17))
def test_out_of_pages_in_generate_leaves_every_layer_as_before_the_step(pool_factory, name, budget):
    """I8, with layers of a window beside layers without one."""
    pool = pool_factory("host", pages=budget)
    model = make(name)
    cache = VTensorCache(model.config, 4096, pool)
    ids = prompt(1, 60)
    method = {"do_sample": False, "max_new_tokens": 200}
    try:
        run(model, cache, ids, **method)
    except vtensor.OutOfPages:
        lengths = {layer.get_seq_length() for layer in cache.layers}
        assert len(lengths) == 1 and lengths <= {64, 128, 192, 256, 0}
        testing.check_invariants(pool)
    else:
        assert name == "Mistral"  # all of whose layers fit for ever
    cache.reset()


def test_out_of_pages_at_the_prompt_leaves_nothing(pool_factory):
    """The first layer, which has let go of most of the prompt already, goes back to none."""
    pool = pool_factory("host", pages=18)
    model = make("Gemma 3")
    cache = VTensorCache(model.config, 4096, pool)
    with pytest.raises(vtensor.OutOfPages):
        run(model, cache, prompt(1, 200), do_sample=False, max_new_tokens=1)
    assert [layer.get_seq_length() for layer in cache.layers] == [0, 0]
    assert pool.stats().pages_mapped == 0
    ids, method = prompt(1, 60), {"do_sample": False, "max_new_tokens": 4}
    expected = run(model, SameKernelCache(config=model.config), ids, **method)
    assert_same_output(run(model, cache, ids, **method), expected)


def test_going_on_after_out_of_pages(pool_factory):
    """I9: after another tensor has given pages back."""
    model = make("Gemma 3")
    pool = pool_factory("host", pages=24)
    other = vtensor.empty(10, 4096, grow_dim=1, capacity=4096, dtype=torch.uint8, pool=pool)
    ours, theirs = VTensorCache(model.config, 4096, pool), SameKernelCache(config=model.config)
    with pytest.raises(vtensor.OutOfPages):
        run(model, ours, prompt(1, 60), do_sample=False, max_new_tokens=200)
    length = ours.get_seq_length()
    assert length == 64
    begun = run(model, theirs, prompt(1, 60), do_sample=False, max_new_tokens=length - 60 + 1)
    assert_same_content(ours, theirs)
    other.close()
    expected = run(model, theirs, begun.sequences, do_sample=False, max_new_tokens=20)
    assert_same_output(run(model, ours, begun.sequences, do_sample=False, max_new_tokens=20), expected)


def test_assisted_decoding(pages):
    model = make("Gemma 3")
    assistant = make_llama("sdpa")
    assert isinstance(assistant, LlamaForCausalLM)
    ids = prompt(1, 40)
    ours, theirs = caches(model, pages)
    method = {"do_sample": False, "max_new_tokens": 20, "assistant_model": assistant}
    expected = run(model, theirs, ids, **method)
    assert_same_output(run(model, ours, ids, **method), expected)
    assert_same_content(ours, theirs)

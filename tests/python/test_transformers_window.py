"""Layers that see a window of the last tokens: pages behind it go back to the pool, nothing is copied."""

from __future__ import annotations

import pickle

import pytest
import torch

from vtensor import testing

pytest.importorskip("transformers")

from transformers.cache_utils import DynamicSlidingWindowLayer
from vtensor.integrations.transformers import VTensorSlidingWindowLayer

from model_zoo import WINDOW
from tiny_models import RECORDED_WINDOW, before, one_thread, states  # noqa: F401

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


def test_nothing_is_copied_when_the_window_moves(pages):
    layer, _ = both(pages)
    layer.update(*states(1, 220))
    ids = {record.page_id for owner in layer.owners for record in owner.pages() if record.state == "mapped"}
    calls = pages.stats().driver_calls["caller"]
    for token in range(30):
        layer.update(*states(1, 1, seed=token))
    assert pages.stats().driver_calls["caller"] == calls  # within mapped pages no call is made
    assert ids >= {r.page_id for owner in layer.owners for r in owner.pages() if r.state == "mapped"}


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


@pytest.mark.keeps_pages
def test_pickle(pages):
    ours, theirs = both(pages)
    step((ours, theirs), 100)
    back = pickle.loads(pickle.dumps(ours))
    compare((back, theirs))
    step((back, theirs), 3)


def test_without_max_len_the_window_moves_on_for_ever(pages, monkeypatch):
    monkeypatch.setattr("vtensor.integrations.transformers.layers._FIRST_CAPACITY", 64)
    layers = VTensorSlidingWindowLayer(WINDOW, None, pages), DynamicSlidingWindowLayer(WINDOW)
    step(layers, 100)
    reserved = pages.stats().nbytes_reserved
    for token in range(600):
        step(layers, 1, token)
    assert pages.stats().nbytes_reserved <= 2 * reserved
    testing.check_invariants(pages)

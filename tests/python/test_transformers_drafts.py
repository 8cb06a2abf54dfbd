"""Tokens that are tried and taken back: assisted decoding past max_len, and contrastive search."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import vtensor
from vtensor import testing

pytest.importorskip("transformers")

from vtensor.integrations.transformers import VTensorCache

from model_zoo import make
from tiny_models import GREEDY, assert_same_content, one_thread, prompt, states  # noqa: F401

ASSISTANCE = {"lookup": {"prompt_lookup_num_tokens": 10}, "assisted": {}}


# ---------------------------------------------------------------------- drafts and max_len


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "DeepSeek-V3"])
@pytest.mark.parametrize("how", ASSISTANCE)
@pytest.mark.parametrize("compiled", [False, True])
def test_drafts_may_pass_max_len(pages, name, how, compiled):
    model, ids = make(name), prompt(1, 8).repeat(1, 5)
    method = GREEDY | ASSISTANCE[how]
    if how == "assisted":
        method["assistant_model"] = make("Qwen3")
    expected = model.generate(ids, **method)
    cache = VTensorCache(model.config, 59, pages, compiled=compiled)  # the last token is not stored
    assert torch.equal(model.generate(ids, past_key_values=cache, **method), expected)
    assert cache.get_seq_length() == 59 == cache.max_len
    testing.check_invariants(pages)


def test_tokens_that_stay_may_not(pages):
    model, ids = make("Llama"), prompt(1, 8).repeat(1, 5)
    method = GREEDY | ASSISTANCE["lookup"]
    for max_len in (39, 50):  # the prompt's, and the answer's
        cache = VTensorCache(model.config, max_len, pages)
        with pytest.raises(
            vtensor.CapacityExceeded, match=f"max_len={max_len}: make the cache with a larger"
        ):
            model.generate(ids, past_key_values=cache, **method)
        testing.check_invariants(pages)


def test_of_a_step_the_first_token_counts(pages):
    cache = VTensorCache(make("Llama").config, 8, pages)
    cache.activate_past_recording()
    with pytest.raises(vtensor.CapacityExceeded, match="0 tokens and 9 more, but max_len=8"):
        cache.update(*states(1, 9), 0)  # a prompt stays
    cache.update(*states(1, 7), 0)
    view = cache.layers[0].keys
    kept = view.clone()
    cache.update(*states(1, 9, seed=1), 0)
    assert cache.get_seq_length() == 16 and torch.equal(view, kept)  # I3: the addresses moved
    with pytest.raises(vtensor.CapacityExceeded, match="16 tokens and 1 more, but max_len=8"):
        cache.update(*states(1, 1), 0)
    loaded = pickle.loads(pickle.dumps(cache))  # with what is tried
    assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys)
    loaded.reset()
    cache.crop(-9)
    assert torch.equal(cache.layers[0].keys, kept)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        other.update(*states(1, 9, seed=1), 0)
        assert other.get_seq_length() == 16
        other.reset()


# ---------------------------------------------------------------------- emptied by crop


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_an_emptied_cache_takes_another_batch(pages, name, compiled):
    model = make(name)
    cache = VTensorCache(model.config, 256, pages, compiled=compiled)
    cache.activate_past_recording()
    model.generate(prompt(2, 40), past_key_values=cache, **GREEDY)
    for batch in (3, 1, 1):
        cache.crop(-1000)
        given = model.generate(prompt(batch, 40), past_key_values=cache, **GREEDY)
        assert torch.equal(given, model.generate(prompt(batch, 40), **GREEDY))
    testing.check_invariants(pages)

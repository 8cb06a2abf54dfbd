"""torch.export takes a filled VTensorCache as it takes a DynamicCache."""

from __future__ import annotations

import pytest
import torch

import vtensor

pytest.importorskip("transformers")

from torch.utils import _pytree as pytree
from transformers import DynamicCache
from transformers.integrations.executorch import register_dynamic_cache_export_support
from vtensor.integrations.transformers import VTensorCache

from model_zoo import caches, make
from tiny_models import one_thread, prompt, run, states  # noqa: F401


@pytest.fixture(autouse=True)
def dynamic_caches_too():
    register_dynamic_cache_export_support()


def filled(name, pool, length=40):
    """Both caches after a prompt."""
    model = make(name)
    both = VTensorCache(model.config, 256, pool), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in both:
            model(prompt(1, length), past_key_values=cache)
    return model, *both


def step(cache, token):
    return {"input_ids": token, "past_key_values": cache, "use_cache": True}


@pytest.mark.parametrize("name", ["Gemma 3"])
def test_a_filled_cache_is_an_input(pages, name):
    model, ours, theirs = filled(name, pages)
    token = prompt(1, 1, seed=9)
    with torch.no_grad():
        programs = [
            torch.export.export(model, (), step(cache, token), strict=False) for cache in (ours, theirs)
        ]
        given, expected = (
            program.module()(**step(cache, token))
            for program, cache in zip(programs, (ours, theirs), strict=True)
        )
    assert torch.equal(given.logits, expected.logits)
    assert ours.get_seq_length() == 40  # a program changes no input
    after = given.past_key_values
    assert type(after) is VTensorCache
    for a, b in zip(after.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    for cache in (after, expected.past_key_values):  # it can go on
        cache.update(*states(1, 1), 0)
    assert torch.equal(after.layers[0].keys, expected.past_key_values.layers[0].keys)


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_flattened_and_back(pages, name):
    _, ours, theirs = filled(name, pages)
    leaves, structure = pytree.tree_flatten(ours)
    assert all(type(leaf) is torch.Tensor for leaf in leaves)
    back = pytree.tree_unflatten(leaves, structure)
    assert pytree.tree_flatten(back)[1] == structure
    for a, b, c in zip(back.layers, ours.layers, theirs.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(b.keys, c.keys)
    empty = VTensorCache(make(name).config, 256, pages)
    assert pytree.tree_flatten(empty)[0] == []
    back = pytree.tree_unflatten([], pytree.tree_flatten(empty)[1])
    assert back.get_seq_length() == 0 and len(back.layers) == len(empty.layers)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1"])
def test_linear_attention_is_refused(pages, name):
    """As transformers refuses it, whose own function knows K and V alone."""
    cache, _ = caches(make(name), pages)
    with pytest.raises(vtensor.InvalidArgument, match="input of torch.export, which takes K and V alone"):
        pytree.tree_flatten(cache)


def test_a_program_takes_other_caches_of_its_shape(pages):
    model, ours, _ = filled("Llama", pages)
    token = prompt(1, 1, seed=9)
    with torch.no_grad():
        program = torch.export.export(model, (), step(ours, token), strict=False)
    other = VTensorCache(model.config, 256, pages)
    run(model, other, prompt(1, 40, seed=6), do_sample=False, max_new_tokens=1)
    with torch.no_grad():
        logits = program.module()(**step(other, token)).logits
        torch.testing.assert_close(logits, model(**step(other, token)).logits)

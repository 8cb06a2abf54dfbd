"""generate() of unmodified transformers models: VTensorCache gives what DynamicCache gives."""

from __future__ import annotations

import pytest
import torch

from vtensor import testing

pytest.importorskip("transformers")

from vtensor.integrations.transformers import VTensorCache

from tiny_models import GREEDY, SameKernelCache, one_thread, prompt, run  # noqa: F401

BEAMS = {"do_sample": False, "num_beams": 4, "max_new_tokens": 20}


def test_layout_of_a_cuda_pool_over_the_simulated_driver(llama, pool_factory):
    """[B, S, H, D], one row a sequence, and all the CUDA path below."""
    pool = pool_factory("simcuda", pages=512)
    ids = prompt(2)
    theirs, ours = SameKernelCache(config=llama.config), VTensorCache(llama.config, 128, pool)
    expected = run(llama, theirs, ids, **BEAMS)
    got = run(llama, ours, ids, **BEAMS)
    assert ours.layers[0].owners[0].grow_dim == 1
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys)
    testing.check_invariants(pool)


def test_inference_mode_on_and_off(llama, pages):
    ids = prompt(2)
    expected = run(llama, SameKernelCache(config=llama.config), ids, **BEAMS).sequences
    cache = VTensorCache(llama.config, 128, pages)
    with torch.inference_mode():
        first = run(llama, cache, ids, do_sample=False, max_new_tokens=6).sequences
    rest = run(llama, cache, first, do_sample=False, max_new_tokens=14).sequences
    assert torch.equal(rest, run(llama, SameKernelCache(config=llama.config), ids, **GREEDY).sequences)
    with torch.inference_mode():
        beams = run(llama, VTensorCache(llama.config, 128, pages), ids, **BEAMS).sequences
    assert torch.equal(beams, expected)


def test_tokens_cost_no_copy_and_only_the_pages_they_need(llama, pages):
    cache = VTensorCache(llama.config, 4096, pages)
    run(llama, cache, prompt(1, 64), do_sample=False, max_new_tokens=1)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    assert pages.stats().pages_mapped == 2 * 2 * 2 * 1  # layers, K and V, heads, 64 tokens a page
    run(llama, cache, prompt(1, 64 + 128), do_sample=False, max_new_tokens=1)
    assert cache.get_seq_length() == 192
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses  # I1
    assert pages.stats().pages_mapped == 2 * 2 * 2 * 3  # I4: what the lengths need

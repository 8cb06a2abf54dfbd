"""generate() of unmodified transformers models: VTensorCache gives what DynamicCache gives."""

from __future__ import annotations

import pytest
import torch

import vtensor
from vtensor import testing

pytest.importorskip("transformers")

from transformers import DynamicCache
from vtensor.integrations.transformers import VTensorCache

from tiny_models import (
    GREEDY,
    SameKernelCache,
    assert_same_content,
    assert_same_output,
    filled,
    make_llama,
    one_thread,  # noqa: F401
    prompt,
    run,
)

METHODS = {
    "greedy": GREEDY,
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3, "max_new_tokens": 20},
    "beams": {"do_sample": False, "num_beams": 4, "max_new_tokens": 20},
    "beam sampling": {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12},
}


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    return make_llama(request.param)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 3])
def test_generate_is_bit_identical_to_dynamic_cache(model, pages, method, batch):
    ids = prompt(batch)
    theirs = SameKernelCache(config=model.config)
    ours = VTensorCache(model.config, max_len=128, pool=pages)
    expected = run(model, theirs, ids, **METHODS[method])
    assert_same_output(run(model, ours, ids, **METHODS[method]), expected)
    assert_same_content(ours, theirs)
    assert expected.sequences[0, ids.shape[1] :].unique().numel() > 4  # tokens that say something
    testing.check_invariants(pages)


@pytest.mark.parametrize("method", METHODS)
def test_generate_gives_the_tokens_of_the_unmodified_dynamic_cache(model, pages, method):
    ids = prompt(2)
    expected = run(model, DynamicCache(config=model.config), ids, **METHODS[method])
    given = run(model, VTensorCache(model.config, max_len=128, pool=pages), ids, **METHODS[method])
    assert torch.equal(given.sequences, expected.sequences)
    for a, b in zip(given.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # another kernel for single steps


@pytest.mark.parametrize("method", ["greedy", "beams"])
def test_left_padded_batch(model, pages, method):
    ids, mask = prompt(3, 66), torch.ones(3, 66, dtype=torch.int64)
    for row, padding in enumerate([0, 9, 40]):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    theirs, ours = SameKernelCache(config=model.config), VTensorCache(model.config, 128, pages)
    expected = run(model, theirs, ids, mask, **METHODS[method])
    assert_same_output(run(model, ours, ids, mask, **METHODS[method]), expected)
    alone = run(model, VTensorCache(model.config, 128, pages), ids[2:, 40:], **METHODS[method])
    assert torch.equal(alone.sequences[0, 26:], expected.sequences[2, 66:])  # padding changes no token


def test_bfloat16(pages):
    model = make_llama("sdpa").to(torch.bfloat16)
    ids = prompt(2)
    expected = run(model, SameKernelCache(config=model.config), ids, **GREEDY)
    assert_same_output(run(model, VTensorCache(model.config, 128, pages), ids, **GREEDY), expected)


def test_layout_of_a_cuda_pool_over_the_simulated_driver(llama, pool_factory):
    """[B, S, H, D], one row a sequence, and all the CUDA path below."""
    pool = pool_factory("simcuda", pages=512)
    ids = prompt(2)
    theirs, ours = SameKernelCache(config=llama.config), VTensorCache(llama.config, 128, pool)
    expected = run(llama, theirs, ids, **METHODS["beams"])
    got = run(llama, ours, ids, **METHODS["beams"])
    assert ours.layers[0].owners[0].grow_dim == 1
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys)
    testing.check_invariants(pool)


def test_prompt_lookup_crops_what_was_guessed_wrong(llama, pages):
    ids = prompt(1, 12).repeat(1, 5)  # a text that suggests its own continuation
    method = GREEDY | {"prompt_lookup_num_tokens": 4}
    theirs, ours = SameKernelCache(config=llama.config), VTensorCache(llama.config, 128, pages)
    expected = run(llama, theirs, ids, **method)
    assert torch.equal(run(llama, ours, ids, **method).sequences, expected.sequences)
    assert_same_content(ours, theirs)


def test_prefill_in_parts_and_going_on_with_the_same_cache(llama, pages):
    ids = prompt()
    expected = run(llama, SameKernelCache(config=llama.config), ids, **GREEDY).sequences
    cache = VTensorCache(llama.config, 128, pages)
    first = run(llama, cache, ids, do_sample=False, max_new_tokens=7, prefill_chunk_size=16)
    rest = run(llama, cache, first.sequences, do_sample=False, max_new_tokens=13)
    assert torch.equal(rest.sequences, expected)


def test_inference_mode_on_and_off(llama, pages):
    ids = prompt(2)
    expected = run(llama, SameKernelCache(config=llama.config), ids, **METHODS["beams"]).sequences
    cache = VTensorCache(llama.config, 128, pages)
    with torch.inference_mode():
        first = run(llama, cache, ids, do_sample=False, max_new_tokens=6).sequences
    rest = run(llama, cache, first, do_sample=False, max_new_tokens=14).sequences
    assert torch.equal(rest, run(llama, SameKernelCache(config=llama.config), ids, **GREEDY).sequences)
    with torch.inference_mode():
        beams = run(llama, VTensorCache(llama.config, 128, pages), ids, **METHODS["beams"]).sequences
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


def test_sdpa_reads_contiguous_heads_on_the_host(llama, pages):
    ours, _ = filled(llama.config, pages)
    keys = ours.layers[0].keys
    assert all(keys[batch, head].is_contiguous() for batch in range(2) for head in range(2))


def test_two_caches_at_once_in_one_pool(llama, pages):
    one, two = VTensorCache(llama.config, 128, pages), VTensorCache(llama.config, 128, pages)
    ids, other = prompt(seed=1), prompt(2, seed=2)
    for tokens in (1, 5):
        a = run(llama, one, ids, do_sample=False, max_new_tokens=tokens).sequences
        b = run(llama, two, other, do_sample=False, max_new_tokens=tokens).sequences
        ids, other = a, b
    method = {"do_sample": False, "max_new_tokens": 6}
    assert torch.equal(
        a, run(llama, SameKernelCache(config=llama.config), prompt(seed=1), **method).sequences
    )
    assert torch.equal(
        b, run(llama, SameKernelCache(config=llama.config), prompt(2, seed=2), **method).sequences
    )


def test_default_pool_is_used_and_given_back(llama):
    default = vtensor.default_pool("cpu")
    before = default.stats().pages_used
    cache = VTensorCache(llama.config, 128)
    run(llama, cache, prompt(), **GREEDY)
    assert cache.layers[0].owners[0].pool is default
    assert default.stats().pages_used > before
    cache.reset()
    default.trim()  # what is cached for the next cache
    assert default.stats().pages_used == before

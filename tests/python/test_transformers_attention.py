"""register_attention(): FlashAttention for padded batches that reads the cache where it lies."""

from __future__ import annotations

import pytest
import torch

import vtensor

pytest.importorskip("transformers")

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    DynamicCache,
)
from vtensor.integrations.transformers import VTensorCache, register_attention, unregister_attention

import fake_flash
from model_zoo import MODELS, make
from test_transformers_compile import decode
from tiny_models import GREEDY, VOCAB, before, one_thread, prompt, run  # noqa: F401


class Kernel:
    """What flash_attn_with_kvcache computes, and what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, q, k, v, *, cache_seqlens, softmax_scale, cache_leftpad=None, window_size=(-1, -1), **more
    ):
        leftpad = None if cache_leftpad is None else cache_leftpad.tolist()
        self.calls.append((k.data_ptr(), v.data_ptr(), leftpad))
        assert k.stride(-1) == v.stride(-1) == 1, "FlashAttention would copy all"
        assert cache_seqlens == k.shape[1]
        assert cache_leftpad is None or (cache_leftpad.dtype == torch.int32 and len(cache_leftpad) == len(q))
        options = {"scale": softmax_scale, "window": window_size, **more}
        begins = leftpad or [0] * len(q)
        return torch.stack(
            [
                fake_flash.attend(q[b], k[b, n:], v[b, n:], k.shape[1] - n, **options)
                for b, n in enumerate(begins)
            ]
        )


@pytest.fixture
def kernel():
    kernel = Kernel()
    assert register_attention(kernel) == "vtensor"
    yield kernel
    unregister_attention()


def made(name, **changes):
    model, config, own = MODELS[name]
    base = make(name)
    same = model._from_config(
        base.config.__class__(**base.config.to_dict() | changes), attn_implementation="vtensor"
    )
    same.load_state_dict(base.state_dict())
    return same.eval()


def padded(padding=(0, 9, 33)):
    ids = prompt(len(padding), 40)
    mask = torch.ones_like(ids)
    for row, n in enumerate(padding):
        ids[row, :n] = mask[row, :n] = 0
    return ids, mask


@pytest.mark.parametrize("method", ["greedy", "beams"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2", "Gemma 3", "Qwen3"])
def test_padded_batches_give_the_tokens_of_the_masked_kernel(kernel, pages, name, method):
    if name == "Gemma 2" and before("5.21"):
        pytest.skip("transformers before 5.21 has SDPA compute Gemma 2 without its softcap")
    how = GREEDY | ({"num_beams": 2} if method == "beams" else {})
    ids, mask = padded()
    expected = run(make(name), DynamicCache(config=make(name).config), ids, mask, **how)
    model = made(name)
    given = run(model, VTensorCache(model.config, 128, pages), ids, mask, **how)
    assert torch.equal(given.sequences, expected.sequences)
    for a, b in zip(given.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert any(leftpad is not None for *_, leftpad in kernel.calls)


def test_the_kernel_reads_the_cache_where_it_lies(kernel, pages, monkeypatch):
    """No step gathers or copies: K and V are at the addresses of the cache, and whole."""
    from transformers import modeling_flash_attention_utils

    monkeypatch.setattr(modeling_flash_attention_utils, "_upad_input", None)
    model = made("Llama")
    cache = VTensorCache(model.config, 128, pages)
    ids, mask = padded()
    run(model, cache, ids, mask, **GREEDY)
    owners = [owner.data_ptr() for layer in cache.layers for owner in layer.owners]
    kernel.calls.clear()
    run(model, cache, prompt(3, 60), torch.cat([mask, torch.ones(3, 20, dtype=mask.dtype)], 1), **GREEDY)
    assert len(kernel.calls) == 2 * 20
    for n, (k, v, leftpad) in enumerate(kernel.calls):
        assert [k, v] == owners[n % 2 * 2 : n % 2 * 2 + 2]
        assert leftpad == [0, 9, 33]


def test_without_padding_there_is_no_leftpad(kernel, pages):
    model = made("Llama")
    given = run(model, VTensorCache(model.config, 128, pages), prompt(2, 40), **GREEDY)
    expected = run(make("Llama"), DynamicCache(), prompt(2, 40), **GREEDY)
    assert torch.equal(given.sequences, expected.sequences)
    assert all(leftpad is None for *_, leftpad in kernel.calls)


def test_what_it_cannot_do_is_refused_before_the_kernel(kernel, pages):
    ids, mask = padded()
    llama = made("Llama")

    def refused(model, match, mask=mask, ids=ids, **method):
        kernel.calls.clear()
        cache = VTensorCache(model.config, 128, pages)
        with pytest.raises(vtensor.InvalidArgument, match=match), torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, **method)
        assert not kernel.calls

    refused(llama, "padding_side='left'", mask=mask.flip(1))
    inside = mask.clone()
    inside[1, 20] = 0
    refused(llama, "padding_side='left'", mask=inside)
    refused(llama, "a mask of 45 tokens, the cache and the new ones are 40", mask=torch.ones(3, 45))
    refused(llama, "a mask of 30 tokens", mask=torch.ones(3, 30))
    refused(made("GPT-OSS"), "s_aux")
    refused(made("Llama 4"), "40 tokens in chunks of 24")
    refused(made("Llama", sliding_window=24), "a window in the mask alone")
    refused(made("Gemma 2", use_bidirectional_attention=True), "more than causal")  # as PaliGemma has it
    sizes = {"vocab_size": VOCAB, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}
    refused(
        BigBirdPegasusForCausalLM(BigBirdPegasusConfig(**sizes, attn_implementation="vtensor")).eval(),
        "causal by the mask alone",
    )
    full = made("Llama", sliding_window=24, layer_types=["full_attention"] * 2)  # no layer has it
    with torch.no_grad():
        full(ids, attention_mask=mask, past_key_values=VTensorCache(full.config, 128, pages))
    with pytest.raises(vtensor.InvalidArgument, match="more than causal"):
        llama(ids[:1], position_ids=torch.arange(20).repeat(2)[None], use_cache=False)  # two sequences in one


@pytest.mark.seconds(120)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_compiled_forward(pages, name):
    """The shims' own kernel, no graph break, two compiles for all lengths on one side of the window."""
    register_attention()
    torch._dynamo.reset()
    assert decode(made(name), pages, 12, "eager", batch=2, plain=make(name)) <= 2
    unregister_attention()


def test_it_is_undone(kernel):
    unregister_attention()
    assert "vtensor" not in AttentionInterface() and "vtensor" not in AttentionMaskInterface()
    with pytest.raises(ValueError, match="not supported"):
        make("Llama").set_attn_implementation("vtensor")

"""Which models a cache is for: of an equal config, parts of one, with two halves; another model's K and V."""

from __future__ import annotations

import pytest
import torch

import vtensor

pytest.importorskip("transformers")

import transformers as hf
from transformers import LlamaConfig
from vtensor.integrations.transformers import VTensorCache, encoder_decoder_cache, installed

from model_zoo import make
from tiny_models import (
    GREEDY,
    SIZES,
    assert_same_content,
    filled,
    make_llama,
    make_t5gemma,
    one_thread,  # noqa: F401
    prompt,
    run,
    states,
)

FEW = {"do_sample": False, "max_new_tokens": 4}


def forward(model, cache, ids):
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)


def test_the_config_of_a_whole_or_of_its_text_model(pages):
    sizes = {name: value for name, value in SIZES.items() if not name.endswith("token_id")}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = hf.LlavaConfig(
        text_config=LlamaConfig(**sizes, eos_token_id=None, bos_token_id=None),
        vision_config=hf.CLIPVisionConfig(**vision, image_size=28, patch_size=14),
        image_token_index=96,
    )
    model = hf.LlavaForConditionalGeneration(whole).eval()
    expected = run(model, hf.DynamicCache(config=whole.text_config), prompt(), **FEW).sequences
    for config in (whole, whole.text_config):
        cache = VTensorCache(config, 256, pages)
        assert torch.equal(run(model, cache, prompt(), **FEW).sequences, expected)
        forward(model, cache, prompt(1, 1))
        forward(model.model.language_model, cache, prompt(1, 1))


def test_a_cache_of_fewer_layers_than_the_model(llama, pages):
    """The layers before the missing one took the step's tokens, and are put back."""
    cache = VTensorCache(LlamaConfig(**SIZES | {"num_hidden_layers": 1}), 256, pages)
    for use in (lambda: run(llama, cache, prompt(), **FEW), lambda: forward(llama, cache, prompt())):
        with pytest.raises(vtensor.InvalidArgument, match="layer 1 of a cache with 1 layers.*own config"):
            use()
        assert cache.get_seq_length() == 0
    cache.update(*states(1, 5), 0)
    with pytest.raises(vtensor.InvalidArgument, match="layer 1"):
        forward(llama, cache, prompt(1, 3))
    assert cache.get_seq_length() == 5


def test_a_cache_that_a_model_of_other_heads_has_filled(llama, pages):
    ours, theirs = filled(llama.config, pages)
    other = make_llama("sdpa", num_key_value_heads=4)
    with pytest.raises(
        vtensor.InvalidArgument, match=r"has shape \(2, 4, 3, 16\), the tensor \(2, 2, 70, 16\)"
    ):
        forward(other, ours, prompt(2, 3))
    assert_same_content(ours, theirs)
    ours.reset()
    forward(other, ours, prompt(2, 3))
    assert ours.get_seq_length() == 3


def test_a_model_may_make_the_half_of_the_encoder_itself(pages):
    """T5Gemma attends to all that the encoder read also in layers with a window."""
    model = make_t5gemma()
    expected = model.generate(prompt(1, 30), **FEW)
    cache = encoder_decoder_cache(model.config, 256, pages)
    assert torch.equal(run(model, cache, prompt(1, 30), **FEW).sequences, expected)
    assert len({type(layer) for layer in cache.self_attention_cache.layers}) == 2
    assert len({type(layer) for layer in cache.cross_attention_cache.layers}) == 1
    run(model, cache, prompt(1, 30), decoder_input_ids=expected, **FEW)
    with installed(pages):
        assert torch.equal(model.generate(prompt(1, 30), **FEW), expected)


def test_the_half_of_the_encoder_has_no_window(pages):
    model = make_t5gemma()
    tokens = prompt(1, 5)
    with torch.no_grad():
        expected = model(prompt(1, 30), decoder_input_ids=tokens, use_cache=False).logits[:, 3:]
        cache = encoder_decoder_cache(model.config, 256, pages, tag="kv of T5Gemma")
        read = model.get_encoder()(prompt(1, 30))
        model(encoder_outputs=read, decoder_input_ids=tokens[:, :3], past_key_values=cache)
        steps = [
            model(encoder_outputs=read, decoder_input_ids=tokens[:, n : n + 1], past_key_values=cache).logits
            for n in (3, 4)
        ]
    assert (torch.cat(steps, 1) - expected).abs().max() < 1e-4
    assert {layer.tag for layer in cache.cross_attention_cache.layers} == {"kv of T5Gemma"}


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_compiled_halves(pages, name):
    model = make(name)
    cache = encoder_decoder_cache(model.config, 256, pages, compiled=True)
    assert cache.self_attention_cache.compiled and cache.cross_attention_cache.compiled
    expected = model.generate(prompt(2, 40), **GREEDY)
    assert torch.equal(run(model, cache, prompt(2, 40), **GREEDY).sequences, expected)

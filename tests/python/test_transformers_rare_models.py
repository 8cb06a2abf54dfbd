"""Models for which transformers prepares masks or caches in ways of their own: VTensorCache gives what
DynamicCache gives."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache
from vtensor.integrations.transformers import VTensorCache, encoder_decoder_cache, installed

from model_zoo import halves
from rare_models import PROMPT_TUNING, RARE, continued, inputs, make_rare
from tiny_models import one_thread, prompt  # noqa: F401

NEW = 14
METHODS = {"greedy": {}, "padded": {}, "beams": {"num_beams": 3}}

# How a model comes to its cache: install() makes it, or it is given one, plain or of two halves.
WAYS = {name: ("installed", "plain") for name in (*RARE, PROMPT_TUNING) if name != "DiffusionGemma"} | {
    "Florence-2, longer decoder": ("installed", "halves"),
    "BLT": ("installed", "plain", "halves"),
}
PAIRS = [(name, way) for name in WAYS for way in WAYS[name]]


def generate(model, given, cache=None, **method):
    return model.generate(
        **given,
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        **method,
    )


def with_theirs(model, way, given, **method):
    if way == "installed":
        return generate(model, given, **method)
    # The config from which generate() makes its own. DynamicCache of Florence-2's whole config has as many
    # layers as the encoder, and raises IndexError in a decoder of more.
    config = model.config.get_text_config(decoder=True)
    own = DynamicCache(config=config)
    cache = own if way == "plain" else EncoderDecoderCache(own, DynamicCache(config=config))
    return generate(model, given, cache, **method)


def with_ours(model, way, pool, given, **method):
    if way == "installed":
        with installed(pool):
            output = generate(model, given, **method)
    else:
        make_cache = VTensorCache if way == "plain" else encoder_decoder_cache
        cache = make_cache(model.config, pool=pool)
        output = generate(model, given, cache, **method)
        assert halves(output.past_key_values)[0] is halves(cache)[0]
    used = halves(output.past_key_values)
    if model.config.model_type == "blt" and way != "halves":
        used = used[:1]  # the other half is of BLT's own making
    assert all(type(half) is VTensorCache for half in used)
    return output


def assert_same(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)  # of another kernel
    for a, b in zip(halves(ours.past_key_values), halves(theirs.past_key_values), strict=True):
        assert a.get_seq_length() == b.get_seq_length()


@pytest.mark.parametrize(("name", "way", "method"), [(*pair, method) for pair in PAIRS for method in METHODS])
def test_generate(pages, name, way, method):
    model, given = make_rare(name), inputs(name, padded=method == "padded")
    expected = with_theirs(model, way, given, **METHODS[method])
    assert_same(with_ours(model, way, pages, given, **METHODS[method]), expected)
    assert expected.sequences[:, -NEW:].unique().numel() > 4  # tokens that say something


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_going_on_with_the_cache(pages, name, way):
    model, given = make_rare(name), inputs(name)
    theirs, ours = with_theirs(model, way, given), with_ours(model, way, pages, given)
    more = continued(model, given, theirs.sequences)
    expected = generate(model, more, theirs.past_key_values)
    assert_same(generate(model, more, ours.past_key_values), expected)
    assert expected.sequences.shape[1] == theirs.sequences.shape[1] + 7 + NEW


# ---------------------------------------------------------------------- DiffusionGemma


def diffuse(model, ids, mask, cache):
    """Three canvases of eight tokens. install() changes nothing here: this generate() is the model's own."""
    torch.manual_seed(1)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=24, max_denoising_steps=3
    )


@pytest.mark.parametrize("padded", [False, True])
def test_block_diffusion(pages, padded):
    model = make_rare("DiffusionGemma")
    ids, mask = inputs("DiffusionGemma", padded).values()
    theirs, ours = DynamicCache(config=model.config), VTensorCache(model.config, pool=pages)
    expected = diffuse(model, ids, mask, theirs).sequences
    given = diffuse(model, ids, mask, ours)
    assert torch.equal(given.sequences, expected)
    assert given.past_key_values is ours
    assert expected[:, 40:].unique().numel() > 4

    held = ours.get_seq_length()
    assert held == theirs.get_seq_length() == 40 + 16  # the last canvas is in the sequence alone
    more = torch.cat([expected, prompt(2, 7, seed=9)], dim=1)
    mask = torch.cat([mask, mask.new_ones(2, more.shape[1] - 40)], dim=1)
    further = [diffuse(model, more[:, held:], mask, cache).sequences for cache in (ours, theirs)]
    assert torch.equal(*further)
    assert ours.get_seq_length() == theirs.get_seq_length() == more.shape[1] + 16

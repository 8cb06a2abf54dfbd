"""install(): every default generate() uses a VTensorCache, until it is undone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import vtensor

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, QuantizedCache, StaticCache
from vtensor.integrations import transformers as integration
from vtensor.integrations.transformers import VTensorCache

from model_zoo import MODELS, halves, make
from support import run_program, run_together
from tiny_models import RECORDED_WINDOW, before, make_llama, one_thread, prompt, run  # noqa: F401

GREEDY = {"do_sample": False, "max_new_tokens": 12}


def generate(model, ids, cache=None, **method):
    return run(model, cache, ids, **GREEDY | method)


@pytest.mark.parametrize("name", MODELS)
def test_default_generate_uses_it_and_gives_the_same_tokens(pages, name):
    model = make(name)
    expected = generate(model, prompt(2, 40))
    with integration.installed(pages):
        given = generate(model, prompt(2, 40))
    assert torch.equal(given.sequences, expected.sequences)
    assert all(type(half) is VTensorCache for half in halves(given.past_key_values))
    assert type(halves(expected.past_key_values)[0]) is DynamicCache
    assert isinstance(given.past_key_values, EncoderDecoderCache) == model.config.is_encoder_decoder


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("Gemma 3", {"num_beams": 3}),
        ("Gemma 3", {"assistant_model": "Llama"}),
        pytest.param(
            "Llama",
            {"assistant_model": "Gemma 3"},  # whose window is taken back
            marks=pytest.mark.skipif(before("5.18"), reason=RECORDED_WINDOW),
        ),
        ("Gemma 3", {"prompt_lookup_num_tokens": 3}),
    ],
)
def test_beams_and_assistants(pages, name, method):
    """An assistant's cache is made for its first few tokens, and then kept."""
    if "assistant_model" in method:
        method = {"assistant_model": make(method["assistant_model"])}
    ids = prompt(1, 40)
    expected = generate(make(name), ids, **method)
    with integration.installed(pages):
        given = generate(make(name), ids, **method)
    assert torch.equal(given.sequences, expected.sequences)


def test_what_was_asked_for_is_kept(pages):
    model = make("Llama")
    own = DynamicCache(config=model.config)
    with integration.installed(pages):
        assert generate(model, prompt(), own).past_key_values is own
        static = generate(model, prompt(), cache_implementation="static").past_key_values
        assert type(static) is StaticCache
        static = generate(make("T5"), prompt(), cache_implementation="static").past_key_values
        assert type(static) is EncoderDecoderCache
        assert generate(model, prompt(), use_cache=False).past_key_values is None
        assert type(generate(model, prompt(), cache_implementation="dynamic").past_key_values) is VTensorCache
    assert not issubclass(VTensorCache, QuantizedCache)
    assert pages.stats().pages_used == 0


def test_it_is_undone_also_after_an_error(pages):
    before = GenerationMixin._prepare_cache_for_generation
    with pytest.raises(ZeroDivisionError), integration.installed(pages):
        assert GenerationMixin._prepare_cache_for_generation is not before
        raise ZeroDivisionError
    assert GenerationMixin._prepare_cache_for_generation is before
    assert type(generate(make("Llama"), prompt()).past_key_values) is DynamicCache


def test_twice_is_an_error(pages):
    with pytest.raises(vtensor.InvalidArgument, match="nothing to undo"):
        integration.uninstall()
    integration.install(pages)
    with pytest.raises(vtensor.InvalidArgument, match="call uninstall"):
        integration.install()
    integration.uninstall()


def test_generate_on_several_threads(pages):
    """Each has a cache of its own."""
    model, results = make("Llama"), {}
    expected = {seed: generate(model, prompt(1, 40, seed)).sequences for seed in range(4)}

    def work(seed):
        results[seed] = generate(model, prompt(1, 40, seed)).sequences

    with integration.installed(pages):
        run_together(*(partial(work, seed) for seed in expected))
    assert all(torch.equal(results[seed], expected[seed]) for seed in expected)


def test_the_import_changes_nothing_in_transformers():
    code = """
import transformers.generation.utils as g
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING as layers
from transformers import AttentionInterface
def state():
    m = g.GenerationMixin
    methods = [(k, id(v)) for k, v in vars(m).items()]
    return methods, dict(layers), dict(AttentionInterface._global_mapping), g.DynamicCache
before = state()
import vtensor.integrations.transformers
assert state() == before
"""
    run_program(code).check()

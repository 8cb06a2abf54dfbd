"""Defects of the layers of ``VTensorCache`` that the rest of the tests had once let pass."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist

import vtensor

pytest.importorskip("transformers")

import vtensor.integrations.transformers as package
from transformers import GenerationMixin, LlamaConfig
from transformers.cache_utils import DynamicSlidingWindowLayer
from vtensor.integrations.tensor_parallel import in_agreement
from vtensor.integrations.transformers import VTensorCache, VTensorLayer, VTensorSlidingWindowLayer, default
from vtensor.integrations.transformers.release import CACHE
from vtensor.integrations.transformers.serving import ServedModel, serving_cache

from interrupts import at_every_bytecode
from tiny_models import SIZES, make_llama, pages_left, prompt, states
from vtensor.serving import Engine, Request, Scheduler

WINDOW = 8


@pytest.fixture
def in_a_group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_pickled_window_that_records_keeps_its_tokens_and_its_length(pages):
    layer = VTensorSlidingWindowLayer(WINDOW, None, pages)
    layer.activate_past_recording()
    layer.update(*states(1, 20))
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded.get_seq_length() == 20 and loaded.keys.equal(layer.keys)
    loaded.crop(-10)
    layer.crop(-10)
    assert loaded.get_seq_length() == 10 and loaded.keys.equal(layer.keys)


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_copy_of_a_layer_sleeps_by_the_same_tag(pages, tokens):
    """Also in what it stores after a reset, or before the first update."""
    layer = VTensorLayer(None, pages)
    layer.tag = "mine"
    if tokens:
        layer.update(*states(1, tokens))
    copied = copy.deepcopy(layer)
    copied.reset()
    copied.update(*states(1, 2))
    layer.reset()
    assert pages.sleep(contents="discard", tag="mine") > 0
    pages.wake()


@pytest.mark.parametrize("indices", [(0,), (1, 0), (True, False)])
def test_a_tuple_selects_sequences_as_a_list_does(pages, indices):
    layer = VTensorLayer(None, pages)
    keys, values = states(2, 3)
    layer.update(keys, values)
    layer.batch_select_indices(indices)
    assert layer.keys.equal(keys[list(indices)]) and layer.values.equal(values[list(indices)])


@pytest.mark.parametrize("indices", [0, torch.tensor(0), torch.tensor([[0, 1]])])
def test_an_index_without_a_dimension_selects_nothing(pages, indices):
    """I8: the first sequence by its bare number was once taken for none of them."""
    layer = VTensorLayer(None, pages)
    layer.update(*states(2, 3))
    with pytest.raises(vtensor.InvalidArgument, match="give positions"):
        layer.batch_select_indices(indices)
    assert layer.keys.shape[0] == 2


def test_an_interrupted_install_is_one_or_none():
    """I17: what is left of it can be undone."""
    original = GenerationMixin._prepare_cache_for_generation

    def check(_, outcome):
        if GenerationMixin._prepare_cache_for_generation is not original:
            default.uninstall()
        assert GenerationMixin._prepare_cache_for_generation is original
        assert default._original is None

    assert at_every_bytecode(lambda: None, lambda _: default.install(), check, within=default) > 10


def test_a_served_models_cache_goes_with_the_last_reference(pages):
    """I14: without a collection of garbage."""
    model = make_llama("sdpa")
    cache = serving_cache(model, 2, 64, pool=pages)
    with ServedModel(model, cache) as served:
        done = Engine(Scheduler(cache), served).run([Request("a", [1, 2, 3], 4)])
        assert len(done["a"].tokens[0]) == 4
    gone = weakref.ref(cache), weakref.ref(served)
    gc.collect()
    gc.disable()
    try:
        del cache, served
        assert gone[0]() is None and gone[1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_served_model_has_as_many_heads_as_its_cache_tokens(pages, layout):
    """The shapes of the two layouts are then the same."""
    model = make_llama("sdpa", num_attention_heads=8, num_key_value_heads=8)
    ids = [5, 6, 7]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    with serving_cache(model, 2, 8, pool=pages, layout=layout) as cache, ServedModel(model, cache) as served:
        done = Engine(Scheduler(cache), served).run([Request("a", ids, 4)])
    assert done["a"].tokens == [expected]


@pytest.mark.usefixtures("in_a_group")
def test_a_model_that_lost_layers_generates_in_agreement_as_without(pages):
    """I2: a layer of the cache that gets nothing had all others begin anew before each forward."""
    model = make_llama("sdpa")
    model.model.layers = model.model.layers[:1]
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    cache = VTensorCache(model.config, None, pages)
    with in_agreement(model, cache):
        assert torch.equal(model.generate(ids, **options, **{CACHE: cache}), expected)
    assert cache.get_seq_length() == 8


@pytest.mark.usefixtures("in_a_group")
def test_a_batch_that_was_refused_in_agreement_leaves_nothing_to_the_next(pages):
    """I8: the layers that were made for its size once refused every later batch, or took it unprepared."""
    model = make_llama("sdpa")
    ids, options = prompt(2, 30), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    cache = VTensorCache(model.config, None, pages)
    with pages_left(pages, 40):
        with pytest.raises(vtensor.OutOfPages), in_agreement(model, cache):
            model.generate(prompt(8, 30), **options, **{CACHE: cache})
        assert not any(layer.is_initialized for layer in cache.layers)
        for _ in range(2):
            with in_agreement(model, cache):
                assert torch.equal(model.generate(ids, **options, **{CACHE: cache}), expected)
            cache.reset()
            cache.early_initialization(8, 2, 16, torch.float32, torch.device("cpu"))


def test_an_interrupted_assignment_leaves_the_length(pages):
    """I17: the tokens before those that are held are counted in the same step."""
    new, _ = states(1, 3, seed=5)

    def setup():
        layer = VTensorSlidingWindowLayer(WINDOW, None, pages)
        layer.update(*states(1, 20))
        return layer

    def assign(layer):
        layer.keys = new

    def check(layer, outcome):
        assert layer.get_seq_length() == 20
        assert layer.keys.shape[-2] == WINDOW - 1 or layer.keys.equal(new)
        layer.reset()

    assert at_every_bytecode(setup, assign, check, within=package) > 20


def test_one_side_of_a_window_is_assigned(pages):
    """The side that stays was longer, and was once cut at its end."""
    theirs, ours = DynamicSlidingWindowLayer(WINDOW), VTensorSlidingWindowLayer(WINDOW, None, pages)
    steps = [states(1, tokens, seed=tokens) for tokens in (20, 3, 1)]
    for layer in (theirs, ours):
        layer.update(*steps[0])
        layer.update(*steps[1])
        layer.keys = layer.keys * 2
    assert ours.get_seq_length() == theirs.get_seq_length()
    for one, other in zip(ours.update(*steps[2]), theirs.update(*steps[2]), strict=True):
        assert torch.equal(one, other)
    ours.reset()


def test_a_refused_first_update_leaves_an_empty_layer(pages):
    """I8: K fits, and V does not."""
    layer = VTensorLayer(None, pages)
    keys, values = states(1, 5)
    with pytest.raises(vtensor.InvalidArgument, match="requires grad"):
        layer.update(keys, values.requires_grad_())
    assert not layer.is_initialized and layer.keys is None and layer.values is None
    assert pages.stats().pages_active == 0


def test_one_side_of_a_prepared_layer_is_assigned(pages):
    """The room that was prepared in the other side goes first."""
    layer = VTensorLayer(None, pages)
    _, values = layer.update(*states(1, 5))
    before, (new, _) = values.clone(), states(1, 5, seed=5)
    layer.prepare(3)
    layer.keys = new
    assert layer.keys.equal(new) and layer.values.equal(before) and layer.get_seq_length() == 5
    keys, values = layer.update(*states(1, 1, seed=6))
    assert keys[:, :, :5].equal(new) and values[:, :, :5].equal(before) and keys.shape == values.shape
    layer.reset()


def test_a_refused_forward_leaves_a_layer_that_it_does_not_update(pages):
    """I8: of Mllama, a layer that keeps K and V of an image was once cut to the length of the text."""
    cache = VTensorCache(LlamaConfig(**SIZES | {"num_hidden_layers": 3}), None, pages)
    for layer, tokens in enumerate((5, 30, 5)):
        cache.update(*states(1, tokens), layer)
    cache.update(*states(1, 1), 0)
    with pytest.raises(vtensor.OutOfPages), pages_left(pages, 0):
        cache.update(*states(1, 200), 2)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 30, 5]
    assert cache.layers[1].keys.equal(states(1, 30)[0])

"""The two halves of a cache for encoder-decoder models: a refused forward changes neither."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

import pytest
import torch

import vtensor
from vtensor import testing

pytest.importorskip("transformers")

import vtensor.integrations.transformers as package
import vtensor.integrations.transformers.cache as module
from vtensor.integrations.transformers import VTensorCache, VTensorLayer, encoder_decoder_cache, installed

from interrupts import at_every_bytecode, place
from model_zoo import halves, make
from rare_models import make_rare
from tiny_models import before_and_after, make_t5gemma, one_thread, pages_left, prompt, same, states  # noqa: F401

FEW = {"do_sample": False, "max_new_tokens": 6}
LONG, SHORT = prompt(1, 200), prompt(1, 20, seed=8)


def content(cache):
    """What both halves hold, and what a model believes that the encoder's does."""
    held = [
        [(layer.get_seq_length(), *(x if x is None else x.clone() for x in (layer.keys, layer.values)))]
        for half in halves(cache)
        for layer in half.layers
    ]
    return [*held, dict(cache.is_updated)]


def lengths(cache):
    return [[layer.get_seq_length() for layer in half.layers] for half in halves(cache)]


@contextmanager
def refused(n, error=vtensor.OutOfPages):
    """The update of a layer after the next ``n`` is refused."""
    update, calls = VTensorLayer.update, count()

    def refuse(layer, *args, **kwargs):
        if next(calls) == n:
            raise error("[test] refused")
        return update(layer, *args, **kwargs)

    with patch.object(VTensorLayer, "update", refuse), pytest.raises(error, match="test"):
        yield


def is_empty(cache):
    return not any(map(any, lengths(cache))) and not any(cache.is_updated.values())


def generate(model, cache, ids):
    return model.generate(ids, past_key_values=cache, **FEW)


def with_cache(model, pool):
    """The model, an empty cache for it, and the tokens that it gives to SHORT."""
    return model, encoder_decoder_cache(model.config, 256, pool), model.generate(SHORT, **FEW)


def begins_anew(model, cache, expected):
    assert is_empty(cache)
    assert torch.equal(generate(model, cache, SHORT), expected)
    cache.reset()


def check_refused(model, cache, expected, ids=LONG):
    """I8: whichever of the first four updates of a forward is refused, the next one begins anew."""
    for n in range(4):
        with refused(n):
            generate(model, cache, ids)
        begins_anew(model, cache, expected)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_a_refused_first_forward_leaves_both_halves_empty(pages, name):
    """I8: whichever of K and V of whichever layer of either half the memory runs out in."""
    model, cache, expected = with_cache(make(name), pages)
    needed = 80 if name == "T5" else 48
    for n in range(0, needed, 3):
        with pytest.raises(vtensor.OutOfPages), pages_left(pages, n):
            generate(model, cache, LONG)
        begins_anew(model, cache, expected)
    with pages_left(pages, needed):
        generate(model, cache, LONG)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_a_refused_later_forward_leaves_the_encoders_half(pages, name):
    model = make(name)
    first, then = prompt(1, 1, seed=3), prompt(1, 140, seed=4)

    def forward(cache, ids):
        with torch.no_grad():
            return model(SHORT, decoder_input_ids=ids, past_key_values=cache, use_cache=True).logits

    fresh, cache = (encoder_decoder_cache(model.config, 256, pages) for _ in range(2))
    for half in (fresh, cache):
        forward(half, first)
    expected, before = forward(fresh, then), content(cache)
    for n in range(0, 16, 3):
        with pytest.raises(vtensor.OutOfPages), pages_left(pages, n):
            forward(cache, then)
        assert same(content(cache), before) and all(cache.is_updated.values())
    assert torch.equal(forward(cache, then), expected)


def test_a_half_that_the_model_makes_itself(pages):
    """T5Gemma puts one of its own in the place of the encoder's, whenever that is empty."""
    check_refused(*with_cache(make_t5gemma(), pages), SHORT)


def test_after_an_interrupted_forward_a_reset_is_enough(pages):
    """What comes from outside may leave the step in some layers."""
    model, cache, expected = with_cache(make("T5"), pages)
    for n in range(4):
        with refused(n, KeyboardInterrupt):
            generate(model, cache, LONG)
        cache.reset()
        begins_anew(model, cache, expected)


def test_a_half_that_is_no_encoders(pages):
    """BLT keeps the K and V of its second decoder there, and marks no layer as updated."""
    model = make_rare("BLT")
    cache = encoder_decoder_cache(model.config, None, pages)

    def forward(ids):
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)

    forward(prompt(1, 20))
    before = content(cache)
    for n in range(0, 40, 3):
        with pytest.raises(vtensor.OutOfPages), pages_left(pages, n):
            forward(prompt(1, 300))
        assert same(content(cache), before)
    with pages_left(pages, 40):
        forward(prompt(1, 300))
    assert lengths(cache) == [[320, 0], [320, 320]]


@pytest.mark.parametrize("way", ["copied", "pickled", "installed"])
def test_a_cache_made_otherwise(pages, way):
    """I6: a copy that is refused empties its own halves, and not those that it was copied from."""
    model, cache, expected = with_cache(make("BART"), pages)
    generate(model, cache, LONG)
    before = content(cache)
    if way == "installed":
        with installed(pages):
            made = model.generate(LONG, **FEW, return_dict_in_generate=True).past_key_values
    else:
        made = copy.deepcopy(cache) if way == "copied" else pickle.loads(pickle.dumps(cache))
    for n in range(4):
        made.reset()
        with refused(n):
            generate(model, made, LONG)
        begins_anew(model, made, expected)
        assert same(content(cache), before)


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_shallow_copy_that_is_gone(pages, leaving):
    """I8: it, or what it was copied from, has the same halves, and they change together still."""
    model, cache, expected = with_cache(make("T5"), pages)
    both = [cache, copy.copy(cache)]
    del cache, both[leaving]
    check_refused(model, both[0], expected)


def test_a_half_copied_alone_is_a_plain_cache(pages):
    model, cache, _ = with_cache(make("BART"), pages)
    generate(model, cache, SHORT)
    before = content(cache)
    alone = copy.deepcopy(cache.cross_attention_cache)
    with pytest.raises(vtensor.InvalidArgument):
        alone.update(*states(3, 5), 1)
    assert type(alone) is VTensorCache and same(content(cache), before)


def test_memory_goes_with_the_last_reference(pages):
    """I14: without a collection of garbage, and not before."""
    cache = encoder_decoder_cache(make("BART").config, 256, pages)
    for half in halves(cache):
        half.update(*states(1, 5), 0)
    own = cache.self_attention_cache
    gc.collect()
    gc.disable()
    try:
        used = pages.stats().pages_used
        del half, cache
        assert pages.stats().pages_used == used // 2
        with pytest.raises(vtensor.InvalidArgument, match="layer 2"):
            own.update(*states(1, 5), 2)
        del own
        assert pages.stats().pages_used == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_interrupted_refusal_is_whole(pages, failing):
    """I17: the step is dropped in all layers of both halves, or in none."""

    def setup():
        cache = encoder_decoder_cache(make("BART").config, 256, pages)
        own, encoders = halves(cache)
        own.update(*states(1, 5), 0)
        encoders.update(*states(1, 9), 0)
        cache.is_updated[0] = True
        if failing == 1:
            own.update(*states(1, 5), 1)
        return cache, halves(cache)[failing]

    def refused(made):
        with pytest.raises(vtensor.InvalidArgument, match="as many"):
            made[1].update(states(1, 5)[0], states(1, 6)[1], 1)

    found = set()

    def check(made, outcome):
        cache = made[0]
        now = lengths(cache), dict(cache.is_updated)
        begun = ([[5, 5 * failing], [9, 0]], {0: True, 1: False})
        found.add("before" if is_empty(cache) else "begun" if now == begun else str(now))
        cache.reset()

    at_every_bytecode(setup, refused, check, within=module, each=place)
    assert found == {"before", "begun"}


def test_both_halves_take_the_same_options(pages, monkeypatch):
    """But the encoder's is never offloaded: after the first step a model reads it without an update."""
    monkeypatch.setattr(torch, "Stream", object)
    model = make("T5")
    own, encoders = halves(encoder_decoder_cache(model.config, offloading=True, tag="mine"))
    assert own.offloading and not encoders.offloading
    cache = encoder_decoder_cache(model.config, 256, pages, tag="mine")
    expected = generate(model, cache, SHORT)
    assert pages.sleep(contents="host", tag="mine") == 32 * pages.page_size
    pages.wake(tag="mine")
    cache.reset()
    assert torch.equal(generate(model, cache, SHORT), expected)


# ---------------------------------------------------------------------- batches

CHANGES = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices([1]),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select none": lambda cache: cache.batch_select_indices([]),
    "reset": lambda cache: cache.reset(),
}


def both_filled(pool):
    cache = encoder_decoder_cache(make("BART").config, 256, pool)
    for half in halves(cache):
        for layer in range(2):
            half.update(*states(2, 70, seed=layer), layer)
    cache.is_updated.update({0: True, 1: True})
    return cache


def test_a_cache_that_keeps_no_sequence_begins_anew(pages):
    """The decoder once believed the K and V of the encoder's output to be there still."""
    model, cache, expected = with_cache(make("T5"), pages)
    generate(model, cache, LONG)
    shallow = copy.copy(cache)
    CHANGES["select none"](cache)
    assert pages.stats().pages_used == 0
    begins_anew(model, shallow, expected)
    CHANGES["select none"](cache)
    begins_anew(model, cache, expected)


@pytest.mark.parametrize("change", ["reorder", "select", "repeat"])
def test_a_refused_change_changes_neither_half(pages, change):
    """I8: the decoder's half once had its new order already when the encoder's was refused."""
    refused = 0
    for n in count():
        cache = both_filled(pages)
        before = content(cache)
        try:
            with testing.fail_after(pages, n):
                CHANGES[change](cache)
        except vtensor.VTensorError:
            refused += 1
            assert same(content(cache), before)
        else:
            break
        finally:
            cache.reset()
    assert refused > 1


@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupted_change_changes_both_halves_or_neither(pages, change):
    """I17."""
    before, after = before_and_after(lambda: both_filled(pages), CHANGES[change], content)
    found = set()

    def check(cache, outcome):
        now = content(cache)
        found.add("before" if same(now, before) else "after" if same(now, after) else outcome.where)
        cache.reset()

    at_every_bytecode(lambda: both_filled(pages), CHANGES[change], check, within=package, each=place)
    assert found == {"before", "after"}

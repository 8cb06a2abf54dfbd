"""Defects of the layers of ``VTensorCache`` that the rest of the tests had once let pass."""

from __future__ import annotations

import copy
import pickle

import pytest

import vtensor

pytest.importorskip("transformers")

from vtensor.integrations.transformers import VTensorLayer, VTensorSlidingWindowLayer

from tiny_models import states

WINDOW = 8


@pytest.fixture
def pool():
    pool = vtensor.Pool("cpu", page_size=4096, prefetch=0)
    yield pool
    pool.close()


def test_a_pickled_window_that_records_keeps_its_tokens_and_its_length(pool):
    layer = VTensorSlidingWindowLayer(WINDOW, None, pool)
    layer.activate_past_recording()
    layer.update(*states(1, 20))
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded.get_seq_length() == 20 and loaded.keys.equal(layer.keys)
    loaded.crop(-10)
    layer.crop(-10)
    assert loaded.get_seq_length() == 10 and loaded.keys.equal(layer.keys)
    loaded.reset()


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_copy_of_a_layer_sleeps_by_the_same_tag(pool, tokens):
    """Also in what it stores after a reset, or before the first update."""
    layer = VTensorLayer(None, pool)
    layer.tag = "mine"
    if tokens:
        layer.update(*states(1, tokens))
    copied = copy.deepcopy(layer)
    copied.reset()
    copied.update(*states(1, 2))
    layer.reset()
    assert pool.sleep(contents="discard", tag="mine") > 0
    pool.wake()
    copied.reset()

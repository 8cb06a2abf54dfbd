"""Many architectures, many ways to generate: the tokens and the logits are those of a DynamicCache."""

from __future__ import annotations

import pytest
import torch

import vtensor
from vtensor import testing

pytest.importorskip("transformers")

from transformers import cache_utils
from transformers.cache_utils import DynamicCache, LinearAttentionLayer
from vtensor.integrations.transformers import (
    VTensorHybridLayer,
    VTensorHybridSlidingWindowLayer,
    VTensorLayer,
    VTensorSlidingWindowLayer,
)

from model_zoo import MODELS, caches, halves, make
from tiny_models import assert_same_content, assert_same_output, before, one_thread, prompt, run, states  # noqa: F401

METHODS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "assisted": {"do_sample": False},
    "padded": {"do_sample": False},
    "prefill in parts": {"do_sample": False, "prefill_chunk_size": 16},
}
LINEAR = ("Qwen3-Next", "Falcon-H1")
ENCODER_DECODER = ("T5", "BART")


@pytest.fixture
def strict_pages():
    """4 KiB pages whose holes are unreadable, and whose tails hold NaN: what reads past a row's end dies, or
    shows in its result."""
    budget = 1024 * 4096
    pool = testing.host_pool(strict_holes=True, page_size=4096, budget=budget, zero="never")

    def taken():
        return vtensor.empty(budget // 4, grow_dim=0, capacity=budget // 4, dtype=torch.float32, pool=pool)

    with taken() as all_pages:
        all_pages.fill_(float("nan"))
    with taken() as again:
        assert again.isnan().all()
    yield pool
    pool.close()


def inputs(method: str):
    if method in ("lookup", "assisted"):
        return prompt(1, 10).repeat(1, 4), None
    ids = prompt(2, 40)
    if method != "padded":
        return ids, None
    mask = torch.ones_like(ids)
    ids[1, :17] = mask[1, :17] = 0
    return ids, mask


# What transformers itself refuses, or fails in, is left out.
UNSUPPORTED = {(name, method) for name in LINEAR for method in ("lookup", "assisted")} | {
    (name, "prefill in parts") for name in (*ENCODER_DECODER, "CPM-Ant")
}
if before("5.18"):
    UNSUPPORTED |= {("Inkling", method) for method in ("lookup", "assisted")}  # RECORDED_WINDOW
# By every method: one of each kind of layers and their order. The caches of the others are made as theirs.
KINDS = (
    *("Llama", "Mistral", "Gemma 3", "DeepSeek-V3", "Llama 4", "MiMo-V2", "Inkling", "CPM-Ant"),
    *(*LINEAR, *ENCODER_DECODER),
)
PAIRS = [
    (name, method)
    for name in MODELS
    for method in METHODS
    if (name, method) not in UNSUPPORTED and (name in KINDS or method == "greedy")
]


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_tokens_and_logits_of_dynamic_cache(strict_pages, name, method):
    """Of one whose single steps go to the same kernel, so that logits are equal bit for bit. The tokens of a
    DynamicCache as it is are compared in test_transformers_default.py."""
    model = make(name)
    ours, theirs = caches(model, strict_pages)
    ids, mask = inputs(method)
    how = METHODS[method] | {"max_new_tokens": 14}
    if method == "assisted":  # by another model, whose tokens are right by chance alone
        how["assistant_model"] = make("BART" if name == "T5" else "T5" if name == "BART" else "Qwen3")
    expected = run(model, theirs, ids, mask, **how)
    assert_same_output(run(model, ours, ids, mask, **how), expected)
    for a, b in zip(halves(ours), halves(theirs), strict=True):
        assert isinstance(a, DynamicCache)
        assert_same_content(a, b)  # I2
    if method == "greedy":
        assert expected.sequences[:, -14:].unique().numel() > 2  # tokens that say something
    testing.check_invariants(strict_pages)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Llama", [VTensorLayer, VTensorLayer]),
        ("Mistral", [VTensorSlidingWindowLayer] * 2),
        ("Gemma 3", [VTensorSlidingWindowLayer, VTensorLayer]),
        ("Llama 4", [VTensorSlidingWindowLayer, VTensorLayer]),
        ("DeepSeek-V3", [VTensorLayer, VTensorLayer]),
        ("Qwen3-Next", [LinearAttentionLayer, VTensorLayer]),
        ("Falcon-H1", [VTensorHybridLayer] * 2),
        ("MiMo-V2", [VTensorSlidingWindowLayer, VTensorLayer]),
        ("Inkling", [VTensorHybridSlidingWindowLayer, VTensorHybridLayer]),
        ("CPM-Ant", [VTensorLayer, VTensorLayer]),
    ],
)
def test_each_layer_is_what_the_config_asks_for(host, name, layers):
    cache, _ = caches(make(name), host)
    assert [type(layer) for layer in cache.layers] == layers


@pytest.mark.skipif(
    not hasattr(cache_utils, "DummyLayer"), reason="transformers before 5.23 has no DummyLayer"
)
def test_layers_that_share_anothers_keys_stay_empty(host):
    """As Gemma 3n has them: DynamicCache makes a DummyLayer of each."""
    import transformers as hf
    from vtensor.integrations.transformers import VTensorCache

    config = hf.LlamaConfig(num_hidden_layers=2)
    config.kv_sharing_modes = ["own", "reuse"]
    cache = VTensorCache(config, 64, host, compiled=True)
    assert [type(layer) for layer in cache.layers] == [VTensorLayer, cache_utils.DummyLayer]
    keys, _ = cache.update(torch.zeros(1, 32, 3, 128), torch.zeros(1, 32, 3, 128), 0)
    assert keys.shape == (1, 32, 3, 128) and cache.is_compileable


# ---------------------------------------------------------------------- beside linear attention

GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.mark.parametrize("name", LINEAR)
def test_out_of_pages_empties_a_cache_whose_linear_states_have_moved_on(pool_factory, name):
    pool = pool_factory("host", pages=10)
    model = make(name)
    cache, theirs = caches(model, pool)
    length = 60 if name == "Falcon-H1" else 160
    with pytest.raises(vtensor.OutOfPages):
        run(model, cache, prompt(1, length), do_sample=False, max_new_tokens=120)
    assert cache.get_seq_length() == 0 and pool.stats().pages_used == 0
    assert not cache.has_previous_state()
    expected = run(model, theirs, prompt(1, 40), **GREEDY)
    assert_same_output(run(model, cache, prompt(1, 40), **GREEDY), expected)

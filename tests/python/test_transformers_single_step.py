"""A step of one token on the host: SDPA reads every head of K and V once, though there is no mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")

from transformers import DynamicCache
from vtensor.integrations import sdpa
from vtensor.integrations.sdpa import SingleStepView
from vtensor.integrations.transformers import VTensorCache

from tiny_models import GREEDY, filled, make_llama, one_thread, prompt, run, states  # noqa: F401


@pytest.fixture
def attention(monkeypatch):
    """The shapes of the queries for which torch's SDPA reads every head of K and V once."""
    queries = []
    attend = functional.scaled_dot_product_attention

    def watched(query, *args, **kwargs):
        if not kwargs.get("enable_gqa"):
            queries.append(tuple(query.shape))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(sdpa.functional, "scaled_dot_product_attention", watched)
    return queries


def step_views(batch=2, heads=2, tokens=33, size=16):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(batch, heads, tokens, size, generator=generator) for _ in range(2))
    return k.as_subclass(SingleStepView), v.as_subclass(SingleStepView)


def test_one_token_alone_gets_them(llama, pages):
    ours, _ = filled(llama.config, pages)
    for k in ours.update(*states(2, 2), 0):
        assert type(k) is torch.Tensor
    for k, stored in zip(
        ours.update(*states(2, 1), 0), (ours.layers[0].keys, ours.layers[0].values), strict=True
    ):
        assert type(k) is SingleStepView and k.data_ptr() == stored.data_ptr()
        assert type(stored) is torch.Tensor and torch.equal(k, stored)


def test_the_heads_of_a_group_are_stacked(attention):
    k, v = step_views()
    query = torch.randn(2, 8, 1, 16)
    out = functional.scaled_dot_product_attention(query, k, v, enable_gqa=True, scale=0.3)
    assert attention == [(2, 2, 4, 16)]
    assert type(out) is torch.Tensor
    assert torch.equal(out, sdpa.scaled_dot_product_attention(query, k, v, enable_gqa=True, scale=0.3))
    exact = functional.scaled_dot_product_attention(
        query.double(), k.double(), v.double(), enable_gqa=True, scale=0.3
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("queries", "how"),
    [
        (1, {"is_causal": True, "enable_gqa": True}),  # torch's corner: sees the first key alone
        (1, {"attn_mask": torch.arange(33) < 20, "enable_gqa": True}),
        (3, {"enable_gqa": True}),
        (1, {}),
        (3, {"is_causal": True}),
    ],
)
def test_whatever_else_sdpa_is_asked_for_is_torchs(queries, how):
    k, v = step_views(heads=8 if "enable_gqa" not in how else 2)
    query = torch.randn(2, 8, queries, 16)
    how = {name: value[None] if name == "attn_mask" else value for name, value in how.items()}
    plain = [x.as_subclass(torch.Tensor) for x in (k, v)]
    expected = functional.scaled_dot_product_attention(query, *plain, **how)
    assert torch.equal(functional.scaled_dot_product_attention(query, k, v, **how), expected)
    assert torch.equal(functional.scaled_dot_product_attention(query, key=k, value=v, **how), expected)


def test_it_is_a_plain_tensor_in_everything_else():
    k, _ = step_views()
    plain = k.as_subclass(torch.Tensor)
    for result in (
        k[:, :1],
        k.transpose(1, 2),
        torch.cat([k, k], dim=2),
        k + plain,
        k.expand(2, 2, 33, 16),
        k * 2,
    ):
        assert type(result) is torch.Tensor
    assert torch.equal(torch.cat([k, plain], dim=2), torch.cat([plain, plain], dim=2))
    assert k.numpy().shape == (2, 2, 33, 16)
    out = torch.empty(2, 2, 33, 16)
    assert torch.add(k, 1, out=out) is out and torch.equal(out, plain + 1)


def test_a_model_asks_for_no_mask_and_every_head_is_read_once(pages, attention):
    model = make_llama("sdpa")
    run(model, VTensorCache(model.config, 128, pages), prompt(2), do_sample=False, max_new_tokens=3)
    assert attention == [(2, 2, 2, 16)] * 4  # two steps after the prompt, two layers, 4 heads over 2 of K


@pytest.mark.parametrize("kind", [pytest.param("flex_attention", marks=pytest.mark.slow), "eager"])
def test_other_attention_takes_them(pages, kind):
    # After other tests in one process torch 2.13 once wrote C++ for it that does not compile.
    torch._dynamo.reset()
    model = make_llama(kind)

    def plain() -> torch.Tensor:
        return run(model, DynamicCache(config=model.config), prompt(2), **GREEDY).sequences

    expected = plain()
    given = run(model, VTensorCache(model.config, 128, pages), prompt(2), **GREEDY).sequences
    if not torch.equal(given, expected) and any(not torch.equal(plain(), expected) for _ in range(8)):
        pytest.skip(f"{kind} gives another text each time here, with a DynamicCache too (torch 2.13, AVX2)")
    assert torch.equal(given, expected)

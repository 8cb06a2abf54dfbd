"""A Hugging Face model served over the cache gives each request the tokens that it has alone."""

from __future__ import annotations

import zlib
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache
from vtensor.integrations.transformers.serving import ServedModel, serving_cache

from model_zoo import MODELS, WINDOW
from support import open_pool
from tiny_models import SIZES, VOCAB, make_llama, one_thread  # noqa: F401
from vtensor import InvalidArgument
from vtensor.serving import Engine, Request, SampleGroup, Scheduler, greedy

MAX_LEN = 128
TOKENS_A_PAGE = 16  # both layers in a page, float32


def drawn(logits, sequence) -> int:
    """A token that depends on the logits and on the sequence's own seed alone."""
    seed = zlib.crc32(repr((sequence.group.request.id, sequence.index, sequence.generated)).encode())
    chances = torch.softmax(logits.double(), -1)
    return int(torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed)))


def alone(model, request, choose=greedy):
    """The tokens of each sample if the model serves only this request, with its own cache."""
    results = []
    for sequence in SampleGroup(request, 0).sequences:
        cache, ids = DynamicCache(config=model.config), torch.tensor([sequence.tokens])
        while sequence.generated < request.max_new_tokens:
            with torch.no_grad():
                logits = model(input_ids=ids, past_key_values=cache).logits[0, -1]
            token = choose(logits, sequence)
            sequence.output.append(token)
            sequence.known += 1
            ids = torch.tensor([[token]])
            if token in request.stop:
                break
        results.append(sequence.output)
    return results


@contextmanager
def engine_for(model, pages, choose=greedy, token_budget=32, max_batch=6, **options):
    """An engine whose cache has `pages` pages of 16 tokens of both layers' K, or V."""
    pool = open_pool("host", pages)
    options = {"layer_group": 2, "pool": pool} | options
    try:
        with (
            serving_cache(model, max_batch, MAX_LEN, **options) as cache,
            ServedModel(model, cache) as served,
        ):
            yield Engine(Scheduler(cache, token_budget=token_budget), served, choose)
    finally:
        pool.close()


def ids(length, seed):
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def mixed_requests(samples=1):
    """Prompts of many lengths, three of which begin alike."""
    common = ids(40, seed=1)
    prompts = [
        common,
        ids(7, 2),
        common + ids(9, 3),
        ids(61, 4),
        ids(1, 5),
        common[:35] + ids(20, 6),
        ids(33, 7),
    ]
    return [Request(i, prompt, 24 + 3 * i, samples=samples) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_preempted_and_shared_requests_get_their_own_tokens(attention, layout):
    model = make_llama(attention)
    requests = mixed_requests()
    expected = {request.id: alone(model, request) for request in requests}
    with engine_for(model, pages=24, layout=layout) as engine:
        done = engine.run(requests)
        stats = engine.scheduler.stats
    assert {id: completion.tokens for id, completion in done.items()} == expected
    assert stats.recomputed >= 1 and stats.reused_tokens >= TOKENS_A_PAGE


def test_samples_that_fork_and_are_swapped_get_their_own_tokens(monkeypatch):
    model = make_llama("sdpa")
    requests = mixed_requests(samples=2)[:5]
    expected = {request.id: alone(model, request, drawn) for request in requests}
    waited, due = set(), set()
    with engine_for(model, pages=28, choose=drawn) as engine:
        cache, forward = engine.scheduler.cache, engine.forward
        wait = cache.wait

        def forward_of(plan):
            due.update((slot, layer) for slot in plan.swapped_in for layer in range(len(cache)))
            return forward(plan)

        engine.forward = forward_of
        monkeypatch.setattr(cache, "wait", lambda slot, layer: (waited.add((slot, layer)), wait(slot, layer)))
        done = engine.run(requests)
        stats = engine.scheduler.stats
    assert {id: completion.tokens for id, completion in done.items()} == expected
    assert stats.swapped >= 1
    assert due and waited == due, "each layer waits for what it reads"
    assert any(first != second for first, second in expected.values())


@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "Gemma 2", "Gemma 3", "GPT-2", "Phi-3", "Mixtral"])
def test_models(name):
    """Sliding windows, norms of K, soft caps, learned positions, fused projections, experts."""
    kind, config, changes = MODELS[name]
    torch.manual_seed(3)
    sizes = SIZES | changes
    attention = "eager" if name == "Gemma 2" else "sdpa"
    model = kind(config(**sizes, attn_implementation=attention)).eval()
    requests = mixed_requests()[:4]
    expected = {request.id: alone(model, request) for request in requests}
    assert any(len(r.prompt) + r.max_new_tokens > WINDOW + 1 for r in requests)
    with engine_for(model, pages=24) as engine:
        done = engine.run(requests)
    assert {id: completion.tokens for id, completion in done.items()} == expected


def test_a_prompt_of_ids_that_the_model_has_not_is_refused():
    model = make_llama("sdpa")
    good = Request("good", ids(9, 2), 6)
    with engine_for(model, pages=8) as engine:
        engine.submit(good)
        with pytest.raises(InvalidArgument, match=f"{VOCAB} in the prompt of request 'bad'.* has {VOCAB}"):
            engine.submit(Request("bad", [1, VOCAB], 6))
        done = engine.run()
    assert done["good"].tokens == alone(model, good)


def test_the_model_has_its_own_attention_again():
    model = make_llama("sdpa")
    request = Request(0, ids(30, 2), 6)
    before = alone(model, request)
    with engine_for(model, pages=30) as engine:
        assert model.config._attn_implementation != "sdpa"
        with pytest.raises(InvalidArgument, match=r"close\(\) the ServedModel before other uses"):
            model(torch.tensor([[1, 2]]))
        engine.run([request])
    assert model.config._attn_implementation == "sdpa"
    assert alone(model, request) == before


def test_what_is_not_served():
    model = make_llama("sdpa")
    pool = open_pool("host", 8)
    with pool:
        with serving_cache(make_llama("sdpa", num_hidden_layers=3), 2, MAX_LEN, pool=pool) as cache:
            with pytest.raises(InvalidArgument, match="has 3 layers"):
                ServedModel(model, cache)
        with serving_cache(model, 2, MAX_LEN, windows=[None, 8], pool=pool) as cache:
            with pytest.raises(InvalidArgument, match="without windows="):
                ServedModel(model, cache)
        with serving_cache(make_llama("sdpa", num_key_value_heads=4), 2, MAX_LEN, pool=pool) as cache:
            with (
                ServedModel(model, cache) as served,
                pytest.raises(InvalidArgument, match="the cache has other heads"),
            ):
                Engine(Scheduler(cache), served).run([Request(0, [1, 2], 2)])
        with serving_cache(model, 2, MAX_LEN, pool=pool) as cache:
            with pytest.raises(InvalidArgument, match="cache is a LlamaForCausalLM: give"):
                ServedModel(cache, model)
            kind, config, changes = MODELS["Llama 4"]
            with pytest.raises(InvalidArgument, match="chunked_attention"):
                ServedModel(kind(config(**SIZES | changes)), cache)
            model.set_attn_implementation("flex_attention")
            with pytest.raises(InvalidArgument, match="flex_attention"):
                ServedModel(model, cache)

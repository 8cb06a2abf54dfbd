"""A Hugging Face model served over the cache gives each request the tokens that it has alone."""

from __future__ import annotations

import copy
import zlib
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from vtensor.integrations.transformers.release import CACHE
from vtensor.integrations.transformers.serving import ServedModel, serving_cache

from model_zoo import MODELS, WINDOW
from support import open_pool
from tiny_models import SIZES, VOCAB, make_llama, one_thread  # noqa: F401
from vtensor import InvalidArgument
from vtensor.serving import Engine, Request, SampleGroup, Scheduler, greedy

MAX_LEN = 128
TOKENS_A_PAGE = 16  # both layers in a page, float32
PLAIN = {"num_key_value_heads": 4, "head_dim": 8}  # for models without such options
BART = {
    f"{part}_{name}": n
    for part in ("encoder", "decoder")
    for name, n in (("layers", 2), ("ffn_dim", 64), ("attention_heads", 4))
}
SCALES = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 100.0}
QWEN2_MOE = {"num_experts": 4, "head_dim": 8, "sliding_window": 9, "use_sliding_window": True}


def one_layer_apart(config):
    """A Llama one layer of which attends by itself."""
    model = hf.LlamaForCausalLM(config)
    model.model.layers[1].self_attn.config = copy.deepcopy(config)
    return model


class OtherValues:
    """A cache that stores V, and gives attention another."""

    def __init__(self, cache):
        self.cache = cache

    def update(self, *states, **others):
        key, value = self.cache.update(*states, **others)
        return key, 2 * value


class Turned(OtherValues):
    """A cache whose second layer is the model's first."""

    def update(self, key, value, layer, *others, **named):
        return self.cache.update(key, value, 1 - layer, *others, **named)


class OneMore(OtherValues):
    """A cache of which the model's first layer uses the second, and so on."""

    def update(self, key, value, layer, *others, **named):
        if isinstance(self.cache, DynamicCache):
            self.cache.layers += [DynamicLayer() for _ in range(3 - len(self.cache.layers))]
        return self.cache.update(key, value, layer + 1, *others, **named)


def with_cache(model, kind):
    """The model, each layer of which gets its cache in one of that kind."""
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, given: (args, given | {CACHE: kind(given[CACHE])}), with_kwargs=True
        )
    return model


def other_values(config):
    """A Llama that attends to other V than it has cached."""
    return with_cache(hf.LlamaForCausalLM(config), OtherValues)


def turned(config):
    """A Llama whose layers store K and V at other numbers than their own, as those that loop over layers."""
    return with_cache(hf.LlamaForCausalLM(config), Turned)


def one_layer_more(config):
    """A Llama whose last layer keeps K and V past those of its layers, as those that loop over layers do."""
    return with_cache(hf.LlamaForCausalLM(config), OneMore)


def all_logits(config):
    """A Llama that computes the logits of all tokens, as Video-Llama 3 and Qwen2.5-Omni do."""
    model = hf.LlamaForCausalLM(config)
    model.register_forward_pre_hook(
        lambda module, args, given: (args, given | {"logits_to_keep": 0}), with_kwargs=True
    )
    return model


# As in model_zoo.py.
SERVED = MODELS | {
    "Cohere": (hf.CohereForCausalLM, hf.CohereConfig, {"tie_word_embeddings": False}),
    "GLM-4": (hf.Glm4ForCausalLM, hf.Glm4Config, {}),
    "GPT-NeoX": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, PLAIN),
    "Phi": (hf.PhiForCausalLM, hf.PhiConfig, PLAIN),
    "Qwen2-MoE": (  # no layer has the window
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig,
        QWEN2_MOE | {"layer_types": ["full_attention"] * 2},
    ),
    "OPT": (
        hf.OPTForCausalLM,
        hf.OPTConfig,
        PLAIN | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 256},
    ),
    "Llama, turned": (turned, hf.LlamaConfig, {}),
    "Llama, all logits": (all_logits, hf.LlamaConfig, {}),
}

# What a refusal says about a model.
NOT_SERVED = {
    "Llama, in a layer": (
        one_layer_apart,
        hf.LlamaConfig,
        {},
        "attends otherwise than once a layer",
    ),
    "Llama, with a layer more": (
        one_layer_more,
        hf.LlamaConfig,
        {},
        "keeps K and V more than once a layer",
    ),
    "BERT for generation, no decoder": (
        hf.BertGenerationDecoder,
        hf.BertGenerationConfig,
        PLAIN,
        "BertGenerationSelfAttention is not causal",
    ),
    "Falcon": (
        hf.FalconForCausalLM,
        lambda head_dim, **sizes: hf.FalconConfig(**sizes, num_kv_heads=4, new_decoder_architecture=True),
        PLAIN,
        "does not attend through AttentionInterface: .* call its generate",
    ),
    "GPT-Neo": (
        hf.GPTNeoForCausalLM,
        hf.GPTNeoConfig,
        PLAIN | {"attention_types": [[["global"], 2]]},
        "does not attend through AttentionInterface: ",
    ),
    "GPT": (
        hf.OpenAIGPTLMHeadModel,
        hf.OpenAIGPTConfig,
        PLAIN,
        "does not attend through AttentionInterface: ",
    ),
    "BLOOM": (hf.BloomForCausalLM, hf.BloomConfig, PLAIN, "has positions of its own"),
    "BART's decoder": (
        hf.BartForCausalLM,
        hf.BartConfig,
        PLAIN | BART | {"d_model": 32, "is_encoder_decoder": False},
        "has positions of its own",
    ),
    "RoBERTa": (
        hf.RobertaForCausalLM,
        hf.RobertaConfig,
        PLAIN | {"is_decoder": True},
        "positions of its own",
    ),
    "Doge": (hf.DogeForCausalLM, hf.DogeConfig, {}, "DogeAttention .* has its window, or more, in a mask"),
    "Phimoe with a window": (
        hf.PhimoeForCausalLM,
        hf.PhimoeConfig,
        {"num_local_experts": 2, "sliding_window": 9},
        "PhimoeAttention .* has its window, or more, in a mask",
    ),
    "Qwen2-MoE with a window": (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig,
        QWEN2_MOE,
        "Qwen2MoeAttention .* has its window, or more, in a mask",
    ),
    "Llama, a window that only its cache has": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {"sliding_window": 9},
        "LlamaAttention .* has its window, or more, in a mask",
    ),
    "DiffLlama": (
        hf.DiffLlamaForCausalLM,
        hf.DiffLlamaConfig,
        {},
        "DiffLlamaAttention does not attend, once, to the K and V just cached",
    ),
    "Llama, other V": (
        other_values,
        hf.LlamaConfig,
        {},
        "LlamaAttention does not attend, once, to the K and V just cached",
    ),
    "Phi-3 longrope": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config,
        {
            "head_dim": 8,
            "original_max_position_embeddings": 64,
            "rope_parameters": SCALES | {"rope_type": "longrope"},
        },
        "of more than 64 tokens changes .* make it with max_len=64",
    ),
    "Llama, dynamic": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
        "of more than 64 tokens changes .* make it with max_len=64",
    ),
    "DeepSeek-V3": (
        *MODELS["DeepSeek-V3"],
        "the cache has other heads: .* If you did, the model is not served",
    ),
    "Mamba": (
        hf.MambaForCausalLM,
        lambda **_: hf.MambaConfig(hidden_size=32, num_hidden_layers=2),
        {},
        "has no heads of K and V",
    ),
    "Gemma 4": (
        hf.Gemma4ForCausalLM,
        hf.Gemma4TextConfig,
        {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32},
        "other heads",
    ),
    "Llama, not causal": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {"is_causal": False},
        "LlamaForCausalLM is not causal",
    ),
}


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
def engine_for(model, pages, choose=greedy, token_budget=32, max_batch=6, max_len=MAX_LEN, **options):
    """An engine whose cache has `pages` pages of 16 tokens of both layers' K, or V."""
    pool = open_pool("host", pages)
    options = {"layer_group": 2, "pool": pool} | options
    try:
        with (
            serving_cache(model, max_batch, max_len, **options) as cache,
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


def check_served(model, requests, pages, choose=greedy, **options):
    """Each request gets the tokens that it has alone. Returns the scheduler's counts."""
    expected = {request.id: alone(model, request, choose) for request in requests}
    with engine_for(model, pages, choose, **options) as engine:
        done = engine.run(requests)
    assert {id: completion.tokens for id, completion in done.items()} == expected
    return engine.scheduler.stats


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_preempted_and_shared_requests_get_their_own_tokens(attention, layout):
    stats = check_served(make_llama(attention), mixed_requests(), pages=24, layout=layout)
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


def model_of(kind, config, changes, attention=None):
    torch.manual_seed(3)
    return kind(config(**SIZES | changes, attn_implementation=attention)).eval()


@pytest.mark.parametrize(
    "name",
    ["Qwen3", "Mistral", "Gemma 2", "Gemma 3", "GPT-2", "Phi-3", "Mixtral", "GPT-OSS", "Cohere", "GLM-4"]
    + ["GPT-NeoX", "Phi", "OPT", "Qwen2-MoE", "Llama, turned", "Llama, all logits"],
)
def test_models(name):
    """Sliding windows, norms of K, soft caps, learned positions, fused projections, experts, sinks."""
    model = model_of(*SERVED[name], "eager" if name in ("Gemma 2", "GPT-OSS") else "sdpa")
    requests = mixed_requests()[:4]
    assert any(len(r.prompt) + r.max_new_tokens > WINDOW + 1 for r in requests)
    check_served(model, requests, pages=24)


def test_a_prompt_of_ids_that_the_model_has_not_is_refused():
    model = make_llama("sdpa")
    good = Request("good", ids(9, 2), 6)
    with engine_for(model, pages=8) as engine:
        engine.submit(good)
        with pytest.raises(InvalidArgument, match=f"{VOCAB} in the prompt of request 'bad'.* has {VOCAB}"):
            engine.submit(Request("bad", [1, VOCAB], 6))
        done = engine.run()
    assert done["good"].tokens == alone(model, good)


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


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_model_whose_tokens_would_be_others_is_refused(name):
    """At once or in the first call, without a token, and the model has its own attention again."""
    *parts, sentence = NOT_SERVED[name]
    model = model_of(*parts)
    before, _ = implementations(model), model(torch.tensor([[1, 2]]))
    tokens = []
    with open_pool("host", 40) as pool:
        with pytest.raises(InvalidArgument, match=sentence):
            with serving_cache(model, 2, MAX_LEN, pool=pool) as cache, ServedModel(model, cache) as served:
                engine = Engine(Scheduler(cache), served, lambda logits, sequence: tokens.append(1) or 1)
                for request in (Request("a", ids(9, 2), 3), Request("b", ids(20, 3), 3)):
                    engine.submit(request)
                try:
                    engine.step()
                finally:  # as any refused call: they are there, and leave no slot behind
                    assert engine.unfinished == 2
                    engine.cancel("a")
                    engine.cancel("b")
                    assert cache.stats().slots_free == 2
    assert not tokens
    assert implementations(model) == before
    model(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("name", ["Phi-3 longrope", "Llama, dynamic", "Phimoe with a window"])
def test_what_depends_on_length_is_served_in_a_cache_that_is_as_short(name):
    *parts, _ = NOT_SERVED[name]
    model = model_of(*parts)
    requests = [Request(0, ids(4, 2), 5), Request(1, ids(2, 3), 3)]
    check_served(model, requests, pages=40, max_batch=2, max_len=9 if "window" in name else 64)


def implementations(model):
    """The attention of each part of a model."""
    return [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]


def test_each_part_of_a_model_has_its_own_attention_again():
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.Gemma3Config(
        text_config=SIZES | MODELS["Gemma 3"][2],
        vision_config=vision | {"image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        attn_implementation={"text_config": "sdpa", "vision_config": "eager"},
    )
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    before = implementations(model)
    assert {"sdpa", "eager"} <= set(before)
    request = Request(0, ids(9, 2), 6)
    expected = alone(model, request)
    with engine_for(model, pages=30) as engine:
        assert not {"sdpa", "eager"} & set(implementations(model))
        with pytest.raises(InvalidArgument, match=r"close\(\) the ServedModel before other uses"):
            model(torch.tensor([[1, 2]]))
        assert engine.run([request])[0].tokens == expected
    assert implementations(model) == before
    assert alone(model, request) == expected

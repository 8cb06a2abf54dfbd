"""``generate()`` with 16 layers' worth of cache, beam search and prefix reuse, against Hugging Face's caches.

One token of padding stands in front, so that every cache has a mask and attention is one kernel: without a
mask transformers takes another, which on the CPU is slower than all that is compared here.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch

import vtensor

from .harness import Bar, Figure, Settings, Skipped, clock, count, interleave, slowdown, speedup

BEAMS = 8
PREFIX = 8192


def run(settings: Settings) -> list[Figure]:
    require_transformers(settings)
    figures = []
    for length in (1024, 8192, 32768):
        figures += generate(settings, settings.pick(length, 128))
        if settings.quick:
            break
    return [*figures, *paged(settings), *beams(settings), *prefix(settings)]


def generate(settings: Settings, length: int) -> list[Figure]:
    """Tokens a second, and memory, of generate() going on from `length` tokens.

    The limit is the demo's ``PreallocatedCache``: it has the memory for all tokens beforehand and hands
    attention views of exactly those stored: ``StaticCache`` without the part that is not written yet.
    """
    from transformers import DynamicCache, StaticCache
    from vtensor.integrations.demo.model import PreallocatedCache
    from vtensor.integrations.transformers import VTensorCache

    model = make_model(settings.pick(16, 2))
    rounds, new = settings.pick(8, 1), settings.pick(4, 2)
    final = length + (rounds + 1) * new + 1
    pool = vtensor.Pool("cpu")
    ours = VTensorCache(model.config, final, pool)
    caches: dict[str, Any] = {
        "vtensor": ours,
        "limit": PreallocatedCache(model.config, final),
        "dynamic": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=final),
    }
    for cache in caches.values():
        fill(model, cache, 1, length)
    ids = {name: torch.zeros(1, length + 1, dtype=torch.int64) for name in caches}

    def sample(name: str) -> float:
        mask = torch.ones_like(ids[name])
        mask[0, 0] = 0

        def go_on() -> None:
            options = {"past_key_values": caches[name], "max_new_tokens": new, "do_sample": False}
            ids[name] = model.generate(ids[name], attention_mask=mask, **options)

        return clock(go_on)

    taken = interleave({name: lambda name=name: sample(name) for name in caches}, rounds)
    differing = sum(not torch.equal(ids[name], ids["limit"]) for name in caches)
    mapped = pool.stats().nbytes_mapped
    needed = ours.get_seq_length() * token_bytes(model)
    held = {name: held_bytes(caches[name]) for name in ("dynamic", "static")}
    # torch.cat makes a layer's K anew while the old one is there.
    held["dynamic"] += caches["dynamic"].layers[0].keys.nbytes
    ours.reset()
    pool.close()
    what = f"generate(), {new} tokens at {length:,}"
    ahead, near = (Bar(1.0, at_least=True), Bar(1.03)) if length >= 8192 else (None, None)
    return [
        speedup.among(taken, what, "DynamicCache", "vtensor", "dynamic", bar=ahead),
        speedup.among(taken, what, "StaticCache", "vtensor", "static", bar=ahead),
        slowdown.among(taken, what, "preallocated, exact views", "vtensor", "limit", bar=near),
        count(f"KV mapped at {length:,}", "what the tokens need", (mapped / needed - 1) * 100, "% above"),
        count(f"KV at {length:,}, most at once", "DynamicCache", held["dynamic"] / mapped, "x less", ahead),
        count(f"KV at {length:,}", "StaticCache of just this length", held["static"] / mapped, "x less"),
        count(f"tokens at {length:,}", "preallocated", differing, "caches differ", Bar(0)),
    ]


def paged(settings: Settings) -> list[Figure]:
    """Seconds a token of one request, against Hugging Face's continuous batching over a paged cache."""
    from transformers import GenerationConfig
    from vtensor.integrations.transformers import VTensorCache

    model = make_model(settings.pick(2, 1))  # the paged cache has to read the prompt itself, which takes long
    length, new = settings.pick(PREFIX, 64), settings.pick(32, 4)
    prompt = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(1))
    config = GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0)
    pool = vtensor.Pool("cpu")
    tokens: dict[str, list[int]] = {}

    def ours() -> float:
        stamps: list[float] = []
        cache = VTensorCache(model.config, pool=pool)
        options = {"generation_config": config, "past_key_values": cache, "streamer": Stamps(stamps)}
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        cache.reset()
        tokens["vtensor"] = out[0, length:].tolist()
        return seconds_a_token(stamps)

    def theirs() -> float:
        outputs = model.generate_batch(prompt.tolist(), generation_config=config, record_timestamps=True)
        (output,) = outputs.values()
        tokens["paged"] = output.generated_tokens
        return seconds_a_token(output.timestamps)

    taken = interleave({"vtensor": ours, "paged": theirs}, settings.pick(3, 1), warmup=0)
    pool.close()
    what, against = f"a token at {length:,} tokens", "paged continuous batching"
    differ = int(tokens["vtensor"] != tokens["paged"])
    return [
        speedup.among(taken, what, against, "vtensor", "paged", bar=Bar(1.0, at_least=True)),
        count(what, against, differ, "texts differ", Bar(0)),
    ]


class Stamps:
    """A streamer that notes when each token came."""

    def __init__(self, stamps: list[float]) -> None:
        self.stamps = stamps

    def put(self, value: torch.Tensor) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass


def seconds_a_token(stamps: list[float]) -> float:
    return statistics.median(b - a for a, b in zip(stamps, stamps[1:], strict=False))


def beams(settings: Settings) -> list[Figure]:
    """Steps of 8 beams: every beam goes on from some other, and gets a token of its own."""
    from transformers import DynamicCache
    from vtensor.integrations.transformers import VTensorCache

    length, rounds = settings.pick(PREFIX, 300), settings.pick(10, 2)
    model = make_model(settings.pick(4, 1))
    pool = vtensor.Pool("cpu")
    ours, dynamic = VTensorCache(model.config, length + rounds + 8, pool), DynamicCache(config=model.config)
    for cache in (ours, dynamic):
        fill(model, cache, 1, length)
        cache.batch_repeat_interleave(BEAMS)
    tokens = torch.zeros(BEAMS, 1, dtype=torch.int64)
    orders = {name: torch.Generator().manual_seed(1) for name in ("vtensor", "dynamic")}
    copied: list[int] = []

    def step(name: str, cache: Any) -> float:
        order = torch.randint(BEAMS, (BEAMS,), generator=orders[name])
        mask = torch.ones(BEAMS, cache.get_seq_length() + 1, dtype=torch.int64)
        mask[:, 0] = 0

        seconds = clock(lambda: cache.reorder_cache(order))
        shared = pool.stats()
        seconds += clock(lambda: model(tokens, attention_mask=mask, past_key_values=cache))
        if name == "vtensor":  # the partial last pages of beams that share them, copied whole
            now = pool.stats()
            pages = now.pages_used + now.pages_private - shared.pages_used - shared.pages_private
            copied.append(pages * pool.page_size)
        return seconds

    with torch.inference_mode():
        samples = {"vtensor": lambda: step("vtensor", ours), "dynamic": lambda: step("dynamic", dynamic)}
        taken = interleave(samples, rounds)
    # DynamicCache copies all of K and V twice: index_select for the order, cat for the token.
    theirs = 2 * BEAMS * dynamic.get_seq_length() * token_bytes(model)
    ours.reset()
    pool.close()
    what = f"step of {BEAMS} beams at {length:,} tokens"
    bar = None if settings.quick else Bar(50, at_least=True)
    return [
        speedup.among(taken, what, "DynamicCache", "vtensor", "dynamic", bar=Bar(1.0, at_least=True)),
        count(f"{what}: bytes copied, worst step", "DynamicCache", theirs / max(1, *copied), "x fewer", bar),
    ]


def prefix(settings: Settings) -> list[Figure]:
    """copy.deepcopy of a cache that holds a prompt."""
    from transformers import DynamicCache
    from vtensor.integrations.transformers import VTensorCache

    length = settings.pick(PREFIX, 300)
    model = make_model(settings.pick(16, 2))
    pool = vtensor.Pool("cpu")
    ours = VTensorCache(model.config, length + 64, pool)
    caches: dict[str, Any] = {"vtensor": ours}
    caches |= {name: DynamicCache(config=model.config) for name in ("dynamic", "control")}
    for cache in caches.values():
        fill(model, cache, 1, length)
    used = pool.stats().pages_used

    def sample(cache: Any) -> float:
        kept: list[Any] = []
        return clock(lambda: kept.append(copy.deepcopy(cache)))

    samples = {name: lambda cache=cache: sample(cache) for name, cache in caches.items()}
    taken = interleave(samples, settings.pick(30, 2))
    branch = copy.deepcopy(ours)
    more = pool.stats().pages_used - used
    for cache in (branch, ours):
        cache.reset()
    pool.close()
    what = f"copy.deepcopy of {length:,} tokens"
    bar = Bar(50, at_least=True)
    return [
        speedup.among(taken, what, "DynamicCache", "vtensor", "dynamic", "control", bar),
        count(what, "the cache itself", more, "pages more", Bar(0)),
    ]


def require_transformers(settings: Settings) -> None:
    if settings.device != "cpu":
        raise Skipped("the demo's model runs on the CPU")
    try:
        import vtensor.integrations.transformers  # noqa: F401
    except ImportError as error:
        raise Skipped(f"needs transformers ({error})") from error


def make_model(layers: int) -> Any:
    from vtensor.integrations.demo.model import make_llama

    return make_llama(layers, vocab_size=256)


def fill(model: Any, cache: Any, batch: int, length: int) -> None:
    config = model.config
    generator = torch.Generator().manual_seed(length)
    shape = (2, batch, config.num_key_value_heads, length, config.head_dim)
    keys, values = torch.randn(shape, generator=generator)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, values, layer)


def held_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def token_bytes(model: Any) -> int:
    config = model.config
    size: int = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    return size

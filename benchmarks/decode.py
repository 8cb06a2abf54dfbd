"""Decode steps of the demo's Llama at 8k tokens, with each kind of Hugging Face cache in turn.

The limit is the demo's ``PreallocatedCache``: it has the memory for all tokens beforehand and hands attention
views of exactly those stored, which is ``StaticCache`` without the part that is not written yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import vtensor

from .generate import fill, others, require_transformers, token_bytes
from .harness import Bar, Figure, Settings, clock, count, interleave, slowdown, speedup


def run(settings: Settings) -> list[Figure]:
    require_transformers(settings)
    from vtensor.integrations.demo.measure import FULL
    from vtensor.integrations.demo.model import PreallocatedCache, make_llama
    from vtensor.integrations.transformers import VTensorCache

    start, steps, warmup = FULL.prompt, settings.pick(FULL.new, 2), settings.pick(3, 1)
    model = make_llama(FULL.layers, FULL.vocab_size)
    final = start + steps + warmup
    pool = vtensor.Pool("cpu", page_size=FULL.page_size, prefetch=0)
    ours = VTensorCache(model.config, max_len=FULL.max_len, pool=pool)
    caches = {"vtensor": ours, "control": PreallocatedCache(model.config, final), **others(model, final)}
    for cache in caches.values():
        fill(model, cache, 1, start)

    token = torch.zeros(1, 1, dtype=torch.int64)
    # A token of padding at the front gives each cache a mask, as StaticCache always has: transformers takes
    # another attention kernel without one, which on the CPU is slower than all that is compared here.
    mask = torch.ones(1, final, dtype=torch.int64)
    mask[0, 0] = 0
    logits: dict[str, torch.Tensor] = {}
    lengths = dict.fromkeys(caches, start)
    above: list[float] = []

    def step(name: str) -> float:
        length = lengths[name] = lengths[name] + 1

        def forward() -> None:
            output = model(token, attention_mask=mask[:, :length], past_key_values=caches[name])
            logits[name] = output.logits

        seconds = clock(forward)
        if name == "vtensor":
            above.append((pool.stats().nbytes_mapped / (length * token_bytes(model)) - 1) * 100)
        return seconds

    samples: dict[str, Callable[[], float]] = {name: lambda name=name: step(name) for name in caches}
    with torch.inference_mode():
        taken = interleave(samples, steps, warmup)
    differing = sum(not torch.equal(logits[name], logits["limit"]) for name in ("vtensor", "dynamic"))
    ours.reset()
    pool.close()

    what = f"decode step at {start:,} tokens"
    return [
        slowdown.among(taken, what, "preallocated, exact views", "vtensor", "limit", "control", Bar(1.03)),
        speedup(what, "DynamicCache", taken["vtensor"], taken["dynamic"], bar=Bar(1.0, at_least=True)),
        speedup(what, "StaticCache", taken["vtensor"], taken["static"]),
        count("KV mapped, worst step", "what the tokens need", max(above), "% above", Bar(2.0)),
        count("logits", "preallocated", differing, "caches differ", Bar(0)),
    ]

"""Reads the text and generates with each of the caches, through model.generate()."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, LlamaForCausalLM, StaticCache
from transformers.generation.streamers import BaseStreamer

import vtensor

from ..transformers import VTensorCache
from ..transformers.release import CACHE
from .model import PreallocatedCache

OURS = "VTensorCache"
GROWING = "DynamicCache"
LIMIT = "preallocated"
PADDING = 0  # any token will do

Row = dict[str, Any]  # the figures of one cache; sizes are bytes


@dataclass(frozen=True)
class Settings:
    """The sizes of the demo."""

    prompt: int  # tokens read, including one token of padding before them
    new: int  # tokens generated
    layers: int
    vocab_size: int
    max_len: int  # tokens for which VTensorCache reserves addresses
    chunk: int  # tokens that one forward call reads
    slice: int  # tokens that one cache generates before the next cache continues
    page_size: int  # bytes

    @property
    def final_length(self) -> int:
        """Tokens in a cache at the end. It lacks the last token generated, which is not fed back."""
        return self.prompt + self.new - 1


FULL = Settings(8192, 128, 2, 4096, 131072, 512, 8, 16384)
QUICK = Settings(384, 24, 2, 1024, 4096, 128, 4, 4096)


@dataclass(frozen=True)
class Sample:
    """The memory of K and V after a step, in bytes."""

    tokens: int  # in the cache
    mapped: int  # memory of K and V
    peak: int  # the same during a copy, with the old and the new K or V


class CacheRun(BaseStreamer):
    """One cache on its way through the text. As the streamer it is called at every token, stops the clock,
    and measures."""

    def __init__(self, name: str, model: LlamaForCausalLM, cache: Cache, mapped: Callable[[], int]) -> None:
        self.name = name
        self.model = model
        self.cache = cache
        self.mapped = mapped  # bytes of K and V now
        self.progress = tqdm(disable=True)
        self.prefill_seconds = 0.0
        self.copied = 0
        self.samples: list[Sample] = []
        self.seconds: list[float] = []  # of each step that decodes one token
        self.logits: list[torch.Tensor] = []
        self.ids = torch.empty(1, 0, dtype=torch.int64)
        self._extents: dict[tuple[int, str], tuple[int, int]] = {}  # address, bytes
        self._clock: float | None = None

    def look(self) -> None:
        """Records the memory at the end of a step."""
        largest = 0
        for index, layer in enumerate(self.cache.layers):
            for name in ("keys", "values"):
                states: torch.Tensor = getattr(layer, name)
                address, old = self._extents.get((index, name), (states.data_ptr(), 0))
                if states.data_ptr() != address:  # this step copied what was stored before
                    self.copied += old
                    largest = max(largest, old)
                self._extents[index, name] = states.data_ptr(), states.nbytes
        before = self.samples[-1].tokens if self.samples else 0
        tokens, mapped = int(self.cache.get_seq_length()), self.mapped()
        if tokens != before:
            self.samples.append(Sample(tokens, mapped, mapped + largest))
            self.progress.update(tokens - before)

    def put(self, value: torch.Tensor) -> None:
        """Called by generate() with the prompt, then with each token."""
        now = time.perf_counter()
        if value.dim() > 1:
            return
        if self._clock is not None:  # the first token of a call includes generate()'s setup
            self.seconds.append(now - self._clock)
        self.look()
        self._clock = time.perf_counter()

    def end(self) -> None:
        """Called when generate() returns."""
        self._clock = None

    def read(self, prompt: torch.Tensor, chunk: int) -> None:
        """Reads the prompt and generates the first token."""
        hook = self.model.model.register_forward_hook(lambda *chunk: self.look())
        # One token of padding gives every cache a mask, as StaticCache always has, and as batches of texts of
        # different lengths have. Without a mask, transformers 5.23 calls SDPA with enable_gqa, which takes a
        # multiple of the time on the CPU. The demo would then compare kernels, not caches.
        self.ids = torch.cat([torch.full((1, 1), PADDING), prompt], dim=1)
        reading = {"desc": f"{self.name}: reading", "unit": " tokens", "leave": False}
        start = time.perf_counter()
        try:
            with tqdm(total=self.ids.shape[1], **reading) as self.progress:
                self.generate(1, prefill_chunk_size=chunk)
        finally:
            hook.remove()
        self.prefill_seconds = time.perf_counter() - start

    def generate(self, tokens: int, **kwargs: Any) -> None:
        """Generates more tokens greedily."""
        result = self.model.generate(
            self.ids,
            attention_mask=(torch.arange(self.ids.shape[1]) > 0).long()[None],
            max_new_tokens=tokens,
            do_sample=False,
            streamer=self,
            return_dict_in_generate=True,
            output_logits=True,
            **{CACHE: self.cache},
            **kwargs,
        )
        self.ids = result.sequences
        self.logits.extend(result.logits)

    def row(self, needed: int) -> Row:
        mapped = self.samples[-1].mapped
        return {
            "cache": self.name,
            "prefill_seconds": self.prefill_seconds,
            "decode_tokens_per_second": 1.0 / statistics.median(self.seconds),
            "bytes_copied_for_growth": self.copied,
            "kv_mapped": mapped,
            "kv_needed": needed,
            "kv_peak": max(sample.peak for sample in self.samples),  # including the copy that growth makes
            "over_percent": 100.0 * (mapped / needed - 1.0),  # mapped beyond the need
        }


@dataclass
class Check:
    """Whether the caches agree, and whether the margins are large enough for that to count."""

    same_tokens: bool
    distinct_tokens: int  # among those generated
    smallest_margin: float  # between the best logit and the second best, over all steps
    largest_difference: dict[str, float]  # of any logit, against DynamicCache

    def failure(self) -> str | None:
        """A description of the failure, or None."""
        if not self.same_tokens:
            return "the caches gave different tokens"
        if self.largest_difference[OURS] != 0.0:
            return f"{OURS} and {GROWING} run the same kernels on the same layout, but their logits differ"
        if self.smallest_margin <= 4 * max(self.largest_difference.values()):
            return "two logits are so close that equal tokens prove nothing"
        return None


def storage_bytes(cache: Cache) -> int:
    """Bytes that the storages of a cache's plain K and V occupy."""
    return sum(
        states.untyped_storage().nbytes()
        for layer in cache.layers
        for states in (layer.keys, layer.values)
        if states is not None
    )


def make_runs(model: LlamaForCausalLM, settings: Settings, pool: vtensor.Pool) -> list[CacheRun]:
    """A run for each cache. StaticCache and the limit get the final length, VTensorCache does not."""
    config, length = model.config, settings.final_length
    caches: list[tuple[str, Cache]] = [
        (GROWING, DynamicCache(config=config)),
        ("StaticCache", StaticCache(config=config, max_cache_len=length)),
        (LIMIT, PreallocatedCache(config, length)),
    ]
    runs = [CacheRun(name, model, cache, partial(storage_bytes, cache)) for name, cache in caches]
    ours = VTensorCache(config, max_len=settings.max_len, pool=pool)
    runs.append(CacheRun(OURS, model, ours, lambda: pool.stats().nbytes_mapped))
    return runs


def measure(runs: list[CacheRun], prompt: torch.Tensor, settings: Settings) -> list[Row]:
    """Reads the prompt with each cache, then generates with the caches in turns.

    Taking turns spreads other load of the machine evenly over the caches.
    """
    for run in runs:
        run.read(prompt, settings.chunk)
    with tqdm(
        total=settings.new * len(runs), initial=len(runs), desc="generating", unit=" tokens"
    ) as progress:
        for run in runs:
            run.progress = progress
        order = [*runs]
        for left in range(settings.new - 1, 0, -settings.slice):
            for run in order:
                run.generate(min(left, settings.slice))
            order.append(order.pop(0))
    config = runs[0].model.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return [run.row(settings.final_length * token_bytes) for run in runs]


def check(runs: list[CacheRun], settings: Settings) -> Check:
    """Compares tokens and logits of all runs."""
    logits = {run.name: torch.cat(run.logits) for run in runs}
    best = logits[GROWING].topk(2).values
    return Check(
        same_tokens=all(torch.equal(run.ids, runs[0].ids) for run in runs),
        distinct_tokens=runs[0].ids[0, settings.prompt :].unique().numel(),
        smallest_margin=(best[:, 0] - best[:, 1]).min().item(),
        largest_difference={
            name: (values - logits[GROWING]).abs().max().item()
            for name, values in logits.items()
            if name != GROWING
        },
    )

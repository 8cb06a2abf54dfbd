"""Continuous batching of a Hugging Face causal LM over ``vtensor.KVCache``.

A forward computes the tokens of many sequences side by side, as one row of tokens. Only attention, the
model's own, is called for each sequence by itself, over plain views of its K and V in the cache. Follows
``modeling_llama.py`` and ``AttentionInterface`` of transformers 5.23.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel

from vtensor import InvalidArgument, KVCache
from vtensor.serving import Plan, Request

from .release import CACHE

__all__ = ["ServedModel", "serving_cache"]

_OWN = ("sdpa", "eager")
_LAYERS = {"full_attention", "sliding_attention"}
_names = count()


def serving_cache(model: PreTrainedModel, max_batch: int, max_len: int, **options: Any) -> KVCache:
    """A cache of the model's shape, dtype and device. ``options``: as for ``KVCache``."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    placed = {"dtype": model.dtype, "device": model.device}
    return KVCache(config.num_hidden_layers, heads, head_dim, max_batch, max_len, **placed | options)


class ServedModel(AbstractContextManager["ServedModel", None]):
    """The ``forward`` of ``vtensor.serving.Engine``, for decoder-only models with full or sliding-window
    attention::

        cache = serving_cache(model, max_batch=16, max_len=4096)
        with ServedModel(model, cache) as served:
            completions = Engine(Scheduler(cache), served).run(requests)

    Until ``close()`` the model has an attention of this class, which calls the model's own (SDPA or eager).
    Until then the model cannot be used otherwise.

    Args:
        model: a model in eval mode, on the CPU.
        cache: a cache of the model's shape, made without ``windows``: prompts are computed in pieces, and a
            window would give back tokens that later pieces still need.

    Raises InvalidArgument for another kind of model, and for a cache of another shape or with windows.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        if not isinstance(cache, KVCache):
            raise InvalidArgument(
                f"[ServedModel] cache is a {type(cache).__name__}: give ServedModel(model, cache) a cache "
                "that serving_cache(model, ...) made"
            )
        config = model.config.get_text_config(decoder=True)
        self.model, self.cache = model, cache
        self._own_name: str = config._attn_implementation
        if self._own_name not in _OWN:
            raise InvalidArgument(
                f"[ServedModel] attn_implementation is {self._own_name!r}: set the model to one of {_OWN}"
            )
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if config.is_encoder_decoder or not kinds <= _LAYERS:
            raise InvalidArgument(
                f"[ServedModel] a {type(model).__name__} with layers of {sorted(kinds)}: only decoders with "
                "full or sliding-window attention are served"
            )
        if len(cache) != config.num_hidden_layers:
            raise InvalidArgument(
                f"[ServedModel] the cache has {len(cache)} layers, the model {config.num_hidden_layers}: "
                "make it with serving_cache(model, ...)"
            )
        if any(row_group.window for row_group in cache._layout.row_groups):
            raise InvalidArgument(
                "[ServedModel] the cache has layers with windows, which give back what later pieces of a "
                "prompt still need: make it without windows="
            )
        self._heads_first = cache._layout.layers[0][0].per_head
        self._states = _States(self)
        self._plan = Plan()
        self._slots: list[int] = []  # of the plan's work, and so on
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._vocabulary: int = config.vocab_size
        self._name = f"vtensor-served-{next(_names)}"
        try:
            AttentionInterface.register(self._name, self._attend)
            model.set_attn_implementation(self._name)
        except BaseException:
            self.close()
            raise

    def check(self, request: Request) -> None:
        """Raises InvalidArgument for a prompt with token ids that the model does not have."""
        assert not isinstance(request.prompt, int)
        largest = max(request.prompt[:])
        if largest >= self._vocabulary:
            raise InvalidArgument(
                f"[ServedModel] token id {largest} in the prompt of request {request.id!r}: the model has "
                f"{self._vocabulary}"
            )

    def __call__(self, plan: Plan) -> torch.Tensor:
        """Computes the plan's work. Returns the logits at the end of each, [work, vocabulary]."""
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for sequence, start, stop in plan.work:
            tokens += sequence.ids(start, stop)
            positions += range(start, stop)
            last.append(len(tokens) - 1)
        device = self.model.device
        self._plan = plan
        self._slots = [sequence.slot or 0 for sequence, _, _ in plan.work]
        self._starts = [start for _, start, _ in plan.work]
        self._counts = [stop - start for _, start, stop in plan.work]
        with torch.no_grad():
            output = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=True,
                logits_to_keep=torch.tensor(last, device=device),
                **{CACHE: self._states},
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Writes K and V of the plan's tokens, [1, heads, tokens, head_dim], to their slots."""
        for slot in self._plan.swapped_in:
            self.cache.wait(slot, layer)
        for states, whole in zip((key, value), self.cache[layer], strict=True):
            of_heads = slice(1, None, 2) if self._heads_first else slice(2, None)
            if whole is None or states.shape[1::2] != whole.shape[of_heads]:
                raise InvalidArgument(
                    f"[ServedModel] K or V of layer {layer} are {tuple(states.shape)}, the cache has other "
                    "heads: make it with serving_cache(model, ...)"
                )
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.cache.write(layer, self._slots, self._starts, k, v, counts=self._counts)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if key is not self._states.key:
            raise InvalidArgument(
                f"[ServedModel] {type(module).__name__} does not attend to the K that it has cached: close() "
                "the ServedModel before other uses of the model. If this is none, its attention is not served"
            )
        own = self._own_attention(module)
        window = options.get("sliding_window")
        whole = self.cache[module.layer_idx]  # type: ignore[index]
        outputs = []
        first = 0
        for sequence, start, stop in self._plan.work:
            new = stop - start
            begin = 0 if window is None else max(0, start + 1 - window)
            k, v = (self._tokens(side, sequence.slot or 0, begin, stop) for side in whole)
            mask = self._mask(start - begin, new, window, query)
            outputs.append(own(module, query[:, :, first : first + new], k, v, mask, **options)[0])
            first += new
        return torch.cat(outputs, dim=1), None

    def _tokens(self, side: torch.Tensor | None, slot: int, begin: int, stop: int) -> torch.Tensor:
        """A view of a slot's K or V as attention takes it, [1, heads, tokens, head_dim]."""
        assert side is not None
        if self._heads_first:
            return side[slot, :, begin:stop][None]
        return side[slot, begin:stop].transpose(0, 1)[None]

    def _own_attention(self, module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
        if self._own_name != "eager":
            attention: Callable[..., tuple[torch.Tensor, Any]] = AttentionInterface()[self._own_name]
            return attention
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise InvalidArgument(
                f"[ServedModel] {type(module).__name__} has no eager attention of the common form: set the "
                "model to 'sdpa'"
            )
        return eager  # type: ignore[no-any-return]

    def _mask(self, before: int, new: int, window: int | None, query: torch.Tensor) -> torch.Tensor | None:
        """The mask of ``new`` queries over the keys ``before`` them and their own. None if the model's own
        attention needs no mask: one query sees all keys, and SDPA is causal if there are none before."""
        narrow = window is not None and before + new > window
        if new == 1 or (before == 0 and not narrow and self._own_name == "sdpa"):
            return None
        rows = torch.arange(before, before + new, device=query.device)[:, None]
        columns = torch.arange(before + new, device=query.device)[None]
        seen = columns <= rows
        if window is not None:
            seen &= columns > rows - window
        if self._own_name == "sdpa":
            return seen[None, None]
        least = torch.finfo(query.dtype).min
        return torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, least)[None, None]

    def close(self) -> None:
        """Gives the model its own attention back."""
        if self.model.config._attn_implementation == self._name:
            self.model.set_attn_implementation(self._own_name)
        AttentionInterface._global_mapping.pop(self._name, None)

    def __exit__(self, *exception: object) -> None:
        self.close()


class _States(Cache):
    """The cache that the model gets: it hands K and V on to the slots."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__(layers=[])
        self._served = weakref.proxy(served)  # else its cache would keep its memory until a collection
        self.key: torch.Tensor | None = None  # the last one stored

    def __len__(self) -> int:
        return len(self._served.cache)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._served.store(key_states, value_states, layer_idx)
        self.key = key_states
        return key_states, value_states

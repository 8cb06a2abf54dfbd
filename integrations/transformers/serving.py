"""Continuous batching of a Hugging Face causal LM over ``vtensor.KVCache``.

A forward computes the tokens of many sequences side by side, as one row of tokens. Only attention, the
model's own, is called for each sequence by itself, over plain views of its K and V in the cache. Follows
``modeling_llama.py`` and ``AttentionInterface`` of transformers 5.23.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel

from vtensor import InvalidArgument, KVCache
from vtensor.serving import Plan, Request

from .release import CACHE

__all__ = ["ServedModel", "serving_cache"]

_OWN = ("sdpa", "eager")
_OWN_POSITIONS = "create_position_ids_from_input_ids"  # as RoBERTa's, which begin after the padding's id


def serving_cache(model: PreTrainedModel, max_batch: int, max_len: int, **options: Any) -> KVCache:
    """A cache of the model's shape, dtype and device. ``options``: as for ``KVCache``."""
    config = model.config.get_text_config(decoder=True)
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except (AttributeError, RuntimeError):  # the latter if they vary, as in Gemma 4
        raise _not_served(model, "has no heads of K and V, or other heads in some layers") from None
    placed = {"dtype": model.dtype, "device": model.device}
    return KVCache(config.num_hidden_layers, heads, head_dim, max_batch, max_len, **placed | options)


def _not_served(module: torch.nn.Module, reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"[ServedModel] {type(module).__name__} {reason}: the model is not served, call its generate()"
    )


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

    Raises InvalidArgument for another kind of model, and for a cache of another shape or with windows. What
    shows only as the model computes, the first call refuses, before a token.
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
                f"[ServedModel] attn_implementation is {self._own_name!r}: set the model to one of {_OWN}, "
                "or close() the ServedModel that serves it, or its config"
            )
        kinds = set(getattr(config, "layer_types", None) or [])
        if config.is_encoder_decoder or not kinds <= {"full_attention", "sliding_attention"}:
            raise _not_served(model, f"has an encoder, or not just full or window attention: {sorted(kinds)}")
        if not getattr(config, "is_causal", True):  # then no mask is
            raise _not_served(model, "is not causal")
        takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        if not takes_positions or any(hasattr(part, _OWN_POSITIONS) for part in model.modules()):
            raise _not_served(model, "has positions of its own, which count on from request to request")
        ropes = getattr(config, "rope_parameters", None) or {}
        for rope in [ropes, *ropes.values()]:  # of all layers, or of each type of them
            if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
                most = rope.get("original_max_position_embeddings", config.max_position_embeddings)
                if cache.max_len > most:
                    raise InvalidArgument(
                        f"[ServedModel] a request of more than {most} tokens changes the rotary frequencies "
                        f"of all, and the cache has max_len={cache.max_len}: make it with max_len={most}"
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
        self._states = _States(self)
        self._vocabulary: int = config.vocab_size
        window = getattr(config, "sliding_window", None) or cache.max_len
        self._narrow = window < cache.max_len and kinds != {"full_attention"}
        self._name = f"vtensor-served-{uuid4()}"
        configs: list[Any] = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
        for one in configs:  # and those in it
            configs += filter(None, (getattr(one, name, None) for name in one.sub_configs))
        self._own_names = [(one, one._attn_implementation) for one in configs]
        try:
            AttentionInterface.register(self._name, self._attend)
            model.set_attn_implementation(self._name)
            if config._attn_implementation != self._name:
                raise _not_served(model, "does not attend through AttentionInterface")
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
        tokens = [token for sequence, start, stop in plan.work for token in sequence.ids(start, stop)]
        positions = [position for _, start, stop in plan.work for position in range(start, stop)]
        device = self.model.device
        self._plan, self._attended = plan, 0
        self._slots = [sequence.slot or 0 for sequence, _, _ in plan.work]
        self._starts = [start for _, start, _ in plan.work]
        self._counts = [stop - start for _, start, stop in plan.work]
        ends = torch.tensor(self._counts, device=device).cumsum(0) - 1  # the last token of each
        with torch.no_grad():
            output = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=True,
                logits_to_keep=ends,
                **{CACHE: self._states},
            )
        if self._attended != len(self.cache):  # other attention mixes the requests
            raise _not_served(self.model, "attends otherwise than once a layer, or its ServedModel is closed")
        logits: torch.Tensor = output.logits[0]
        return logits if len(logits) == len(ends) else logits[ends]  # some models keep those of all tokens

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Writes K and V of the plan's tokens, [1, heads, tokens, head_dim], to their slots."""
        if layer >= len(self.cache):
            raise _not_served(self.model, "keeps K and V more than once a layer")
        for slot in self._plan.swapped_in:
            self.cache.wait(slot, layer)
        for states, whole in zip((key, value), self._heads_first(layer), strict=False):
            if states.shape[1::2] != whole.shape[1::2]:
                raise InvalidArgument(
                    f"[ServedModel] K or V of layer {layer} are {tuple(states.shape)}, the cache has other "
                    "heads: make it with serving_cache(model, ...). If you did, the model is not served"
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
        (k, v), self._states.last = self._states.last, (None, None)
        if key is not k or value is not v:
            raise InvalidArgument(
                f"[ServedModel] {type(module).__name__} does not attend, once, to the K and V just cached: "
                "close() the ServedModel before other uses of the model. What attends otherwise is not served"
            )
        source = sys.modules[type(module).__module__]
        unnamed = self._narrow and "sliding_window" not in options
        if attention_mask is not None or unnamed or not getattr(module, "is_causal", True):
            raise _not_served(module, "is not causal, or has its window, or more, in a mask or cache alone")
        own = AttentionInterface().get(self._own_name, getattr(source, "eager_attention_forward", None))
        if own is None:
            raise InvalidArgument(
                f"[ServedModel] {type(module).__name__} has no eager attention of the common form: set the "
                "model to 'sdpa'"
            )
        self._attended += 1
        window: int = options.get("sliding_window") or self.cache.max_len
        sides = self._heads_first(self._states.layer)
        outputs = []
        for (sequence, start, stop), part in zip(self._plan.work, query.split(self._counts, 2), strict=True):
            begin = max(0, start + 1 - window)
            k, v = (side[sequence.slot or 0, :, begin:stop][None] for side in sides)
            mask = self._mask(start - begin, stop - start, window, query)
            outputs.append(own(module, part, k, v, mask, **options)[0])
        return torch.cat(outputs, dim=1), None

    def _heads_first(self, layer: int) -> list[torch.Tensor]:
        """K and V of a layer as attention takes them, [slots, heads, tokens, head_dim]."""
        per_head = self.cache._layout.per_head
        return [side if per_head else side.transpose(1, 2) for side in self.cache[layer] if side is not None]

    def _mask(self, before: int, new: int, window: int, query: torch.Tensor) -> torch.Tensor | None:
        """The mask of ``new`` queries over the keys ``before`` them and their own. None if the model's own
        attention needs no mask: one query sees all keys, and SDPA is causal if there are none before."""
        if new == 1 or (before == 0 and new <= window and self._own_name == "sdpa"):
            return None
        seen = query.new_ones(new, before + new, dtype=torch.bool).tril(before)
        seen = seen.triu(before - window + 1) if before + new > window else seen
        if self._own_name == "sdpa":
            return seen[None, None]
        least = torch.finfo(query.dtype).min
        return torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, least)[None, None]

    def close(self) -> None:
        """Gives the model its own attention back."""
        for config, own_name in self._own_names:
            if config._attn_implementation == self._name:
                config._attn_implementation_internal = own_name  # not that of the configs in it
        AttentionInterface._global_mapping.pop(self._name, None)

    def __exit__(self, *exception: object) -> None:
        self.close()


class _States(Cache):
    """The cache that the model gets: it hands K and V on to the slots."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__(layers=[])
        self._served = weakref.proxy(served)  # else its cache would keep its memory until a collection
        self.last: tuple[torch.Tensor | None, torch.Tensor | None] = None, None  # not attended to yet

    def __len__(self) -> int:
        return len(self._served.cache)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._served.store(key_states, value_states, layer_idx)
        self.last, self.layer = (key_states, value_states), layer_idx
        return key_states, value_states

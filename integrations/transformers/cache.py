"""``VTensorCache``: a Hugging Face cache whose K and V grow in place.

Follows ``transformers/cache_utils.py`` of transformers 5.23 (``Cache``, ``DynamicCache``).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from vtensor import InvalidArgument, Pool, VTensorError

from .callers import ForOneGeneration, Generation, Use, calling_models
from .hybrid import VTensorHybridLayer, VTensorHybridSlidingWindowLayer
from .layers import VTensorLayer
from .model_shape import ModelShape
from .window import VTensorSlidingWindowLayer

__all__ = ["VTensorCache", "check_pool"]


class VTensorCache(ForOneGeneration, DynamicCache):
    """A ``DynamicCache`` for ``model.generate(..., past_key_values=cache)`` that grows in place.

    It is built from the model's own layer types. Full attention becomes ``VTensorLayer``, sliding window and
    chunked attention ``VTensorSlidingWindowLayer``, each also beside linear attention in one layer; what
    keeps other states alone (linear attention), or an indexer's, is what ``DynamicCache(config=config)``
    makes of it.

    Args:
        config: the model's config. An encoder-decoder model wants two: see ``encoder_decoder_cache``.
        max_len: the most tokens that a sequence may have, prompt included. Reserves addresses, no memory.
            None: no limit; the addresses then move where a first reservation runs out. Tokens that assisted
            decoding and prompt lookup only try may pass it for a step.
        pool: where pages come from; the default pool of the device on which the model runs if None.
        compiled: for a forward under ``torch.compile``: whatever asks for the masks of a step, as
            ``generate()`` does, has that step's memory mapped, see ``prepare``.
        offloading, offload_only_non_sliding: as for ``DynamicCache``.

    ``copy.deepcopy`` shares pages until either side writes. A pickled cache is dense and comes back in the
    default pool. ``reset()`` gives all memory back.

    A cache is for the model of its config, and for one ``generate()`` at a time. ``generate()`` with another
    model's, or while another ``generate()`` runs on it, raises InvalidArgument before the first forward.

    Raises:
        InvalidArgument: no config of transformers, a ``max_len`` below 1, or a ``pool`` that is none.
    """

    layers: list[Any]

    def __init__(
        self,
        config: PreTrainedConfig,
        max_len: int | None = None,
        pool: Pool | None = None,
        *,
        compiled: bool = False,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise InvalidArgument(
                f"[VTensorCache] config is a {type(config).__name__}: pass model.config, which says "
                "what kind of cache each layer needs"
            )
        if max_len is not None and (isinstance(max_len, bool) or not isinstance(max_len, int) or max_len < 1):
            raise InvalidArgument(
                f"[VTensorCache] max_len={max_len!r}: pass the most tokens of a sequence, prompt included, "
                "or None for no limit"
            )
        check_pool("VTensorCache", pool)
        super().__init__(
            config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding
        )
        self.max_len = max_len
        self.compiled = compiled
        self.layers = [_growing(layer, max_len, pool) for layer in self.layers]
        self._made_for = type(config).__name__
        self._shape = ModelShape.of(config)
        growing = (number for number, layer in enumerate(self.layers) if isinstance(layer, VTensorLayer))
        self._first_growing = next(growing, 0)
        self._use = Use()
        self._model: weakref.ref[PreTrainedModel] | None = None  # the last one found to be of this config

    @property
    def is_compileable(self) -> bool:
        """Whether transformers makes the masks of a step before the forward. Where ``compiled``, so that the
        step can be prepared. On the host it should: without a mask, transformers 5.23 has SDPA read K and V
        once for each query head (``enable_gqa``), which at 8k tokens takes twice the time. It compiles
        ``generate()`` on accelerators only, where this is False unless ``compiled``. It is False for a window
        beside linear attention, for which transformers 5.23 makes the mask of full attention."""
        return bool(self.layers) and all(
            isinstance(layer, DummyLayer)
            or (
                isinstance(layer, VTensorLayer)
                and not isinstance(layer, VTensorHybridSlidingWindowLayer)
                and (self.compiled or layer.is_on_host)
            )
            for layer in self.layers
        )

    # ------------------------------------------------------------------ growth

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends to one layer, see ``VTensorLayer.update``.

        Where a layer refuses, the layers before it, which took this step's tokens already, are put back
        too: after an error the cache holds what it held before the forward call, and can go on from there.
        Where one of them is Hugging Face's own and cannot go back, the cache is emptied.

        Raises:
            InvalidArgument: another model than the config's, or another thread's ``generate()`` runs on this.
            CapacityExceeded, OutOfPages: as ``VTensorLayer.update``.
        """
        if torch.compiler.is_compiling():
            return self._append(key_states, value_states, layer_idx, *args, **kwargs)
        self._use.check()
        if layer_idx <= self._first_growing:  # once a forward
            self._check_caller()
        self._check_number(layer_idx)
        try:
            return self._append(key_states, value_states, layer_idx, *args, **kwargs)
        except VTensorError:
            self._put_back(before=layer_idx)
            raise

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return states

    def prepare(self, tokens: int) -> None:
        """Maps what a forward of ``tokens`` tokens a sequence needs, in every layer, whole or not at all.

        The forward itself then maps nothing: it can be compiled, and it cannot run out of memory halfway.
        ``get_seq_length()`` and the content stay as they are. Preparing another number of tokens, or using
        the cache otherwise, takes the preparation back. Layers before their first ``update`` are left out.

        Raises:
            CapacityExceeded, OutOfPages, DriverError: nothing was changed (I8).
        """
        layers = [layer for layer in self.layers if isinstance(layer, VTensorLayer)]
        try:
            for layer in layers:  # each by itself whole or not at all
                layer.prepare(tokens)
        except BaseException:
            for layer in layers:
                layer.settle()
            raise

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """``(tokens, offset)`` of the mask for a step of ``query_length`` tokens, which is the first that a
        cache hears of a step: a ``compiled`` one prepares it."""
        if self.compiled and not torch.compiler.is_compiling():
            self.prepare(query_length)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def _put_back(self, before: int) -> None:
        failed, changed = self.layers[before], self.layers[:before]
        if not isinstance(failed, VTensorLayer):
            return
        if any(_cannot_go_back(layer) for layer in (*changed, failed)):
            self.reset()
            return
        length = failed.get_seq_length()
        for layer in changed:
            if isinstance(layer, VTensorLayer) and layer.get_seq_length() > length:
                layer.truncate(length)

    # ------------------------------------------------------------------ whose cache it is

    def _generation_begins(self, model: PreTrainedModel, generation: Generation) -> None:
        self._refuse_two_halves(model)
        self.begin(model, generation)

    def begin(self, model: PreTrainedModel, generation: Generation) -> None:
        """The cache is used by that ``generate()`` of that model from now on.

        Raises InvalidArgument for another model than the config's, and while another ``generate()`` uses it.
        """
        self._check_config(model)
        self._use.begin(generation)

    def _check_caller(self) -> None:
        """That the model whose forward calls is the config's, for a forward without ``generate()``."""
        callers = calling_models()
        innermost = next(callers, None)
        if innermost is None or (self._model is not None and innermost[0] is self._model()):
            return
        for model, given in (innermost, *callers):
            if given is self:
                self._refuse_two_halves(model)
            if isinstance(given, EncoderDecoderCache) and given.cross_attention_cache is self:
                return  # the other half speaks for it: a model may attend to all that the encoder read
        self._check_config(innermost[0])
        self._model = weakref.ref(innermost[0])

    def _check_config(self, model: PreTrainedModel) -> None:
        difference = self._shape.difference(ModelShape.of(model.config))
        if difference is not None:
            made_with, used_with = difference
            maker = "encoder_decoder_cache" if model.config.is_encoder_decoder else "VTensorCache"
            raise InvalidArgument(
                f"[VTensorCache] made for a {self._made_for} with {made_with}, but the "
                f"{type(model).__name__} that uses it has {used_with}: make one from this model's own "
                f"config, {maker}(model.config)"
            )

    def _refuse_two_halves(self, model: PreTrainedModel) -> None:
        if model.config.is_encoder_decoder:
            raise InvalidArgument(
                f"[VTensorCache] one cache for a {type(model).__name__}, which has an encoder and a decoder "
                "and wants one of two halves: pass past_key_values=encoder_decoder_cache(model.config)"
            )

    def _check_number(self, layer_idx: int) -> None:
        if layer_idx >= len(self.layers):
            raise InvalidArgument(
                f"[VTensorCache.update] layer {layer_idx} of a cache with {len(self.layers)} layers, made "
                f"for a {self._made_for}: make one from this model's own config"
            )

    # ------------------------------------------------------------------ batches

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders every layer for beam search; see ``VTensorLayer.reorder_cache``."""
        self._change_batch(lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times, in every layer."""
        self._change_batch(lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences that ``indices`` selects, in every layer."""
        self._change_batch(lambda layer: layer.batch_select_indices(indices))

    def _change_batch(self, change: Callable[[Any], None]) -> None:
        # Sequences that a layer dropped are gone for good: after a failure between two layers, or between K
        # and V of one, an empty cache is the only whole one.
        for number, layer in enumerate(self.layers):
            try:
                change(layer)
            except BaseException:
                if number > 0 or not getattr(layer, "is_initialized", True):
                    self.reset()
                raise

    def __deepcopy__(self, memo: dict[int, Any]) -> VTensorCache:
        """A cache in the same pool whose layers share all whole pages with these until one of the two writes
        (I6). What copy.deepcopy would do by itself, in two thirds of the time besides the layers'."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(
            (name, copy.deepcopy(value, memo)) for name, value in self.__getstate__().items()
        )
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_marked": False, "_use": Use(), "_model": None}


def check_pool(asking: str, pool: object) -> None:
    """Raises InvalidArgument for a ``pool=`` that is neither a pool nor None."""
    if pool is not None and not isinstance(pool, Pool):
        raise InvalidArgument(
            f"[{asking}] pool={pool!r} is a {type(pool).__name__}: pass a vtensor.Pool, such as "
            "vtensor.Pool('cpu'), or None for the default pool of the model's device"
        )


def _growing(layer: Any, max_len: int | None, pool: Pool | None) -> Any:
    # Only what is exactly one of these: their subclasses keep other states beside K and V.
    if type(layer) is DynamicLayer:
        return VTensorLayer(max_len, pool)
    if type(layer) is DynamicSlidingWindowLayer:
        return VTensorSlidingWindowLayer(layer.sliding_window, max_len, pool)
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return VTensorHybridLayer(max_len, pool, number_of_states=layer.number_of_states)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return VTensorHybridSlidingWindowLayer(
            layer.sliding_window, max_len, pool, number_of_states=layer.number_of_states
        )
    return layer


def _cannot_go_back(layer: Any) -> bool:
    """Whether a step that a layer has taken cannot be taken back."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return True
    return not isinstance(layer, VTensorLayer | DummyLayer)

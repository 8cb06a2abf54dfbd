"""``VTensorCache``: a Hugging Face cache whose K and V grow in place.

Follows ``transformers/cache_utils.py`` of transformers 5.23 (``Cache``, ``DynamicCache``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.configuration_utils import get_head_shapes

from vtensor import InvalidArgument, Pool, VTensorError

from .hybrid import VTensorHybridLayer, VTensorHybridSlidingWindowLayer
from .layers import VTensorLayer
from .window import VTensorSlidingWindowLayer

__all__ = ["VTensorCache", "encoder_decoder_cache"]


class VTensorCache(DynamicCache):
    """A ``DynamicCache`` for ``model.generate(..., past_key_values=cache)`` that grows in place.

    It is built from the model's own layer types. Full attention becomes ``VTensorLayer``, sliding window and
    chunked attention ``VTensorSlidingWindowLayer``, each also beside linear attention in one layer; what
    keeps other states alone (linear attention), or an indexer's, is what ``DynamicCache(config=config)``
    makes of it.

    Args:
        config: the model's config.
        max_len: the most tokens that a sequence may have, prompt included. Reserves addresses, no memory.
            None: no limit; the addresses then move where a first reservation runs out.
        pool: where pages come from; the default pool of the device on which the model runs if None.
        compiled: for a forward under ``torch.compile``: whatever asks for the masks of a step, as
            ``generate()`` does, has that step's memory mapped, see ``prepare``.
        offloading, offload_only_non_sliding: as for ``DynamicCache``.

    ``copy.deepcopy`` shares pages until either side writes. A pickled cache is dense and comes back in the
    default pool. ``reset()`` gives all memory back.
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
        super().__init__(
            config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding
        )
        self.max_len = max_len
        self.compiled = compiled
        self.layers = [_growing(layer, max_len, pool) for layer in self.layers]
        self._made_for = type(config).__name__
        self._head_shapes = _head_shapes(config, len(self.layers))
        self._user: int | None = None

    @property
    def is_compileable(self) -> bool:
        """Whether transformers makes the masks of a step before the forward. Where ``compiled``, so that the
        step can be prepared. On the host it should: without a mask, transformers 5.23 has SDPA read K and V
        once for each query head (``enable_gqa``), which at 8k tokens takes twice the time. It compiles
        ``generate()`` on accelerators only, where this is False unless ``compiled``."""
        return bool(self.layers) and all(
            isinstance(layer, DummyLayer)
            or (isinstance(layer, VTensorLayer) and (self.compiled or layer.is_on_host))
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
            InvalidArgument: states of another model than the config's, or of a second ``generate()``.
            CapacityExceeded, OutOfPages: as ``VTensorLayer.update``.
        """
        if torch.compiler.is_compiling():
            return self._append(key_states, value_states, layer_idx, *args, **kwargs)
        self._check_user()
        self._check_model(key_states, layer_idx)
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

    @property
    def _is_user_defined(self) -> bool:
        return self._user is not None

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # generate() sets it when it begins: the one sign of which thread the cache is for from now on.
        self._user = threading.get_ident() if value else None

    def _check_user(self) -> None:
        if self._user is not None and self._user != threading.get_ident():
            raise InvalidArgument(
                "[VTensorCache.update] a second generate() runs on this cache, in another thread: "
                "give each thread its own; copy.deepcopy(cache) makes one of the same content for nothing"
            )

    def _check_model(self, key_states: torch.Tensor, layer_idx: int) -> None:
        if layer_idx >= len(self.layers):
            raise InvalidArgument(
                f"[VTensorCache.update] layer {layer_idx} of a cache with {len(self.layers)} layers, made "
                f"for a {self._made_for}: make one from this model's own config"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, VTensorLayer) or layer.is_initialized or self._head_shapes is None:
            return
        heads, head_dim = self._head_shapes[layer_idx]
        # Under tensor parallelism a rank has a part of the heads.
        if key_states.shape[-1] != head_dim or heads % key_states.shape[1]:
            raise InvalidArgument(
                f"[VTensorCache.update] layer {layer_idx} gets {key_states.shape[1]} heads of size "
                f"{key_states.shape[-1]}, the {self._made_for} that the cache was made for has {heads} of "
                f"{head_dim}: make a cache from this model's own config"
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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_user": None}


def encoder_decoder_cache(
    config: PreTrainedConfig, max_len: int | None = None, pool: Pool | None = None
) -> EncoderDecoderCache:
    """A cache for an encoder-decoder model: both halves, the decoder's own K and V and those of what the
    encoder read, are a ``VTensorCache``.

    Args:
        config: the model's config.
        max_len: the most tokens of the decoder's sequence; None for no limit. What the encoder read has none.
        pool: as for ``VTensorCache``.
    """
    return EncoderDecoderCache(VTensorCache(config, max_len, pool), VTensorCache(config, None, pool))


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


def _head_shapes(config: PreTrainedConfig, layers: int) -> list[tuple[int, int]] | None:
    """Heads and head size of each layer's K, or None where the config does not say."""
    config = config.get_text_config(decoder=True)
    # MLA caches what it computes from a latent vector, in sizes of its own.
    if any(hasattr(config, name) for name in ("kv_lora_rank", "qk_head_dim")):
        return None
    try:
        heads, head_dim = get_head_shapes(config)
    except (AttributeError, TypeError):
        return None
    heads = heads if isinstance(heads, list) else [heads] * layers
    head_dim = head_dim if isinstance(head_dim, list) else [head_dim] * layers
    return list(zip(heads, head_dim, strict=True)) if len(heads) == len(head_dim) == layers else None

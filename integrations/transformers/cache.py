"""``VTensorCache``: a Hugging Face cache whose K and V grow in place.

Follows ``transformers/cache_utils.py`` of transformers 5.23 (``Cache``, ``DynamicCache``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from vtensor import InvalidArgument, Pool, VTensorError

from .changes import BatchChange, Choice, finish, reordered, repeated, selected, twin_of
from .hybrid import VTensorHybridLayer, VTensorHybridSlidingWindowLayer
from .layers import VTensorLayer
from .single_step import SingleStepView
from .window import VTensorSlidingWindowLayer

__all__ = ["VTensorCache", "check_pool", "holds_nothing"]


class VTensorCache(DynamicCache):
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

    What ``DynamicCache`` takes first, ``(keys, values)`` of each layer, may stand in the place of ``config``,
    which is then given by name.

    ``copy.deepcopy`` shares pages until either side writes. A pickled cache is dense and comes back in the
    default pool. ``reset()`` gives all memory back. To ``torch.export`` a cache is the plain K and V that it
    holds. What two threads do to one cache at a time is not kept apart.

    Raises:
        InvalidArgument: no config of transformers, a ``max_len`` below 1, or a ``pool`` that is none.
    """

    layers: list[Any]

    def __init__(
        self,
        states: PreTrainedConfig | Iterable[tuple[torch.Tensor | None, ...]] | None = None,
        /,
        max_len: int | None = None,
        pool: Pool | None = None,
        *,
        config: PreTrainedConfig | None = None,
        compiled: bool = False,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        if config is None and isinstance(states, PreTrainedConfig):
            states, config = None, states
        if not isinstance(config, PreTrainedConfig):
            given = states if config is None else config
            raise InvalidArgument(
                f"[VTensorCache] config is a {type(given).__name__}: pass model.config, which says "
                "what kind of cache each layer needs"
            )
        if max_len is not None and (isinstance(max_len, bool) or not isinstance(max_len, int) or max_len < 1):
            raise InvalidArgument(
                f"[VTensorCache] max_len={max_len!r}: pass the most tokens of a sequence, prompt included, "
                "or None for no limit"
            )
        check_pool("VTensorCache", pool)
        # generate() too takes the decoder's config of the decoder's config: of Florence-2 they are two.
        super().__init__(
            config=config.get_text_config(decoder=True),
            offloading=offloading,
            offload_only_non_sliding=offload_only_non_sliding,
        )
        self.max_len = max_len
        self.compiled = compiled
        self.layers = [_growing(layer, max_len, pool) for layer in self.layers]
        for number, (keys, values, *_) in enumerate(states or ()):
            if keys is not None and values is not None:
                self.update(keys, values, number)

    @classmethod
    def over(cls, cache: DynamicCache) -> VTensorCache:
        """One of the layers of ``cache``, as they are."""
        made = cls.__new__(cls)
        made.__dict__.update(cache.__dict__, max_len=None, compiled=False)
        return made

    @classmethod
    def in_place_of(cls, cache: DynamicCache, pool: Pool | None, *, compiled: bool) -> VTensorCache:
        """One that grows in place, for the layers of an empty ``DynamicCache``."""
        made = cls.over(cache)
        made.compiled = compiled
        made.layers = [_growing(layer, None, pool) for layer in cache.layers]
        return made

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate()`` makes the masks of a step before the forward, so that the step can be
        prepared: where ``compiled``. Never for a window beside linear attention, for which transformers 5.23
        makes the mask of full attention, nor for linear attention alone."""
        return self.compiled and all(
            (isinstance(layer, VTensorLayer) and not isinstance(layer, VTensorHybridSlidingWindowLayer))
            or holds_nothing(layer)
            for layer in self.layers
        )

    # ------------------------------------------------------------------ growth

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends to one layer, see ``VTensorLayer.update``; of one token on the host it returns a
        ``SingleStepView`` of each.

        Where a layer refuses, the layers before it, which took this step's tokens already, are put back
        too: after an error the cache holds what it held before the forward call, and can go on from there.
        Where one of them is Hugging Face's own and cannot go back, the cache is emptied.

        Raises:
            InvalidArgument: a layer that the model of the config has not, or states that do not fit.
            CapacityExceeded, OutOfPages: as ``VTensorLayer.update``.
        """
        if torch.compiler.is_compiling():
            return self._append(key_states, value_states, layer_idx, *args, **kwargs)
        new = key_states.shape[-2]
        try:
            if layer_idx >= len(self.layers):
                raise InvalidArgument(
                    f"[VTensorCache.update] layer {layer_idx} of a cache with {len(self.layers)} layers: "
                    "make one from this model's own config, VTensorCache(model.config)"
                )
            keys, values = self._append(key_states, value_states, layer_idx, *args, **kwargs)
        except VTensorError:
            self._put_back(layer_idx, new)
            raise
        if new == 1 and keys.is_cpu:
            return keys.as_subclass(SingleStepView), values.as_subclass(SingleStepView)
        return keys, values

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

    def _put_back(self, failed: int, new: int) -> None:
        """Takes a step of ``new`` tokens back in the layers before the one that failed."""
        changed = self.layers[:failed]
        if failed < len(self.layers):
            if not isinstance(self.layers[failed], VTensorLayer):
                return
            length = self.layers[failed].get_seq_length()
        else:
            length = self.get_seq_length() - new
        if any(_cannot_go_back(layer) for layer in self.layers[: failed + 1]):
            self.reset()
            return
        for layer in changed:
            if isinstance(layer, VTensorLayer) and layer.get_seq_length() > length:
                layer.truncate(length)

    # ------------------------------------------------------------------ batches

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders every layer for beam search, or none where one refuses; see
        ``VTensorLayer.reorder_cache``."""
        self._change_batch(reordered(beam_idx), lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times, in every layer or in none."""
        self._change_batch(repeated(repeats), lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | slice) -> None:
        """Keeps the sequences that ``indices`` selects, in every layer or in none."""
        self._change_batch(selected(indices), lambda layer: layer.batch_select_indices(indices))

    def _change_batch(self, choice: Choice, of_others: Callable[[Any], None]) -> None:
        change = BatchChange()
        for layer in self.layers:
            if isinstance(layer, VTensorLayer):
                layer.plan_batch(change, choice)
            else:
                twin = twin_of(layer)
                of_others(twin)
                change.assign(layer, vars(twin))
        change.carry_out()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens in every layer, or in none where one refuses."""
        steps: list[Callable[[], object]] = []
        for layer in self.layers:
            if isinstance(layer, VTensorLayer):
                steps.append(layer.plan_crop(tokens_to_remove))
            else:
                twin = twin_of(layer)
                twin.crop(tokens_to_remove)
                steps.append(partial(vars(layer).update, vars(twin)))
        finish(lambda: [step() for step in steps])

    def reset(self) -> None:
        """Gives all memory back."""
        finish(super().reset)

    def __deepcopy__(self, memo: dict[int, Any]) -> VTensorCache:
        """A cache in the same pool whose layers share all whole pages with these until one of the two writes
        (I6). What copy.deepcopy would do by itself, in two thirds of the time besides the layers'."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update((name, copy.deepcopy(value, memo)) for name, value in self.__dict__.items())
        return copied


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


def holds_nothing(layer: Any) -> bool:
    """Whether it is there for its number alone (a ``DummyLayer`` of transformers 5.23)."""
    return not isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin)


def _cannot_go_back(layer: Any) -> bool:
    """Whether a step that a layer has taken cannot be taken back."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return True
    return not isinstance(layer, VTensorLayer) and not holds_nothing(layer)

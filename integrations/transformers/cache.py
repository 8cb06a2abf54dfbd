"""``VTensorCache``: a Hugging Face cache whose K and V grow in place.

Follows ``transformers/cache_utils.py`` of transformers 5.23 (``Cache``, ``DynamicCache``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from vtensor import InvalidArgument, Pool, VTensorError

from ..sdpa import SingleStepView
from .changes import BatchChange, Choice, finish, reordered, repeated, selected, twin_of
from .hybrid import VTensorHybridLayer, VTensorHybridSlidingWindowLayer, empty
from .layers import VTensorLayer
from .window import VTensorSlidingWindowLayer

# Of a half, all TwoHalves that have it. Not in the half, whose copies and pickles are apart from it.
_wholes: Any = weakref.WeakKeyDictionary()


class VTensorCache(DynamicCache):
    """A ``DynamicCache`` for ``model.generate(..., past_key_values=cache)`` that grows in place.

    The config gives the type of each layer. Full attention becomes ``VTensorLayer``, sliding-window and
    chunked attention ``VTensorSlidingWindowLayer``, also if a layer has linear attention too. Layers that
    keep only other states (linear attention), or an indexer's, are those of ``DynamicCache(config=config)``.

    Args:
        config: the model's config. An encoder-decoder model needs two caches: see ``encoder_decoder_cache``.
        max_len: the most tokens of a sequence, including the prompt. Reserves addresses, which cost no
            memory. None means no limit: the addresses then move when the first reservation is full. Tokens
            that assisted decoding and prompt lookup try may exceed it for a step.
        pool: the pool of the pages. Defaults to the default pool of the device that the model runs on.
        compiled: for a forward under ``torch.compile``. A request for the masks of a step, as ``generate()``
            makes it, then maps the memory of that step. See ``prepare``.
        offloading, offload_only_non_sliding: as for ``DynamicCache``.
        tag: the name by which ``Pool.sleep`` puts its K and V to sleep.

    The first argument may also be ``(keys, values)`` of each layer, as for ``DynamicCache``. Pass ``config``
    by name then.

    ``copy.deepcopy`` shares pages until either side writes. A pickled cache is dense and loads into the
    default pool. ``reset()`` gives all memory back. ``torch.export`` takes a cache as the plain K and V that
    it holds. A cache is not thread-safe.

    Raises:
        InvalidArgument: if ``config`` is no config of transformers, ``max_len`` is below 1, or ``pool`` is no
            pool.
    """

    layers: list[Any]
    # Of the forward in progress: the layers that have been updated, and the tokens that each had before.
    _begun: dict[int, int] = {}

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
        tag: str = "kv",
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
        # As in generate(): in Florence-2, the decoder's config of the decoder's config is another one.
        super().__init__(
            config=config.get_text_config(decoder=True),
            offloading=offloading,
            offload_only_non_sliding=offload_only_non_sliding,
        )
        self.max_len = max_len
        self.compiled = compiled
        self.layers = [growing(layer, max_len, pool) for layer in self.layers]
        for layer in self.layers:
            layer.tag = tag
        for number, (keys, values, *_) in enumerate(states or ()):
            if keys is not None and values is not None:
                self.update(keys, values, number)

    @classmethod
    def over(cls, cache: DynamicCache, compiled: bool = False) -> VTensorCache:
        """Makes a cache of the layers of ``cache``, unchanged."""
        made = cls.__new__(cls)
        made.__dict__.update(cache.__dict__, max_len=None, compiled=compiled)
        return made

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate()`` makes the masks of a step before its forward, and so prepares the step.

        True if ``compiled``, except with layers of linear attention alone, and with layers of a window and
        linear attention, for which transformers 5.23 makes the mask of full attention.
        """
        return self.compiled and all(
            (isinstance(layer, VTensorLayer) and not isinstance(layer, VTensorHybridSlidingWindowLayer))
            or holds_nothing(layer)
            for layer in self.layers
        )

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that fit. -1 for no limit, and if ``compiled``: Bloom then pads its mask to this length."""
        return -1 if self.compiled else super().get_max_length(layer_idx)

    # ------------------------------------------------------------------ growth

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends to one layer. See ``VTensorLayer.update``.

        For one token on the host, it returns K and V as ``SingleStepView``.

        If a layer refuses, the layers before it drop this step's tokens again. So after an error the cache
        holds what it held before the forward call. If one of them is Hugging Face's own layer, which cannot
        drop a step, the cache is emptied.

        Raises:
            InvalidArgument: if the model of the config has no such layer, or the states do not fit.
            CapacityExceeded, OutOfPages: as for ``VTensorLayer.update``.
        """
        append: Any = super().update
        if torch.compiler.is_compiling():
            return append(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]
        if self.offloading and key_states.is_cpu:
            raise InvalidArgument(
                "[VTensorCache.update] offloading=True moves K and V from a CUDA device to the host, and the "
                "model runs on the host: make the cache without it"
            )
        if layer_idx <= next(reversed(self._begun), layer_idx):
            self._begun = {}
            for whole in _wholes.get(self, ()):
                if self is whole.self_attention_cache:
                    whole.cross_attention_cache._begun = {}
        try:
            if layer_idx >= len(self.layers):
                raise InvalidArgument(
                    f"[VTensorCache.update] layer {layer_idx} of a cache with {len(self.layers)} layers: "
                    "make one from this model's own config, VTensorCache(model.config)"
                )
            if isinstance(layer := self.layers[layer_idx], VTensorLayer):
                self._begun[layer_idx] = layer.get_seq_length()
            keys, values = append(key_states, value_states, layer_idx, *args, **kwargs)
        except VTensorError:
            whole = next(iter(_wholes.get(self, ())), None)
            drop = self.drop if whole is None else partial(whole.drop, self)
            finish(partial(drop, self.layers[: layer_idx + 1]))
            raise
        if key_states.shape[-2] == 1 and keys.is_cpu:
            return keys.as_subclass(SingleStepView), values.as_subclass(SingleStepView)
        return keys, values

    def prepare(self, tokens: int) -> None:
        """Maps the memory for a forward of ``tokens`` tokens a sequence in every layer, or in none.

        The forward itself then maps nothing, so it can be compiled, and it cannot run out of memory halfway.
        ``get_seq_length()`` and the contents do not change. Preparing another number of tokens, or any other
        use of the cache, undoes the preparation. Layers without a first ``update`` are left out.

        Raises:
            CapacityExceeded, OutOfPages, DriverError: as for ``VTensor.extend``. Nothing was changed (I8).
        """
        layers = [layer for layer in self.layers if isinstance(layer, VTensorLayer)]
        try:
            for layer in layers:  # each prepares K and V, or neither
                layer.prepare(tokens)
        except BaseException:
            for layer in layers:
                layer.settle()
            raise

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """``(tokens, offset)`` of the mask for a step of ``query_length`` tokens.

        It is the first call of a step, so a ``compiled`` cache prepares the step here.
        """
        if self.compiled and not torch.compiler.is_compiling():
            if layer_idx <= next(reversed(self._begun), layer_idx):  # Inkling asks in each layer again
                self.prepare(query_length)
        return super().get_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]

    def drop(self, layers: list[Any]) -> None:
        """Drops the forward in progress, which reached ``layers``. Empties all if one cannot go back."""
        if not all(type(x) in (VTensorLayer, VTensorSlidingWindowLayer) or holds_nothing(x) for x in layers):
            self.reset()
            return
        for number, length in self._begun.items():
            if self.layers[number].get_seq_length() > length:
                self.layers[number].truncate(length)

    # ------------------------------------------------------------------ batches

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders every layer for beam search, or none if one refuses."""
        self._change_batch(reordered(beam_idx), lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times in every layer, or in none if one refuses."""
        self._change_batch(repeated(repeats), lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | slice) -> None:
        """Keeps the sequences that ``indices`` selects in every layer, or in none if one refuses."""
        self._change_batch(selected(indices), lambda layer: layer.batch_select_indices(indices))

    def _change_batch(self, choice: Choice, of_others: Callable[[Any], None]) -> None:
        change = BatchChange()
        self._plan_batch(change, choice, of_others)
        change.carry_out()

    def _plan_batch(self, change: BatchChange, choice: Choice, of_others: Callable[[Any], None]) -> None:
        for layer in self.layers:
            if isinstance(layer, VTensorLayer):
                layer.plan_batch(change, choice)
            else:
                twin = twin_of(layer)
                of_others(twin)
                change.assign(vars(layer), vars(twin))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens in every layer, or in none if one refuses."""
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
        """Frees K and V of all layers. The pool keeps their pages mapped for the next cache of this shape, up
        to ``Pool(cache=)`` bytes, until others need them or ``Pool.trim()`` gives them back to the system.
        """
        finish(lambda: list(map(empty, self.layers)))


class TwoHalves(EncoderDecoderCache):
    """An ``EncoderDecoderCache`` whose halves change together: after a refusal both are as before."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, VTensorCache):  # also one that T5Gemma puts in the place of the encoder's
            _wholes.setdefault(value, weakref.WeakSet()).add(self)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def drop(self, half: VTensorCache, layers: list[Any]) -> None:
        """Drops the forward in progress, which reached ``layers`` of ``half``, in both halves."""
        for one in (self.self_attention_cache, self.cross_attention_cache):
            if isinstance(one, VTensorCache):
                one.drop(layers if one is half else one.layers)
        for number, updated in self.is_updated.items():
            self.is_updated[number] = updated and self.cross_attention_cache.get_seq_length(number) > 0

    # Each makes its change by _plan_batch.
    reorder_cache = VTensorCache.reorder_cache
    batch_repeat_interleave = VTensorCache.batch_repeat_interleave
    batch_select_indices = VTensorCache.batch_select_indices
    _change_batch = VTensorCache._change_batch

    def _plan_batch(self, change: BatchChange, choice: Choice, of_others: Callable[[Any], None]) -> None:
        for half in (self.self_attention_cache, self.cross_attention_cache):
            VTensorCache._plan_batch(half, change, choice, of_others)  # any cache with layers
        if change.leaving:  # no sequence is kept
            change.assign(self.is_updated, dict.fromkeys(self.is_updated, False))

    def reset(self) -> None:
        finish(super().reset)


def encoder_decoder_cache(
    config: PreTrainedConfig, max_len: int | None = None, pool: Pool | None = None, **options: Any
) -> EncoderDecoderCache:
    """Makes a cache for an encoder-decoder model.

    Both halves are a ``VTensorCache``: the decoder's own K and V, and the K and V of the encoder's output.

    Args:
        config: the model's config.
        max_len: the most tokens of the decoder's sequence. The encoder's half has no limit.
        pool, options: as for ``VTensorCache``. The encoder's half is not offloaded: models read it without
            an update, which would bring it back.

    Raises:
        InvalidArgument: as for ``VTensorCache``.
    """
    own = VTensorCache(config, max_len, pool, **options)
    encoders = VTensorCache(config, None, pool, **options | {"offloading": False})
    for number, layer in enumerate(encoders.layers):
        if isinstance(layer, VTensorSlidingWindowLayer):  # the windows of T5Gemma's decoder are its own
            encoders.layers[number] = VTensorLayer(None, pool)
            encoders.layers[number].tag = layer.tag
    return TwoHalves(own, encoders)


def check_pool(asking: str, pool: object) -> None:
    """Raises InvalidArgument if ``pool`` is neither a pool nor None."""
    if pool is not None and not isinstance(pool, Pool):
        raise InvalidArgument(
            f"[{asking}] pool={pool!r} is a {type(pool).__name__}: pass a vtensor.Pool, such as "
            "vtensor.Pool('cpu'), or None for the default pool of the model's device"
        )


def growing(layer: Any, max_len: int | None, pool: Pool | None) -> Any:
    """The layer that grows in place instead of ``layer``, an empty one of ``DynamicCache``."""
    # Exact types only: their subclasses keep other states besides K and V.
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
    """Whether the layer holds no states, like a ``DummyLayer`` of transformers 5.23."""
    return not isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin)

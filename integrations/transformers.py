"""A Hugging Face cache whose K and V grow in place.

``VTensorCache`` is a ``DynamicCache``: pass it to an unmodified ``model.generate()`` as
``past_key_values``. What a layer hands to attention is a plain view of exactly the tokens stored, as
``DynamicCache`` does, so attention masks, kernels and tokens are the same; only the copy of the whole
past at every token is gone.

Follows ``transformers/cache_utils.py`` of transformers 5.23 (``Cache``, ``DynamicCache``, ``DynamicLayer``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

import vtensor
from vtensor import CapacityExceeded, InvalidArgument, Pool, VTensor, VTensorError

__all__ = ["VTensorCache", "VTensorLayer"]


class VTensorLayer(DynamicLayer):
    """K and V of one full-attention layer, each a VTensor that grows along the tokens.

    Both are made at the first ``update``, with that batch size, those heads, that dtype and device;
    ``max_len`` tokens of addresses are reserved, which costs no memory.
    """

    def __init__(self, max_len: int, pool: Pool | None = None) -> None:
        self.max_len = max_len
        self.pool = pool
        self.owners: tuple[VTensor, VTensor] | None = None
        super().__init__()

    # ------------------------------------------------------------------ storage

    @property
    def keys(self) -> torch.Tensor | None:
        """K as it is now: a plain view [batch, heads, tokens, head_dim], None before the first update."""
        return None if self.owners is None else self._view(self.owners[0])

    @keys.setter
    def keys(self, value: None) -> None:
        self._refuse_assignment("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """V as it is now: a plain view [batch, heads, tokens, head_dim], None before the first update."""
        return None if self.owners is None else self._view(self.owners[1])

    @values.setter
    def values(self, value: None) -> None:
        self._refuse_assignment("values", value)

    def _refuse_assignment(self, name: str, value: object) -> None:
        if value is not None or self.owners is not None:  # the base class's __init__ sets None
            raise InvalidArgument(
                f"[VTensorLayer.{name}] assignment, but the memory is the layer's own: "
                "use update(), crop(), reset() or reorder_cache()"
            )

    def _view(self, owner: VTensor) -> torch.Tensor:
        return _heads_first(owner, owner.snapshot())

    def _make_owner(self, states: torch.Tensor) -> VTensor:
        pool = vtensor.default_pool(states.device) if self.pool is None else self.pool
        batch, heads, _, head_dim = states.shape
        # The host's SDPA is about twice as fast where a head's tokens are adjacent, so there every head is
        # a row. On CUDA a row costs at least one page of 2 MiB, and FlashAttention reads
        # [batch, tokens, heads, head_dim] as it is, so there only a sequence is a row.
        if pool.device.type == "cpu":
            shape, grow_dim = (batch, heads, 0, head_dim), 2
        else:
            shape, grow_dim = (batch, 0, heads, head_dim), 1
        return vtensor.empty(*shape, grow_dim=grow_dim, capacity=self.max_len, dtype=states.dtype, pool=pool)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes K and V, empty, for states [batch, heads, any, head_dim] such as these."""
        self._make_owners(key_states, value_states)

    def _make_owners(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[VTensor, VTensor]:
        keys = self._make_owner(key_states)
        try:
            return self._adopt(keys, self._make_owner(value_states))
        except BaseException:
            keys.close()
            raise

    def _adopt(self, keys: VTensor, values: VTensor) -> tuple[VTensor, VTensor]:
        self.dtype, self.device = keys.dtype, keys.device
        self.owners = keys, values
        self.is_initialized = True
        return self.owners

    # ------------------------------------------------------------------ growth

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states [batch, heads, new tokens, head_dim] and returns plain views of all of K and V.

        Raises CapacityExceeded past ``max_len`` tokens, OutOfPages where the pool has none left, and
        InvalidArgument for states that do not fit those before. The layer is then as it was (I8).
        """
        length, new = self.get_seq_length(), key_states.shape[-2]
        if length + new > self.max_len:
            raise CapacityExceeded(
                f"[VTensorCache.update] {length} tokens and {new} more, but max_len={self.max_len}: "
                "make the cache with a larger max_len=, which costs addresses only, no memory"
            )
        if value_states.shape[-2] != new:
            raise InvalidArgument(
                f"[VTensorCache.update] keys of {new} tokens with values of {value_states.shape[-2]}: "
                "pass as many of both"
            )
        self.truncate(length)
        fresh = self.owners is None
        keys, values = self.owners or self._make_owners(key_states, value_states)
        try:
            keys.append(_heads_first(keys, key_states))
            values.append(_heads_first(values, value_states))
        except BaseException:
            if fresh:
                self.reset()
            else:
                self.truncate(length)
            raise
        return self._view(keys), self._view(values)

    @property
    def is_on_host(self) -> bool:
        """Whether K and V lie in host memory; False before the first update."""
        return self.owners is not None and self.owners[0].device.type == "cpu"

    def get_seq_length(self) -> int:
        """Tokens stored."""
        # Of two lengths, where a truncate was refused between K and V, the shorter one counts.
        return 0 if self.owners is None else min(owner.length for owner in self.owners)

    def get_max_length(self) -> int:
        """Tokens that fit: ``max_len``."""
        return self.max_len

    # ------------------------------------------------------------------ what generate() and its callers do

    def truncate(self, length: int) -> None:
        """Keeps the first ``length`` tokens. Whole pages behind them go back to the pool."""
        if self.owners is not None:
            for owner in self.owners:
                if owner.length > length:
                    owner.truncate(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens (transformers passes zero or a negative number)."""
        if tokens_to_remove > 0:
            raise InvalidArgument(
                f"[VTensorCache.crop] tokens_to_remove={tokens_to_remove}, but it counts from the end: "
                "pass zero or a negative number"
            )
        self.truncate(max(0, self.get_seq_length() + tokens_to_remove))

    def reset(self) -> None:
        """Gives all memory back. The next ``update`` may bring another batch size, dtype or device."""
        owners, self.owners = self.owners, None
        self.is_initialized = False
        for owner in owners or ():
            owner.close()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes sequence ``beam_idx[i]`` the i-th: pages are remapped; only partial last ones are copied, by
        whoever appends first.

        If it fails between K and V the layer is emptied, because what K held before may be gone.
        """
        if self.owners is not None:
            keys, values = self.owners
            index = beam_idx.tolist()
            keys.reindex(index)
            try:
                values.reindex(index)
            except BaseException:
                self.reset()
                raise

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times; the copies share pages until they are written."""
        if self.owners is not None:
            self.reorder_cache(torch.arange(self.owners[0].shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences that ``indices`` selects: positions, or one bool for each sequence."""
        if self.owners is not None:
            self.reorder_cache(torch.arange(self.owners[0].shape[0])[torch.as_tensor(indices).cpu()])

    def offload(self) -> None:
        """Refused: K and V stay on the device where they grow."""
        raise InvalidArgument(
            "[VTensorLayer.offload] the memory of a VTensor stays on its device: "
            "use DynamicCache(offloading=True) where layers must move"
        )

    def prefetch(self) -> None:
        """Refused, as ``offload`` is."""
        self.offload()

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> VTensorLayer:
        """A layer in the same pool that shares all whole pages until one of the two writes (I6)."""
        copied = type(self)(self.max_len, self.pool)
        memo[id(self)] = copied
        if self.owners is not None:
            keys = self.owners[0].fork()
            try:
                copied._adopt(keys, self.owners[1].fork())
            except BaseException:
                keys.close()
                raise
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Dense copies of K and V. The pool is not saved."""
        dense = None if self.owners is None else tuple(self._view(owner).clone() for owner in self.owners)
        return {"max_len": self.max_len, "dense": dense}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, state["max_len"])
        if state["dense"] is not None:
            self.update(*state["dense"])


def _heads_first(owner: VTensor, states: torch.Tensor) -> torch.Tensor:
    """Turns [batch, heads, tokens, head_dim] into the layout of ``owner``, or that layout back into it."""
    return states if owner.grow_dim == 2 else states.transpose(1, 2)


class VTensorCache(DynamicCache):
    """A ``DynamicCache`` for ``model.generate(..., past_key_values=cache)`` that grows in place.

    Layers with full attention are ``VTensorLayer``; the others (sliding window, linear attention, ...) are
    what ``DynamicCache(config=config)`` makes of them.

    Args:
        config: the model's config.
        max_len: the most tokens that a sequence may have, prompt included. Reserves addresses, no memory.
        pool: where pages come from; the default pool of the device on which the model runs if None.

    ``copy.deepcopy`` shares pages until either side writes. A pickled cache is dense and comes back in the
    default pool. ``reset()`` gives all memory back.
    """

    layers: list[Any]

    def __init__(self, config: PreTrainedConfig, max_len: int, pool: Pool | None = None) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise InvalidArgument(
                f"[VTensorCache] config is a {type(config).__name__}: pass model.config, which says "
                "what kind of cache each layer needs"
            )
        if isinstance(max_len, bool) or not isinstance(max_len, int) or max_len < 1:
            raise InvalidArgument(
                f"[VTensorCache] max_len={max_len!r}: pass the most tokens of a sequence, prompt included"
            )
        super().__init__(config=config)
        self.max_len = max_len
        # Only what is exactly a DynamicLayer: its subclasses keep other states beside K and V.
        self.layers = [
            VTensorLayer(max_len, pool) if type(layer) is DynamicLayer else layer for layer in self.layers
        ]

    @property
    def is_compileable(self) -> bool:
        """Whether transformers makes a mask for steps of one token. On the host it should: without a mask,
        transformers 5.23 has SDPA read K and V once for each query head (``enable_gqa``), which at 8k tokens
        takes twice the time. It compiles ``generate()`` on accelerators only, where this is False."""
        return bool(self.layers) and all(
            isinstance(layer, VTensorLayer) and layer.is_on_host for layer in self.layers
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends to one layer, see ``VTensorLayer.update``.

        Where a layer refuses, the layers before it, which took this step's tokens already, are put back
        too: after an error the cache holds what it held before the forward call, and can go on from there.
        """
        try:
            states: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, layer_idx, *args, **kwargs
            )
        except VTensorError:
            self._truncate_layers(before=layer_idx)
            raise
        return states

    def _truncate_layers(self, before: int) -> None:
        failed = self.layers[before]
        if isinstance(failed, VTensorLayer):
            length = failed.get_seq_length()
            for layer in self.layers[:before]:
                if isinstance(layer, VTensorLayer):
                    layer.truncate(length)

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
                if number > 0 or not layer.is_initialized:
                    self.reset()
                raise

"""The layer of ``VTensorCache``: K and V of one attention layer, each a VTensor.

Follows ``DynamicLayer`` in ``transformers/cache_utils.py`` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

import vtensor
from vtensor import CapacityExceeded, InvalidArgument, Pool, VTensor, together

from .changes import BatchChange, Choice, cut, finish, reordered, repeated, selected, twin_of

# Tokens for which a layer without max_len= first reserves addresses.
_FIRST_CAPACITY = 16384


def _side(which: int, name: str) -> Any:
    doc = f"The current {name}, [batch, heads, tokens, head_dim]: a plain view, or None before any update."
    return property(
        lambda layer: layer._stored(which), lambda layer, value: layer._assign(which, value), doc=doc
    )


class VTensorLayer(DynamicLayer):
    """K and V of one full-attention layer, each a VTensor that grows along the tokens.

    The first ``update`` makes both, with its batch size, heads, dtype and device.

    Args:
        max_len: the most tokens of a sequence. Reserves addresses, which cost no memory. None means no limit:
            when the addresses are full, the pages move to a larger range, and no byte is copied. They also
            move for tokens past ``max_len`` that may be dropped again. See ``activate_past_recording``.
        pool: the pool of the pages. Defaults to the default pool of the states' device.
    """

    def __init__(self, max_len: int | None = None, pool: Pool | None = None) -> None:
        self.max_len = max_len
        self.pool = pool
        self.tag = "kv"  # the name by which Pool.sleep puts K and V to sleep
        self.owners: tuple[VTensor, VTensor] | None = None
        self.prepared = 0
        self.record_past = False
        # The views that the next update fills and returns. A compiled forward uses these plain views only,
        # because subclasses as inputs fail (pytorch issue 193932) and mapping cannot be traced.
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None
        self._away: tuple[torch.Tensor, torch.Tensor] | None = None
        CacheLayerMixin.__init__(self)  # some classes between require arguments

    # ------------------------------------------------------------------ storage

    keys = _side(0, "K")
    values = _side(1, "V")

    def _assign(self, which: int, value: torch.Tensor | None) -> None:
        """Replaces K (0) or V (1) with a copy of ``value``. None gives all memory back."""
        if value is None:
            VTensorLayer.reset(self)  # of a hybrid, K and V alone
            return
        if self.owners is None:
            raise InvalidArgument(
                "[VTensorLayer] K or V assigned before the first update(), which says what both are: "
                "call update(keys, values)"
            )
        if value.ndim != 4:
            raise InvalidArgument(
                f"[VTensorLayer] K or V assigned as {list(value.shape)}: "
                "give [batch, heads, tokens, head_dim]"
            )
        self._end_preparation()
        owners = list(self.owners)
        owners[which] = self._copy_of(value)
        self._replace(owners, **self._assigned(owners))

    def _assigned(self, owners: list[VTensor]) -> dict[str, Any]:
        """Attributes that change with an assignment of K or V."""
        return {}

    def _replace(self, owners: list[VTensor], **others: Any) -> None:
        """Makes ``owners`` the new K and V, and closes the old ones that are not among them. Sets ``others``
        in the same step."""
        assert self.owners is not None
        before, (keys, values) = self.owners, owners
        if keys is not before[0] or values is not before[1]:
            self._adopt(keys, values, **others)
            for owner, old in zip(owners, before, strict=True):
                if owner is not old:
                    old.close()

    def _copy_of(self, states: torch.Tensor, new: int = 0) -> VTensor:
        """A new owner with a copy of the states [batch, heads, tokens, head_dim], and addresses for more."""
        owner = self._make_owner(states)
        try:
            self._reserve(owner, states.shape[-2] + new)
            return owner.append(_heads_first(owner, states))
        except BaseException:
            owner.close()
            raise

    def _stored(self, which: int) -> torch.Tensor | None:
        if self._away is not None:
            return self._away[which]
        if self.owners is None:
            return None
        view = self._view(self.owners[which])
        return view[..., : view.shape[-2] - self.prepared, :] if self.prepared else view

    def _view(self, owner: VTensor) -> torch.Tensor:
        return _heads_first(owner, owner.alias())

    def _make_owner(self, states: torch.Tensor) -> VTensor:
        pool = vtensor.default_pool(states.device) if self.pool is None else self.pool
        batch, heads, _, head_dim = states.shape
        # On the host, each head is a row, because SDPA is about twice as fast if a head's tokens are
        # adjacent. On CUDA, each sequence is a row, because a row costs at least one page of 2 MiB, and
        # FlashAttention reads [batch, tokens, heads, head_dim].
        if pool.device.type == "cpu":
            shape, grow_dim = (batch, heads, 0, head_dim), 2
        else:
            shape, grow_dim = (batch, 0, heads, head_dim), 1
        return vtensor.empty(
            *shape,
            grow_dim=grow_dim,
            capacity=_FIRST_CAPACITY if self.max_len is None else self.max_len,
            dtype=states.dtype,
            pool=pool,
            when_full="move",
            tag=self.tag,
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes empty K and V for states of this shape, [batch, heads, any, head_dim], dtype and device."""
        self._adopt_made(self._make_owner, key_states, value_states)

    def _adopt_made(self, make: Callable[[Any], VTensor], keys: Any, values: Any) -> None:
        """Makes owners of both, K first, and adopts them, or neither."""
        owner = make(keys)
        try:
            self._adopt(owner, make(values))
        except BaseException:
            owner.close()
            raise

    def _adopt(self, keys: VTensor, values: VTensor, **others: Any) -> None:
        self.__dict__.update(
            others, owners=(keys, values), dtype=keys.dtype, device=keys.device, is_initialized=True
        )

    def _before_growth(self, new: int) -> None:
        """Reserves addresses for `new` more tokens, if there may be more than max_len."""
        if self.owners is not None:
            need = max(owner.length for owner in self.owners) + new
            for owner in self.owners:  # if the second fails, the first has moved, which changes no content
                self._reserve(owner, need)

    def _reserve(self, owner: VTensor, need: int) -> None:
        if need > owner.capacity and (self.max_len is None or self.record_past):
            together.reserve(owner, 2 * need)

    # ------------------------------------------------------------------ growth

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states [batch, heads, new tokens, head_dim] and returns plain views of all of K and V.

        If states have another dtype than those before, the result has the dtype that ``torch.cat`` would
        give. If that differs from the stored dtype, the stored states are converted once, which copies them.

        Raises:
            CapacityExceeded: if there would be more than ``max_len`` tokens. See ``activate_past_recording``.
            OutOfPages: if the pool has too few free pages.
            InvalidArgument: if the states do not fit those before, or require grad outside ``no_grad``.

        After an error the layer is as before (I8).
        """
        new = key_states.shape[-2]
        compiling = torch.compiler.is_compiling()
        keeps_graph = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if new and self.prepared == new and self._views is not None and not keeps_graph:
            # The preparation may be for another batch or dtype.
            if compiling or self._takes(key_states, value_states):
                return self._fill(key_states, value_states)
        if compiling:
            return _update_outside_the_graph(self, key_states, value_states)  # type: ignore[no-any-return]
        self.settle()
        self._check_room(new)
        if value_states.shape[-2] != new:
            raise InvalidArgument(
                f"[VTensorCache.update] keys of {new} tokens with values of {value_states.shape[-2]}: "
                "pass as many of both"
            )
        if self.owners and not self.get_seq_length() and not self._takes(key_states, value_states):
            VTensorLayer.reset(self)  # empty, and made for other shapes
        fresh = self.owners is None
        if fresh:
            self.lazy_initialization(key_states, value_states)
        self._before_growth(new)
        assert self.owners is not None
        before = self.owners
        length = before[0].length
        owners = [*before]
        try:
            for which, states in enumerate((key_states, value_states)):
                owner = owners[which]
                if owner.dtype != states.dtype:
                    dtype = torch.promote_types(owner.dtype, states.dtype)
                    if dtype != owner.dtype:
                        owner = owners[which] = self._copy_of(self._view(owner).to(dtype), new)
                    states = states.to(dtype)
                owner.append(_heads_first(owner, states))
        except BaseException as error:
            for owner, old in zip(owners, before, strict=True):
                if owner is not old:
                    owner.close()
                elif owner.length > length:
                    owner.truncate(length)
            if fresh:
                VTensorLayer.reset(self)
            elif isinstance(error, InvalidArgument) and key_states.shape[0] != self.owners[0].shape[0]:
                raise InvalidArgument(
                    f"[VTensorCache.update] {key_states.shape[0]} sequences for a cache of "
                    f"{self.owners[0].shape[0]}, whose batches must agree: reset() the cache before another "
                    "batch, or make one for each"
                ) from error
            raise
        self._replace(owners)
        return self._after_growth(new)

    def prepare(self, tokens: int) -> None:
        """Maps the memory for the next ``update`` of ``tokens``, so that it only writes.

        See ``VTensorCache.prepare``.
        """
        if self.prepared == tokens and self._views is not None:
            return
        self.settle()
        if self.owners is None or tokens == 0:
            return
        self._check_room(tokens)
        self._before_growth(tokens)
        keys, values = self.owners
        length = keys.length
        try:
            keys.extend(tokens)
            values.extend(tokens)
            self.prepared = tokens
            self._views = self._visible(keys, tokens), self._visible(values, tokens)
        except BaseException:
            self._views = None
            self._take_back(length)
            raise

    def _end_preparation(self) -> None:
        self._views = None
        if self._away is not None:
            self.prefetch()
        if self.prepared and self.owners is not None:
            finish(partial(self._take_back, min(owner.length for owner in self.owners) - self.prepared))

    def _take_back(self, length: int) -> None:
        """Undoes a preparation. ``length`` is the number of tokens before it."""
        cut(self.owners or (), length)
        self.prepared = 0

    def settle(self) -> None:
        """Undoes an unused preparation, and ends an offload."""
        self._end_preparation()
        # An exception between the truncates of K and V leaves two lengths. The shorter one is right.
        if self.owners is not None and self.owners[0].length != self.owners[1].length:
            cut(self.owners, min(owner.length for owner in self.owners))

    def _fill(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes into the prepared positions. torch.compile traces this function."""
        assert self._views is not None
        keys, values = self._views
        for view, states in ((keys, key_states), (values, value_states)):
            room = view[..., -self.prepared :, :]
            if room.shape != states.shape or room.dtype != states.dtype:
                raise InvalidArgument(
                    f"[VTensorCache.update] states {tuple(states.shape)} of {states.dtype} for room prepared "
                    f"of {tuple(room.shape)}, {room.dtype}: pass those of the model that the cache is used by"
                )
            room.copy_(states)
        self.prepared = 0
        if not torch.compiler.is_compiling():
            self._views = None
        return keys, values

    def activate_past_recording(self) -> None:
        """Allows ``crop`` to drop rejected tokens of assisted decoding and prompt lookup.

        From now on, only the first token of a step counts against ``max_len``.
        """
        self.record_past = True

    def _check_room(self, new: int) -> None:
        length = self.get_seq_length()
        staying = min(new, 1) if self.record_past and length > 0 else new
        if self.max_len is not None and length + staying > self.max_len:
            raise CapacityExceeded(
                f"[VTensorCache.update] {length} tokens and {new} more, but max_len={self.max_len}: "
                "make the cache with a larger max_len=, which costs addresses only, no memory"
            )

    def _takes(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether K and V were made for states of these shapes, dtypes and devices."""
        assert self.owners is not None
        for owner, states in zip(self.owners, (key_states, value_states), strict=True):
            wanted = states.shape[:2] + states.shape[3:]
            has = _heads_first(owner, owner).shape
            if has[:2] + has[3:] != wanted or owner.dtype != states.dtype or owner.device != states.device:
                return False
        return True

    def _after_growth(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.owners is not None
        return self._visible(self.owners[0], new), self._visible(self.owners[1], new)

    def _visible(self, owner: VTensor, new: int) -> torch.Tensor:
        """The part of `owner` that attention reads in a step of `new` tokens, after it has grown by them."""
        return self._view(owner)

    def get_seq_length(self) -> int:
        """Tokens stored."""
        if torch.compiler.is_compiling():
            # From a shape, because dynamo compiles a graph for each value of a plain number.
            length: int = _length_outside_the_graph(self) if self._views is None else self._traced_length()
            return length
        if self._away is not None:
            return self._away[0].shape[-2]
        return 0 if self.owners is None else min(x.length for x in self.owners) - self.prepared

    def _traced_length(self) -> int:
        assert self._views is not None
        return self._views[0].shape[-2] - self.prepared

    def get_max_length(self) -> int:
        """Tokens that fit: ``max_len``, or -1 for no limit."""
        return -1 if self.max_len is None else self.max_len

    # ------------------------------------------------------------------ for generate() and its callers

    def truncate(self, length: int) -> None:
        """Keeps the first ``length`` tokens. Whole pages past them go back to the pool."""
        if self._away is not None:  # there may be no pages to bring K and V back first
            self._away = self._away[0][..., :length, :], self._away[1][..., :length, :]
            return
        self.settle()
        cut(self.owners or (), length)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens (transformers passes zero or a negative number)."""
        finish(self.plan_crop(tokens_to_remove))

    def plan_crop(self, tokens_to_remove: int) -> Callable[[], None]:
        """Checks a ``crop``, and returns an idempotent function that does it. Raises as ``crop`` does."""
        if tokens_to_remove > 0:
            raise InvalidArgument(
                f"[VTensorCache.crop] tokens_to_remove={tokens_to_remove}, but it counts from the end: "
                "pass zero or a negative number"
            )
        self.settle()
        return partial(self.truncate, max(0, self.get_seq_length() + tokens_to_remove))

    def reset(self) -> None:
        """Gives all memory back. The next ``update`` may bring another batch size, dtype or device."""
        owners = self.owners
        self.__dict__.update(self._released())
        for owner in owners or ():
            owner.close()

    def _released(self) -> dict[str, Any]:
        """The attributes of a layer without memory."""
        return {"owners": None, "_views": None, "_away": None, "prepared": 0, "is_initialized": False}

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes sequence ``beam_idx[i]`` the i-th by remapping pages.

        Only a partial last page is copied, at the first append to it.
        """
        self._change_batch(reordered(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times. The copies share pages until the first write."""
        self._change_batch(repeated(repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | slice) -> None:
        """Keeps the sequences that ``indices`` selects: positions, one bool for each sequence, or a slice.

        If it selects none, gives all memory back.
        """
        self._change_batch(selected(indices))

    def _change_batch(self, choice: Choice) -> None:
        change = BatchChange()
        self.plan_batch(change, choice)
        change.carry_out()

    def plan_batch(self, change: BatchChange, choice: Choice) -> None:
        """Adds to ``change`` the steps that give this layer the sequences of ``choice``."""
        self.settle()
        if self.owners is None:
            return
        if kept := choice(self.owners[0].shape[0]):
            change.reindex(self.owners, kept)
        else:
            change.assign(self.__dict__, self._released(), leaving=self.owners)

    def offload(self) -> None:
        """Moves K and V to host memory and gives their pages back. Does nothing on the host.

        K and V keep their addresses. ``prefetch`` or the next ``update`` brings them back.
        """
        if self.owners is None or self._away is not None or self.owners[0].pool.device.type == "cpu":
            return
        self.settle()
        self._away = tuple(  # type: ignore[assignment]
            torch.empty(view.shape, dtype=view.dtype, device="cpu").copy_(view)
            for view in map(self._view, self.owners)
        )
        cut(self.owners, 0)

    def prefetch(self) -> None:
        """Brings K and V back from host memory.

        Raises:
            OutOfPages: if the pool has too few free pages. K and V then stay in host memory.
        """
        if self._away is None or self.owners is None:
            return
        try:
            cut(self.owners, 0)  # an offload or a prefetch may have been interrupted
            for owner, states in zip(self.owners, self._away, strict=True):
                owner.append(_heads_first(owner, states.to(owner.device, non_blocking=True)))
            self._away = None
        except BaseException:
            if self._away is not None:
                cut(self.owners, 0)
            raise

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> VTensorLayer:
        """A layer in the same pool that shares all whole pages until either writes (I6)."""
        self.settle()
        copied = twin_of(self)
        copied.__dict__.update(owners=None, is_initialized=False)
        if self.owners is not None:
            copied._adopt_made(lambda owner: owner.fork(), *self.owners)
        return copied  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """Dense copies of K and V. The pool is not saved."""
        stored = [] if self.owners is None else [self.keys, self.values]
        dense = [states.clone(memory_format=torch.contiguous_format) for states in stored]
        return vars(self) | VTensorLayer._released(self) | {"pool": None, "dense": dense}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dense = state.pop("dense")
        self.__dict__.update(state)
        if dense:  # may be more than max_len, while drafts are tried
            self._adopt_made(self._copy_of, *dense)


def _heads_first(owner: VTensor, states: torch.Tensor) -> torch.Tensor:
    """Converts between [batch, heads, tokens, head_dim] and the layout of ``owner``, in either direction."""
    return states if owner.grow_dim == 2 else states.transpose(1, 2)


_OUTSIDE = "[VTensorCache] mapping cannot be traced: call cache.prepare(n) before the compiled forward"
_update_outside_the_graph: Any = torch.compiler.disable(VTensorLayer.update, reason=_OUTSIDE)
_length_outside_the_graph: Any = torch.compiler.disable(lambda layer: layer.get_seq_length(), reason=_OUTSIDE)

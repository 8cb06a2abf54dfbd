"""A KV cache for serving: slots for requests in address ranges that never move."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, Literal

import torch

from vtensor import _core
from vtensor._base.arguments import MOST, integer, items, of_type, require_tables, tag_of, text
from vtensor._base.notebook import Drawn
from vtensor._base.processes import Closes
from vtensor._base.streams import Stream, stream_handle
from vtensor._base.torch_modes import whole_storage
from vtensor._kv.layout import CacheLayout, layout_of, size_of
from vtensor._kv.stats import KVCacheStats, count
from vtensor._kv.write import Runs, check_batch, checked_states, one_or_several, runs_of, store, token_ids
from vtensor.errors import Closed, InvalidArgument
from vtensor.pool import Pool, pool_of

__all__ = ["KVCache", "KVCacheStats"]

# Its methods are called by the class, as those of a tensor's core: see tensor.py.
CacheCore = _core.CacheCore

# Bytes of tables, as measured and some more: for each layer, slot, row group of a slot.
_PER_LAYER, _PER_SLOT, _PER_ROW_GROUP = 3000, 350, 70


class KVCache(Closes, Drawn):
    """K and V of many requests that come and go, share prefixes, fork, and are swapped.

    Each layer's K and V are one strided tensor over all slots. Its address never changes, and only the pages
    that requests' lengths need are mapped. The calls are vAttention's (arXiv 2405.04437): make,
    :meth:`alloc`, :meth:`step`, :meth:`free`. Methods take ``lengths`` as :meth:`step` does, and raise as it
    does for lengths that make no sense.

    Args:
        num_layers: layers that have K and V.
        num_kv_heads: heads of each layer; under tensor parallelism, the local ones.
        head_dim: of K, and of V unless ``value_head_dim`` is given.
        max_batch: slots.
        max_len: the most tokens of a slot; costs addresses, no memory.
        dtype: dtype of the tensors; torch's default dtype unless given.
        device: the pool's unless given; without a pool, torch's default device.
        layer_group: layers that share a page (the sliced layout). A page then has fewer tokens of more
            layers, so less of the last page is wasted and shorter prefixes are shared.
        layout: ``"NHD"`` for ``[max_batch, max_len, heads, head_dim]``, as FlashAttention takes it;
            ``"HND"`` for ``[max_batch, heads, max_len, head_dim]``: each head is a row of its own, and SDPA
            on the CPU is fastest with it.
        value_head_dim: head size of V, if it differs; 0 for a cache without V (MLA's latent in K).
        windows: for each layer None (full attention), or the tokens that its sliding window sees: pages
            before those go back to the pool as the window moves.
        bands: groups of neighbouring layers that can grow, leave and come back apart. A prompt that is
            computed layer by layer then needs room for few of them at a time (LayerKV, arXiv 2410.00428).
            A call without ``bands=`` treats them as one.
        lookahead: tokens past each length for which the pool's mapper keeps pages ready, so that :meth:`step`
            makes no driver call; a few steps' worth.
        tile: the most tokens that kernels read in one go: ``tile - 1`` past each length are mapped too. They
            hold zeros or what was written there before. 256 on CUDA (FlashAttention 3 and 4 read up to 224),
            1 on the CPU, where unmapped tokens read as zeros.
        pool: the pool of the pages; the device's default pool unless given.
        tag: the name by which :meth:`Pool.sleep` puts it to sleep.

    Raises:
        InvalidArgument: sizes, dtype, device or layout that make no sense.
        CapacityExceeded: more addresses than a process has, or tables larger than the machine's free memory.
        Closed: the pool is closed.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_batch: int,
        max_len: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        *,
        layer_group: int = 1,
        layout: Literal["NHD", "HND"] = "NHD",
        value_head_dim: int | None = None,
        windows: Sequence[int | None] | None = None,
        bands: int = 1,
        lookahead: int = 0,
        tile: int | None = None,
        pool: Pool | None = None,
        tag: str = "kv",
    ) -> None:
        self._sleeps_as = tag_of("KVCache", tag)
        pool = pool_of("KVCache", pool, device)
        if tile is None:
            tile = 256 if pool.device.type == "cuda" else 1
        max_batch = size_of("max_batch", max_batch)
        max_len = size_of("max_len", max_len)
        tile = size_of("tile", tile)
        lookahead = integer("KVCache", "lookahead", lookahead, 0, max_len)
        dtype = of_type(
            "KVCache", "dtype", torch.get_default_dtype() if dtype is None else dtype, torch.dtype
        )
        layers = size_of("num_layers", num_layers)
        require_tables("KVCache", f"num_layers {layers}", layers * _PER_LAYER)
        self._layout: CacheLayout = layout_of(
            layers, num_kv_heads, head_dim, value_head_dim, layer_group, layout, windows, bands, dtype
        )
        row_groups = len(self._layout.row_groups)
        require_tables(
            "KVCache", f"max_batch {max_batch}", max_batch * (_PER_SLOT + row_groups * _PER_ROW_GROUP)
        )
        self._pool = pool
        core = pool._open_core("KVCache")
        self.max_batch, self.max_len, self.dtype, self.tile = max_batch, max_len, dtype, tile
        self.lookahead = lookahead if core.looks_ahead else 0
        self._core = CacheCore(
            core,
            slots=max_batch,
            max_length=max_len,
            tile=tile,
            lookahead=lookahead,
            row_groups=[
                (row_group.contents, row_group.item_bytes, row_group.window, row_group.band)
                for row_group in self._layout.row_groups
            ],
        )
        known = weakref.ref(self)  # by all views of the layers: see bind/slot_range.h
        self._bytes = [
            whole_storage(CacheCore.storage(self._core, row_group, known)) for row_group in range(row_groups)
        ]
        ends = [at for whole in self._bytes for at in (whole.data_ptr(), whole.data_ptr() + whole.numel())]
        self._addresses = range(min(ends), max(ends))
        self._layers = self._layout.views(self._bytes, max_batch, max_len, dtype)
        pool._register(self)

    # -- requests

    def alloc(
        self,
        tokens: Sequence[int] | torch.Tensor | None = None,
        *,
        salt: str = "",
        expect: int = 0,
        deferred: bool = False,
    ) -> int:
        """Takes a free slot for a request.

        With ``tokens``, the request's prompt, the slot begins with what the prefix index has of them: whole
        units, and never all of them, because the last token has to be computed. :meth:`length` says how many.

        Args:
            tokens: ids, ``[n]``.
            salt: requests share prefixes only with those of the same salt.
            expect: tokens the request will have, if known: it gets the slot whose cached pages fit that best.
            deferred: leaves mapping the prefix to the mapper, which maps it once :meth:`prepare` names the
                slot, so that this call makes no driver call. Nothing may read the slot before a :meth:`step`
                or a :meth:`wait`, which map what the mapper has not. Without effect if the cache does not
                look ahead.

        Raises:
            NoFreeSlot: ``max_batch`` requests are in the cache.
            DriverError, Closed: nothing was changed.
        """
        expect = integer("KVCache.alloc", "expect", expect, 0, MOST)
        ids = None if tokens is None else token_ids("KVCache.alloc", tokens)
        salt = text("KVCache.alloc", "salt", salt)
        return CacheCore.alloc(self._core, expect, ids, salt, bool(deferred))

    def step(self, lengths: Sequence[int] | torch.Tensor, *, bands: Iterable[int] | None = None) -> bool:
        """Makes the first ``lengths[slot]`` tokens of each slot ready to be written and read.

        Makes one batch of driver calls for all slots and layers, or none if their pages are ready. If memory
        is short, prefixes that no request uses are given up first.

        Args:
            lengths: ``[max_batch]`` integers on the CPU; 0 for slots that are free or swapped out. They do
                not shrink: :meth:`truncate` does that.
            bands: the bands to grow, all unless given; the others keep their lengths. A slot whose bands
                differ stays as it is if its length here is that of :attr:`lengths`, the smallest.

        Returns:
            False if memory is short: the lengths stay, and the same call works once a slot was freed, swapped
            out or truncated.

        Raises:
            InvalidArgument: lengths that shrink, or of slots or bands that are not here.
            CapacityExceeded: a length above ``max_len``.
            DriverError, TimedOut, Closed: nothing was changed.
        """
        if type(lengths) is list and bands is None:  # as engines call it: a check more costs a tenth of it
            try:
                return CacheCore.step(self._core, lengths)
            except TypeError:
                pass  # the same call below says why
        return self._ask("KVCache.step", CacheCore.step, lengths, self._bands("KVCache.step", bands))

    def prepare(self, lengths: Sequence[int] | torch.Tensor) -> bool:
        """Announces a :meth:`step`: the pool's mapper maps its pages now, so that the step itself makes no
        driver call. A scheduler calls it as soon as it knows a prompt's length, during the iteration before.
        Waits for nothing and changes no length.

        If memory is short, it gives up what the step would give up, but no more than is missing: cached
        pages, then prefixes that no request uses. If that is not enough, it gives up nothing and maps
        nothing. Ready pages go back as soon as others need memory; the step then maps them again. Pages that
        the step would unshare are left to it, and so are slots whose bands differ. Other pools of a shared
        budget are not asked for memory.

        Announced pages are bounded by the free pages, not by the pool's ``prefetch=``. A pool with
        ``prefetch=0`` announces nothing.

        Returns:
            True if all is ready, and ``step(lengths)`` would make no driver call now but for pages that leave
            a window.
        """
        return self._ask("KVCache.prepare", CacheCore.prepare, lengths)

    def fits(
        self,
        lengths: Sequence[int] | torch.Tensor,
        *,
        bands: Iterable[int] | None = None,
        wait: bool = False,
    ) -> bool:
        """Whether ``step(lengths)`` would be granted now, after the :meth:`swap_in` of swapped slots that
        have a length here. Changes nothing. (A refused step has given up the prefixes that no request uses.)

        It counts the pool's budget and reserve, and what a step would give up: cached pages, prefetched
        pages, and prefixes. It does not count pages of other tensors that wait for work on the device. A
        device whose memory others take may still refuse.

        Args:
            lengths: for a swapped slot 0, or at least as many tokens as it has.
            bands: as for :meth:`step`. Pages that swapped bands need to come back are counted.
                A slot with 0 is left out.
            wait: whether to wait, while memory is short, for pages on their way out, of any tensor: those
                that a copy or a kernel still uses. A step waits for them. For at most a minute.
        """
        numbers = self._bands("KVCache.fits", bands)
        return self._ask("KVCache.fits", CacheCore.fits, lengths, numbers, bool(wait))

    def waits_for_others(self, lengths: Sequence[int] | torch.Tensor) -> bool:
        """Whether other pools of a shared budget hold memory, and ``step(lengths)`` would be granted if they
        held none: it may be granted later. False if the budget is not shared. Changes nothing. Takes
        ``lengths`` as :meth:`fits` does.
        """
        return self._ask("KVCache.waits_for_others", CacheCore.waits_for_others, lengths)

    def free(self, slot: int, stream: Stream | None = None) -> None:
        """Ends a request. Its pages stay with the slot for the next one, until others need them.

        Args:
            slot: its slot; the request may be swapped out.
            stream: the stream of the work that uses the slot; the current one unless given.
        """
        CacheCore.free(self._core, self._slot("KVCache.free", slot), stream_handle("KVCache.free", stream))

    def truncate(self, slot: int, length: int, stream: Stream | None = None) -> None:
        """Cuts a request to its first ``length`` tokens, as after rejected drafts.

        Args:
            slot, stream: as for :meth:`free`.

        Raises:
            InvalidArgument: it has fewer, or windowed layers have given back tokens that they would see.
        """
        slot = self._slot("KVCache.truncate", slot)
        length = integer("KVCache.truncate", "length", length, 0, MOST)
        CacheCore.truncate(self._core, slot, length, stream_handle("KVCache.truncate", stream))

    def length(self, slot: int, band: int | None = None) -> int:
        """Tokens of a slot; of a swapped one, those it will have again. 0 if it is free.

        Args:
            slot: its number.
            band: the band to ask for; the smallest length of all bands unless given.
        """
        slot = self._slot("KVCache.length", slot)
        named = self._bands("KVCache.length", None if band is None else [band])
        return CacheCore.length(self._core, slot, named[0] if named else None)

    @property
    def bands(self) -> list[range]:
        """The layers of each band."""
        return list(self._layout.bands)

    def bands_away(self, slot: int) -> list[int]:
        """Bands of a slot in use that are swapped out."""
        return CacheCore.bands_away(self._core, self._slot("KVCache.bands_away", slot))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each slot as :meth:`step` takes them: 0 for those that are free or swapped out."""
        return self._core.lengths

    def write(
        self,
        layer: int,
        slots: int | Sequence[int] | torch.Tensor,
        starts: int | Sequence[int] | torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        *,
        counts: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        """Stores K and V of a layer: of one slot, or of many in one copy each.

        It does what a plain write to ``cache[layer]`` does, and checks first: a plain write to a token that
        :meth:`step` has not made ready ends the process. It unshares shared pages there, waits for a swap-in
        of them, and notes that the current stream uses the cache.

        Args:
            layer: its number.
            slots: a slot, or ``[n]``.
            starts: the first token to be written in each, ``[n]``.
            k, v: ``[tokens, heads, head_dim]``, those of the slots one after the other, or ``[n, tokens,
                heads, head_dim]``, in either layout of the cache; ``v`` is None in a cache without V. They
                may be tokens of the cache itself.
            counts: how many of the tokens each slot gets, ``[n]``; the same for all unless given.

        Raises:
            InvalidArgument: tokens that a slot does not have, because :meth:`step` was not called, or because
                a layer's window gave them back; another shape, dtype or device. Nothing was written.
            OutOfPages: no pages are left to unshare shared ones. Nothing was written.
        """
        layer = self._layer("KVCache.write", layer)
        whole_k, whole_v = self._layers[layer]
        if (v is None) != (whole_v is None):
            raise InvalidArgument(
                "[KVCache.write] v is missing: the cache has V"
                if v is None
                else "[KVCache.write] v was given: the cache has no V, leave it out"
            )
        heads_dim = 1 if self._layout.per_head else 2
        flat_k = checked_states("k", k, whole_k, heads_dim, layer)
        runs = runs_of(slots, starts, counts, len(flat_k))
        check_batch("k", k, runs)
        pairs = [(flat_k, whole_k)]
        if v is not None and whole_v is not None:
            flat_v = checked_states("v", v, whole_v, heads_dim, layer)
            if len(flat_v) != len(flat_k):
                raise InvalidArgument(
                    f"[KVCache.write] k has {len(flat_k)} tokens and v {len(flat_v)}: give as many"
                )
            check_batch("v", v, runs)
            pairs.append((flat_v, whole_v))
        for slot in runs.slots:
            self._slot("KVCache.write", slot)
        places = self._places(runs, whole_k.device) if len(runs.slots) != 1 else None

        def copy() -> None:
            store(pairs, heads_dim, runs, places, self._addresses)

        row_group = self._layout.layers[layer][0].row_group
        CacheCore.write(self._core, row_group, layer, list(zip(*runs, strict=True)), copy)

    def _places(self, runs: Runs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and position of each token. Kept for the last runs: a model writes the same in each layer."""
        known = self._last_places
        if known is None or known[0] != runs:
            known = self._last_places = (runs, runs.places(device))
        return known[1]

    # -- sharing

    def fork(self, slot: int, n: int = 1, stream: Stream | None = None) -> list[int]:
        """``n`` new requests that continue this one, for parallel sampling. They share all pages; the first
        write of each takes one page a row, for the last, half-full page.

        Args:
            stream: the stream of the work that uses the slot, which is waited for; the current one unless
                given.

        Raises:
            NoFreeSlot: fewer than ``n`` slots are free.
            InvalidArgument: the slot is free or swapped out.
            OutOfPages: nothing was changed. Pages that the kernel copied at writes to shared pages need
                handles of their own first.
        """
        slot = self._slot("KVCache.fork", slot)
        n = integer("KVCache.fork", "n", n, 0, MOST)
        return CacheCore.fork(self._core, slot, n, stream_handle("KVCache.fork", stream))

    def reorder(
        self, slots: Sequence[int], sources: Sequence[int], stream: Stream | None = None
    ) -> list[int]:
        """A beam step: beam ``i``, now in ``slots[i]``, goes on with the contents of ``sources[i]``. Nothing
        is copied.

        Args:
            slots: the slots of the beams, ``[n]``.
            sources: for each beam, one of these slots, ``[n]``.
            stream: as for :meth:`fork`.

        Returns:
            for each beam its new slot: the source itself for the first beam that goes on with it, and a fork
            for the others. Slots that no beam goes on with are freed; if there are too few free slots for the
            forks, before these are made, and even if they fail.

        Raises:
            InvalidArgument: a source that is none of the slots.
            DriverError: see above.
        """
        old = self._slots("KVCache.reorder", slots)
        new = self._slots("KVCache.reorder", sources)
        return CacheCore.reorder(self._core, old, new, stream_handle("KVCache.reorder", stream))

    def publish(self, slot: int, tokens: Sequence[int] | torch.Tensor, *, salt: str = "") -> int:
        """Puts the whole units of ``tokens``, the slot's first tokens, into the prefix index. The index keeps
        their pages past the request's end, as long as memory suffices.

        A cache that looks ahead makes no mapping call for it: the pages become copy-on-write once another
        slot shares them. Until then they can be written to. So change published tokens by :meth:`write`, or
        call :meth:`unshare` first, on any device.

        Args:
            slot: the slot with their K and V.
            tokens: ids, ``[n]``, at most as many as the slot has.
            salt: as for :meth:`alloc`.

        Returns:
            how many of the tokens are in the index.

        Raises:
            InvalidArgument: more tokens than the slot has; tokens other than those it was allocated with or
                published before; layers with windows have given pages back.
            OutOfPages: as for :meth:`fork`.
        """
        slot = self._slot("KVCache.publish", slot)
        ids = token_ids("KVCache.publish", tokens)
        return CacheCore.publish(self._core, slot, ids, text("KVCache.publish", "salt", salt))

    def unshare(self, slot: int, start: int, stop: int) -> None:
        """Gives ``slot`` pages of its own for tokens ``start`` to ``stop``, before a direct write there. What
        :meth:`step` adds is the slot's own in any case.

        Raises:
            OutOfPages: nothing was changed.
        """
        slot = self._slot("KVCache.unshare", slot)
        start = integer("KVCache.unshare", "start", start, 0, MOST)
        CacheCore.unshare(self._core, slot, start, integer("KVCache.unshare", "stop", stop, 0, MOST))

    def record_stream(self, stream: Stream | None = None) -> None:
        """Notes that work in ``stream`` uses the slots, as :meth:`step` notes the current one. Pages that the
        slots give up later are unmapped only after that work.

        Args:
            stream: a stream that lasts; the current one unless given.
        """
        CacheCore.record_stream(self._core, stream_handle("KVCache.record_stream", stream))

    # -- swapping

    def swap_out(self, slot: int | Sequence[int], *, bands: Iterable[int] | None = None) -> None:
        """Moves requests to host memory, after the work launched so far. It returns at once; their pages go
        back to the pool once they are copied. Requests that are named together and share pages share them
        again afterwards, and are copied once.

        With ``bands`` the requests stay in use, without these layers. A band has pages of its own once it is
        back, even if it shared them.

        Args:
            slot: the slot of a request, or several slots.
            bands: the bands to move; whole requests unless given.

        Raises:
            InvalidArgument: a slot is free, or a slot or band is already swapped out; whole requests whose
                bands differ.
            OutOfPages: the host has no memory for them; nothing was changed.
        """
        numbers = self._slots("KVCache.swap_out", slot)
        CacheCore.swap_out(self._core, numbers, self._bands("KVCache.swap_out", bands))

    def swap_in(self, slot: int | Sequence[int], *, bands: Iterable[int] | None = None) -> bool:
        """Gives swapped requests their pages back, at the same addresses, and starts copying, layer by layer.
        Before the work of a layer, :meth:`wait` for it. Requests that are named together come back all or
        none, and share again the pages that they shared.

        Args:
            slot: the slot of a swapped request, or several slots.
            bands: bands that were swapped out by themselves; whole requests unless given.

        Returns:
            False if memory is short: all of them stay swapped out. :meth:`fits` says so beforehand.

        Raises:
            InvalidArgument: one of them is not swapped out, or is named twice.
        """
        numbers = self._slots("KVCache.swap_in", slot)
        return CacheCore.swap_in(self._core, numbers, self._bands("KVCache.swap_in", bands))

    def wait(self, slot: int, layer: int | None = None) -> None:
        """Waits for a swap-in: until what ``layer`` reads of the request is there, or all of it. On CUDA the
        current stream waits, and the caller does not. If the request or bands of it were swapped out, it
        waits until their pages are given back.

        Args:
            slot: the slot of the request.
            layer: its number; all layers unless given.

        Raises:
            TimedOut: the copies have not ended within a minute. They go on, and can be waited for again.
        """
        if layer is not None:
            layer = self._layer("KVCache.wait", layer)
        CacheCore.wait(self._core, self._slot("KVCache.wait", slot), layer)

    # -- tensors

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V of a layer: ``[max_batch, max_len, heads, head_dim]``, or ``[max_batch, heads, max_len,
        head_dim]`` in the "HND" layout; V is None in a cache without V.

        They are plain tensors, always the same, over partly mapped memory. Tokens past a slot's length read
        as zeros or as what was written there before; where nothing is mapped, a read faults on CUDA. A write
        there faults: :func:`~vtensor.explain_faults` says why.
        """
        _core.refuse_in_forked_child("KVCache")
        if self._core.closed:
            raise Closed("[KVCache] the cache is closed: make a new one")
        try:
            return self._layers[layer]
        except IndexError:  # it ends a loop over the layers
            raise IndexError(f"[KVCache] layer {layer}: the cache has layers 0 to {len(self) - 1}") from None

    @property
    def num_layers(self) -> int:
        """Layers, as ``len(cache)``."""
        return len(self)

    def __len__(self) -> int:
        """Layers."""
        return len(self._layout.layers)

    @property
    def pool(self) -> Pool:
        """The pool of the pages."""
        return self._pool

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._core.closed

    def pages(self, slot: int) -> list[_core.PageRecord]:
        """The pages of a slot, row after row."""
        slot = self._slot("KVCache.pages", slot)
        return [
            record
            for row_group in range(len(self._layout.row_groups))
            for record in CacheCore.pages(self._core, slot, row_group)
        ]

    def stats(self) -> KVCacheStats:
        """Counts of this moment."""
        return count(self._core, self._layout, self._pool)

    def _fall_asleep(self, sleep: _core.FallAsleep, discard: bool) -> None:
        CacheCore.fall_asleep(self._core, sleep, discard)

    def _wake(self) -> None:
        """Does nothing: the core knows whether the cache sleeps."""

    def close(self, stream: Stream | None = None) -> None:
        """Frees every slot and the index. Addresses go with the last view of the layers.

        Args:
            stream: the stream of the work that uses the cache; the current one unless given.
        """
        CacheCore.close(self._core, stream_handle("KVCache.close", stream))
        self._layers, self._bytes = [], []

    def __repr__(self) -> str:
        if self.closed:
            state = "closed"
        elif _core.in_forked_child():
            state = "of another process"
        else:
            state = f"{self._core.slots_used} of {self.max_batch} slots in use"
        return (
            f"<vtensor.KVCache {len(self)} layers, max_len {self.max_len}, {self.dtype}, "
            f"{self._pool.device}, {state}>"
        )

    # -- inside

    def _await_arrivals(self, seconds: float) -> bool:
        return CacheCore.await_arrivals(self._core, seconds)

    def _ask(self, operation: str, call: Callable[..., bool], lengths: Any, *others: object) -> bool:
        # No isinstance check of torch's metaclass for what engines pass: it costs as much as a whole step.
        if type(lengths) is not list:
            lengths = items(operation, "lengths", lengths, self._lengths_wanted)
        try:
            return call(self._core, lengths, *others)
        except TypeError:
            raise InvalidArgument(
                f"[{operation}] lengths is {lengths!r}: give {self._lengths_wanted}"
            ) from None

    @property
    def _lengths_wanted(self) -> str:
        return f"{self.max_batch} integers, one for each slot, as cache.lengths has them"

    def _layer(self, operation: str, layer: int) -> int:
        if self._core.closed:
            raise Closed(f"[{operation}] the cache is closed: make a new one")
        number = integer(operation, "layer", layer, 0, MOST)
        if number >= len(self):
            raise InvalidArgument(f"[{operation}] layer {number}: the cache has layers 0 to {len(self) - 1}")
        return number

    def _slot(self, operation: str, slot: int) -> int:
        try:
            number = index(slot)
        except TypeError:
            raise InvalidArgument(f"[{operation}] slot is {slot!r}: give what alloc() returned") from None
        if not 0 <= number < self.max_batch:
            raise InvalidArgument(
                f"[{operation}] slot {number}: the cache has slots 0 to {self.max_batch - 1}"
            )
        return number

    def _slots(self, operation: str, slots: int | Sequence[int] | torch.Tensor) -> list[int]:
        given = one_or_several(operation, "slots", slots, "slots that alloc() returned")
        return [self._slot(operation, one) for one in given]

    def _bands(self, operation: str, bands: Iterable[int] | None) -> list[int]:
        """Their numbers; none for all of them."""
        if bands is None:
            return []
        given = items(operation, "bands", bands, "their numbers, such as [0]")
        numbers = [integer(operation, "a band", band, 0, MOST) for band in given]
        if not numbers or max(numbers) >= len(self._layout.bands):
            raise InvalidArgument(
                f"[{operation}] bands is {numbers}: name some of 0 to {len(self._layout.bands) - 1}"
            )
        return numbers

    _made_at: str
    _last_places: tuple[Runs, tuple[torch.Tensor, torch.Tensor]] | None = None

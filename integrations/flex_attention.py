"""FlexAttention over a cache that grows: few compiles, for growing views and for full extents.

``flex_attention(q, k, v)`` with VTensors passes views of the exact length. It compiles for the first length,
and at the second for all others. With ``FullExtent(k)``, ``FullExtent(v)`` and a :class:`CacheMask`, only the
number of queries changes a shape: the mask's counts change in place, and rows have lengths of their own.

FlexAttention reads the tiles of 128 rows that its mask lists. It reads them whole, and multiplies what the
mask hides by zero. So whole tiles are mapped, and a VTensor's hold zeros after the last position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from vtensor import InvalidArgument
from vtensor.attention import views

from ._kv import KV, covered, leased, tensor_of, traced_views
from .full_extent import FullExtent

__all__ = ["CacheMask", "flex_attention"]

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_OPERATION = "flex_attention"
_TILE = 128
_POSITIONS = 2  # of [B, H, S, D]


def flex_attention(
    query: torch.Tensor,
    key: KV,
    value: KV,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | CacheMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention``, compiled, over VTensors and FullExtents.

    Args:
        query: ``[B, Hq, Sq, D]``.
        key, value: ``[B, Hkv, Sk, D]``: plain tensors, VTensors that grow along dimension 2, FullExtents of
            such VTensors, or a layer of a KVCache. VTensors that grow along dimension 1 are transposed.
            FullExtents and layers need a ``block_mask``. With a CacheMask over a layer, the lengths must not
            exceed those of the slots; a BlockMask of your own is not checked for that.
        score_mod, block_mask, scale, enable_gqa, options: as for torch's function. ``block_mask`` may also be
            a :class:`CacheMask`. In torch's functions, positions of queries count from the beginning of
            ``query``. CacheMask translates them to positions in the cache.

    Returns:
        ``[B, Hq, Sq, Dv]``, and more if ``options`` ask for it.

    Raises:
        InvalidArgument: if a CacheMask is for another number of rows; if its lengths exceed the cache; if a
            KVCache has smaller tiles than FlexAttention reads; if one of two VTensors is shorter; or if a
            FullExtent comes alone or without a mask. Other errors are torch's.
        CapacityExceeded, OutOfPages, DriverError: as for ``FullExtent.cover``.
    """
    fixed = isinstance(key, FullExtent)
    if fixed != isinstance(value, FullExtent) or (fixed and block_mask is None):
        raise InvalidArgument(
            f"[{_OPERATION}] a FullExtent alone: give both key and value, and a mask that says what is "
            "there, such as a CacheMask"
        )
    take = traced_views if is_dynamo_compiling() else views
    given = tensor_of(key), tensor_of(value)
    if isinstance(block_mask, CacheMask):
        if block_mask.lengths.shape[0] != query.shape[0]:
            raise InvalidArgument(
                f"[{_OPERATION}] the mask has {block_mask.lengths.shape[0]} rows, query {query.shape[0]}: "
                "make one for these"
            )
        keys, values, cache = take(_OPERATION, *given, True, block_mask._checked_lengths)
        holds = keys.shape[_POSITIONS]
        whole = fixed or (cache is not None and block_mask.capacity == holds)
        block_mask = block_mask.block_mask if whole else block_mask.growing(holds)
    else:  # torch's masks list the positions to read
        keys, values, cache = take(_OPERATION, *given, True, None, 0, None, None if block_mask is None else 0)
    if isinstance(key, FullExtent) and isinstance(value, FullExtent):
        keys, values = (covered(t, _POSITIONS) for t in (key, value))
    if query.is_cpu and not is_compiling():  # in torch.export, mark_static takes no list
        query, keys, values = (_of_any_length(t[...]) for t in (query, keys, values))
    with leased(_OPERATION, query, *given, cache=cache, tile=_TILE):
        return _compiled()(query, keys, values, score_mod, block_mask, scale, enable_gqa, **options)


@cache
def _compiled() -> Callable[..., Any]:
    # Without fullgraph, eager FlexAttention would read the whole extent past dynamo's recompile limit.
    return torch.compile(torch_flex.flex_attention, fullgraph=True)


def _of_any_length(t: torch.Tensor) -> torch.Tensor:
    """Has the second length compile for all lengths, and each other size by itself. For CPUs: if more sizes
    vary, the C++ that torch 2.13 generates does not compile."""
    torch._dynamo.mark_static(t, [d for d in range(t.ndim) if d != _POSITIONS])
    return t


class CacheMask:
    """The positions of a cache to which the queries of one step attend. Each step changes it in place.

    The queries are the last ``queries`` positions of each row. They attend to none of the positions past
    their row's length. One mask serves all layers.

    Args:
        mask_mod: as for ``create_block_mask``, with absolute positions: ``mask_mod(b, h, q, kv)`` returns
            whether the query at position ``q`` attends to the key at position ``kv``. None means causal.
        batch: rows.
        queries: query positions of a step, the same for all rows.
        capacity: positions of the full extent.
        device: the device of the queries.

    Attributes:
        lengths: int32 ``[batch]`` on ``device``.
        known: the lengths if the host knows them, else None.
        longest: the largest of the known lengths, or None.
        block_mask: the BlockMask for FullExtents. It is one object for the mask's life, and ``update``
            changes its counts. Pass it to compiled code of your own. Pass the CacheMask to this module's
            ``flex_attention``.

    Raises:
        InvalidArgument: if a size is not positive, or ``queries`` exceeds ``capacity``.
    """

    def __init__(
        self,
        mask_mod: MaskMod | None,
        batch: int,
        queries: int,
        capacity: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch < 1 or not 1 <= queries <= capacity:
            raise InvalidArgument(
                f"[CacheMask] batch={batch}, queries={queries}, capacity={capacity}: each must be at least "
                "1, and queries fit the capacity"
            )
        self.queries = queries
        self.capacity = capacity
        self._mod = mask_mod
        with torch.inference_mode(False):  # updates outside that mode could not change its tensors
            self.lengths = torch.full((batch,), queries, dtype=torch.int32, device=device)
            self._starts = torch.zeros_like(self.lengths)
            self._first = torch.zeros_like(self.lengths)  # query; in a mod an int is one more size
            self._numbers = torch.arange(-(-capacity // _TILE), dtype=torch.int32, device=device)
            self._counts = torch.zeros(batch, 1, -(-queries // _TILE), dtype=torch.int32, device=device)
            self._indices = self._numbers.expand(*self._counts.shape, -1).contiguous()
            # All tiles are listed as partial, none as full. The CPU's code needs the empty list all the same.
            self._no_counts, self._no_indices = map(torch.zeros_like, (self._counts, self._indices))
            for t in [t for t in vars(self).values() if torch.is_tensor(t) and t.is_cpu]:
                _of_any_length(t)
            self.block_mask = self._block_mask(capacity)
        self.update(queries)

    def update(
        self, lengths: int | Sequence[int] | torch.Tensor, starts: int | Sequence[int] | torch.Tensor = 0
    ) -> CacheMask:
        """Sets the length of each row, including this step's queries. Returns the mask.

        Args:
            lengths: one for each row, or one for all. A tensor on the device is read there, without a wait.
            starts: no query attends to positions before these, as in a sliding window. Whole tiles of such
                positions are not read. One for each row or one for all; at most the row's length.

        Raises:
            InvalidArgument: if the host knows the numbers, and a length is below ``queries`` or above the
                capacity, or a start is negative or above its row's length. Nothing was changed.
        """
        new, begin = self._per_row("lengths", lengths), self._per_row("starts", starts)
        known = new.tolist() if new.is_cpu else None
        if known is not None and (min(known) < self.queries or max(known) > self.capacity):
            raise InvalidArgument(
                f"[CacheMask.update] lengths from {min(known)} to {max(known)}, with {self.queries} queries "
                f"a step and a capacity of {self.capacity}: give lengths between them, this step's queries "
                "included"
            )
        if begin.is_cpu:
            ends = [self.capacity] * len(begin) if known is None else known
            for row, (start, end) in enumerate(zip(begin.tolist(), ends, strict=True)):
                if not 0 <= start <= end:
                    raise InvalidArgument(
                        f"[CacheMask.update] row {row} starts at {start} and ends at {end}: give starts from "
                        "0 to the row's length"
                    )
        self.known: list[int] | None = known
        self._checked_lengths = new.clone() if new.is_cpu else self.lengths  # on the host if it knows them
        self.longest: int | None = None if known is None else max(known)
        self.lengths.copy_(new)
        self._starts.copy_(begin)
        self._first.copy_(self.lengths - self.queries)
        # Clamped, because numbers that only the device knows are not checked.
        tiles = len(self._numbers)
        first = self._starts.clamp(min=0) // _TILE
        stop = ((self.lengths + _TILE - 1) // _TILE).clamp(max=tiles)
        self._counts.copy_((stop - first).clamp(min=0)[:, None, None])
        self._indices.copy_((first[:, None] + self._numbers).clamp(max=tiles - 1)[:, None, None])
        return self

    def _per_row(self, name: str, given: int | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """``given`` as int32 ``[batch]``, on its own device."""
        if not isinstance(given, torch.Tensor):
            given = torch.tensor(given, device="cpu")
        t = given.to(torch.int32)
        if given.is_floating_point() or (given.is_cpu and not torch.equal(t, given)):
            raise InvalidArgument(f"[CacheMask.update] {name} are {given.tolist()}: give integers of 32 bits")
        if t.ndim and t.shape != self.lengths.shape:
            raise InvalidArgument(
                f"[CacheMask.update] {list(t.shape)} {name} for {len(self.lengths)} rows: give one for each"
            )
        return t.expand_as(self.lengths)

    def growing(self, length: int) -> BlockMask:
        """The mask of this step for views of exactly ``length`` positions, the length of the longest row.

        Raises:
            InvalidArgument: if a row is longer, as far as the host knows. Its tiles would lie past the end.
        """
        if not is_dynamo_compiling() and self.longest is not None and self.longest > length:
            raise InvalidArgument(
                f"[CacheMask.growing] a row has {self.longest} positions, K {length}: append first"
            )
        return self._block_mask(length)

    def score_mod(self, score_mod: ScoreMod) -> ScoreMod:
        """Translates ``score_mod(score, b, h, q, kv)`` over absolute positions for this mask's queries."""
        first = self._first
        return lambda score, b, h, q, kv: score_mod(score, b, h, q + first[b], kv)

    def _block_mask(self, length: int) -> BlockMask:
        lengths, starts, first, mod = self.lengths, self._starts, self._first, self._mod

        def at_positions(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            position = q + first[b]
            seen = kv <= position if mod is None else mod(b, h, position, kv)
            return seen & (kv < lengths[b]) & (kv >= starts[b])

        return BlockMask.from_kv_blocks(
            self._counts,
            self._indices,  # of all tiles, because another width would be compiled again
            self._no_counts,
            self._no_indices,
            BLOCK_SIZE=_TILE,
            mask_mod=at_positions,
            seq_lengths=(self.queries, length),
            compute_q_blocks=False,
        )

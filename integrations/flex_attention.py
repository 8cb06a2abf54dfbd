"""FlexAttention over a cache that grows: few compiles for growing views, one for a full extent.

Growing views: ``flex_attention(q, k, v)`` with VTensors hands exact views to one compiled function, which
compiles for the first length and, at the second, for all others. The full extent: with ``FullExtent(k)``,
``FullExtent(v)`` and the ``block_mask`` of a :class:`CacheMask`, no shape ever changes; the mask's counts are
mutated in place, rows have lengths of their own, and one compile lasts for the life of the cache.

FlexAttention reads only the parts of 128 rows that its mask lists, but these whole, and multiplies what the
mask hides by zero: so they are mapped, and what lies behind the last position in them is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from vtensor import InvalidArgument
from vtensor.attention import AttentionSpec

from ._kv import KV, TracedSpec, full_tensor, leased, owner_of
from .full_extent import FullExtent

__all__ = ["CacheMask", "flex_attention"]

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_OPERATION = "flex_attention"
_TILE = 128
_POSITIONS = 2  # of [B, H, S, D]
_GROUPED, _ALIKE = (
    AttentionSpec(
        _OPERATION,
        "query",
        "key",
        "value",
        heads_first=True,
        grouped=grouped,
        lengths="a length of the mask",
        tile=_TILE,
        tiles_to_the_end=True,
    )
    for grouped in (True, False)
)
_TRACED_GROUPED, _TRACED_ALIKE = TracedSpec("flex, grouped", _GROUPED), TracedSpec("flex", _ALIKE)


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
    """As ``torch.nn.attention.flex_attention.flex_attention``, compiled, over VTensors and FullExtents.

    Args:
        query: ``[B, Hq, Sq, D]``.
        key, value: ``[B, Hkv, Sk, D]``: plain tensors, or VTensors that grow along dimension 2; those that
            grow along dimension 1 are transposed. Or FullExtents of such, or a layer of a KVCache, and then
            ``block_mask`` is needed: of a layer, a row sees what its slot has. (A BlockMask of your own is
            taken at its word.)
        score_mod, block_mask, scale, enable_gqa, options: as torch's function takes them; ``block_mask`` may
            be a :class:`CacheMask` too. Positions count from the tensors' beginnings, those of queries as
            well: CacheMask makes masks and score mods know where in the cache the queries are.

    Returns:
        ``[B, Hq, Sq, Dv]``, and more where ``options`` ask for it.

    Raises:
        InvalidArgument: shapes, dtypes or devices that do not fit, a mask of another length or for other
            rows or heads, lengths that the cache has not, a KVCache of smaller tiles than are read, or a
            FullExtent without a mask.
        CapacityExceeded, OutOfPages, DriverError: as for ``FullExtent.cover``.
    """
    fixed = isinstance(key, FullExtent)
    if fixed != isinstance(value, FullExtent):
        raise InvalidArgument(f"[{_OPERATION}] one of key and value is a FullExtent: give both, or neither")
    owners = owner_of(key), owner_of(value)
    given = query, key if owners[0] is None else owners[0], value if owners[1] is None else owners[1]
    spec: AttentionSpec | TracedSpec = _GROUPED if enable_gqa else _ALIKE
    if is_dynamo_compiling():
        spec = _TRACED_GROUPED if enable_gqa else _TRACED_ALIKE
    if isinstance(block_mask, CacheMask):
        keys, values, cache = spec.take(*given, block_mask._checked_lengths)
        holds = keys.shape[_POSITIONS]
        whole = fixed or (cache is not None and block_mask.capacity == holds)
        block_mask = block_mask.block_mask if whole else block_mask.growing(holds)
    else:
        keys, values, cache = spec.take(*given) if block_mask is None else spec.take_listed(*given)
    if block_mask is None and fixed:
        raise InvalidArgument(
            f"[{_OPERATION}] a FullExtent without block_mask, which says what is there: make a CacheMask"
        )
    if isinstance(key, FullExtent) and isinstance(value, FullExtent):
        keys, values = (full_tensor(t.cover(t.owner.length), _POSITIONS) for t in (key, value))
    sizes = query.shape[_POSITIONS], keys.shape[_POSITIONS]
    if block_mask is not None and block_mask.seq_lengths != sizes:
        raise InvalidArgument(
            f"[{_OPERATION}] block_mask is for {block_mask.seq_lengths[0]} queries and "
            f"{block_mask.seq_lengths[1]} keys, there are {sizes[0]} and {sizes[1]}: make it after appending"
        )
    if block_mask is not None and any(
        n not in (1, of) for n, of in zip(block_mask.kv_num_blocks.shape[:2], query.shape[:2], strict=True)
    ):
        raise InvalidArgument(
            f"[{_OPERATION}] block_mask is for {list(block_mask.kv_num_blocks.shape[:2])} rows and heads, "
            f"query has {list(query.shape[:2])}: make it for these, or for 1"
        )
    compiled = _compiled(dynamic=False if fixed else None)
    with leased(query, *owners, cache=cache):
        return compiled(query, keys, values, score_mod, block_mask, scale, enable_gqa, **options)


@cache
def _compiled(dynamic: bool | None) -> Callable[..., Any]:
    # None: the second length compiles for all lengths and leaves the other sizes fixed; with all of them free
    # the CPU's code generator of torch 2.13 writes C++ that does not compile. fullgraph: past dynamo's
    # recompile limit it raises, where eager FlexAttention would read all of the extent.
    return torch.compile(torch_flex.flex_attention, dynamic=dynamic, fullgraph=True)


class CacheMask:
    """Which positions of a cache the queries of one step see; changed in place from step to step.

    The queries are the last ``queries`` positions of each row, and a row shows its own ``lengths`` positions
    only. One mask serves all layers.

    Args:
        mask_mod: of absolute positions, as for ``create_block_mask``: ``mask_mod(b, h, q, kv)`` says whether
            the query at position ``q`` sees the key at ``kv``. None: causal.
        batch: rows.
        queries: query positions of a step, the same for all rows.
        capacity: positions of the full extent.
        device: where the queries are.

    Attributes:
        lengths: int32 ``[batch]`` on ``device``.
        known: the lengths where the host knows them, else None.
        longest: the largest of these, or None.
        block_mask: for FullExtents; one object for the mask's life, whose counts ``update`` changes. Code of
            your own that is compiled takes it; ``flex_attention`` here takes the CacheMask.

    Raises:
        InvalidArgument: sizes that are not positive, or more queries than the capacity.
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
                "1, and "
                "queries fit the capacity"
            )
        self.queries = queries
        self.capacity = capacity
        self.lengths = torch.full((batch,), queries, dtype=torch.int32, device=device)
        self._mod = mask_mod
        self._numbers = torch.arange(-(-capacity // _TILE), dtype=torch.int32, device=device)
        per_row = (batch, 1, -(-queries // _TILE))
        self._counts = torch.zeros(per_row, dtype=torch.int32, device=device)
        self._indices = self._numbers.expand(*per_row, -1).contiguous()
        # Listed as parted by the mask, none as whole; given all the same, because the CPU's code names them.
        self._no_counts, self._no_indices = torch.zeros_like(self._counts), torch.zeros_like(self._indices)
        self.block_mask = self._block_mask(capacity)
        self.update(queries)

    def update(
        self, lengths: int | Sequence[int] | torch.Tensor, starts: int | Sequence[int] | torch.Tensor = 0
    ) -> CacheMask:
        """Sets how many positions each row has, this step's queries included; returns the mask.

        Args:
            lengths: one for each row, or one for all. A tensor on the device is read there, without a wait.
            starts: positions before these are seen by no query (of a sliding window, say): whole tiles of
                them are not read. As lengths, at most those.

        Raises:
            InvalidArgument: of numbers the host knows, a length that is below ``queries`` or above the
                capacity, or a start that is negative or above its row's length. Nothing was changed.
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
        # Clamped, because what a device alone knows nobody has checked.
        tiles = len(self._numbers)
        first = begin.to(self.lengths.device).clamp(min=0) // _TILE
        stop = ((self.lengths + _TILE - 1) // _TILE).clamp(max=tiles)
        self._counts.copy_((stop - first).clamp(min=0)[:, None, None])
        self._indices.copy_((first[:, None] + self._numbers).clamp(max=tiles - 1)[:, None, None])
        return self

    def _per_row(self, name: str, given: int | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """``given`` as int32 ``[batch]``, where it is."""
        t = torch.as_tensor(given, dtype=torch.int32)
        if t.ndim and t.shape != self.lengths.shape:
            raise InvalidArgument(
                f"[CacheMask.update] {list(t.shape)} {name} for {len(self.lengths)} rows: give one for each"
            )
        return t.expand_as(self.lengths)

    def growing(self, length: int) -> BlockMask:
        """The mask of this step for views of exactly ``length`` positions, which must be the longest
        row's."""
        return self._block_mask(length)

    def score_mod(self, score_mod: ScoreMod) -> ScoreMod:
        """``score_mod(score, b, h, q, kv)`` of absolute positions, for this mask's queries."""
        lengths, queries = self.lengths, self.queries

        def at_positions(
            score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            return score_mod(score, b, h, q + lengths[b] - queries, kv)

        return at_positions

    def _block_mask(self, length: int) -> BlockMask:
        lengths, queries, mod = self.lengths, self.queries, self._mod

        def at_positions(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            position = q + lengths[b] - queries
            seen = kv <= position if mod is None else mod(b, h, position, kv)
            return seen & (kv < lengths[b])

        return BlockMask.from_kv_blocks(
            self._counts,
            self._indices,  # all of them: a width that grew would be one more shape to compile
            self._no_counts,
            self._no_indices,
            BLOCK_SIZE=_TILE,
            mask_mod=at_positions,
            seq_lengths=(self.queries, length),
            compute_q_blocks=False,
        )

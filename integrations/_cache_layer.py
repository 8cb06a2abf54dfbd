"""Layers of a KVCache as K and V: a kernel may touch what ``KVCache.step`` has made ready, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vtensor import InvalidArgument, KVCache
from vtensor.kv_rows import CacheRows, rows_of


def cache_of(
    operation: str,
    key: torch.Tensor,
    value: torch.Tensor,
    positions_dim: int,
    needed: Sequence[int] | None,
    rows: Sequence[int] | None = None,
) -> KVCache | None:
    """The KVCache whose layer ``key`` and ``value`` are, or views of it; None where they are other tensors.

    A compiled function asks nothing: what it is given may be of any cache.

    Args:
        positions_dim: of key and value; with 0, they are one row.
        needed: for each sequence the positions that the kernel reads and writes; None where only the device
            knows, and nothing can be checked.
        rows: of key and value, for each sequence; the first ones unless given.

    Raises:
        InvalidArgument: a slot has fewer tokens.
        Closed: the cache is closed.
    """
    if torch.compiler.is_compiling():
        return None
    of_key, of_value = rows_of(key, positions_dim), rows_of(value, positions_dim)
    if needed is not None:
        if of_key is not None:
            _check(operation, of_key, needed, rows)
        if of_value is not None and of_value != of_key:  # they show the same tokens, as a rule
            _check(operation, of_value, needed, rows)
    found = of_key or of_value
    return None if found is None else found.cache


def check_tile(operation: str, query: torch.Tensor, cache: KVCache | None, rows: int) -> None:
    """Refuses a cache that maps less behind a length than a kernel of tiles of ``rows`` reads with it.

    Raises:
        InvalidArgument: naming both.
    """
    if cache is not None and cache.tile < min(rows, cache.max_len) and not query.is_cpu:
        raise InvalidArgument(
            f"[{operation}] {rows} rows are read at once, the cache maps with tile={cache.tile}: make it "
            f"with tile={rows} or more"
        )


def _check(operation: str, of: CacheRows, needed: Sequence[int], rows: Sequence[int] | None) -> None:
    slots = of.slots if rows is None else [of.slots[row] for row in rows]
    has = of.cache.lengths
    for slot, positions in zip(slots, needed, strict=False):  # a cache may have more rows than sequences
        tokens = of.tokens(positions)
        if tokens > has[slot]:
            raise InvalidArgument(
                f"[{operation}] {tokens} tokens of slot {slot} are to be read or written, step() has made "
                f"{has[slot]} ready: call step(lengths) with those that are appended first, or pass fewer"
            )

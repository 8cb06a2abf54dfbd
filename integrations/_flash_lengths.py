"""The lengths that FlashAttention is told, as far as the host knows them: its kernels check none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vtensor import InvalidArgument


def told(operation: str, name: str, q: torch.Tensor, lengths: Any) -> list[int] | None:
    """One number for each sequence of ``q``; None where only the device knows them.

    Args:
        name: of the argument.
        lengths: an int for all, or int32 ``[sequences]``.

    Raises:
        InvalidArgument: of another type, dtype or number.
    """
    batch = q.shape[0] if q.ndim == 4 else None  # packed queries do not say how many sequences they are
    if isinstance(lengths, int):
        return [lengths] * (1 if batch is None else batch)
    if not isinstance(lengths, torch.Tensor):
        raise InvalidArgument(
            f"[{operation}] {name} is a {type(lengths).__name__}: give an int or an int32 tensor"
        )
    if lengths.dtype != torch.int32 or lengths.ndim != 1 or batch not in (None, lengths.shape[0]):
        raise InvalidArgument(
            f"[{operation}] {name} is {list(lengths.shape)} of {lengths.dtype}, q is {list(q.shape)}: give "
            "one int32 for each sequence"
        )
    return numbers(lengths)


def numbers(t: torch.Tensor | None) -> list[int] | None:
    """What is in ``t`` where the host can look without a wait."""
    if t is None or not t.is_cpu or torch.compiler.is_compiling():
        return None
    found: list[int] = t.tolist()
    return found


def check_within(operation: str, name: str, lengths: Sequence[int], holds: int, added: int = 0) -> None:
    """Refuses lengths that a cache of ``holds`` positions does not have, and those to which ``added`` more
    cannot be appended in it.

    Raises:
        InvalidArgument: see above.
    """
    if not lengths:
        return
    low, high = min(lengths), max(lengths)
    if low < 0 or high > holds:
        raise InvalidArgument(
            f"[{operation}] {name} is {high if high > holds else low}, the cache holds {holds} positions: "
            "append or extend first"
        )
    if high + added > holds:
        raise InvalidArgument(
            f"[{operation}] {name} is {high} and {added} more are to be appended, the cache holds {holds} "
            "positions: make it longer, or give a VTensor, which grows"
        )


def check_packed(operation: str, name: str, starts: torch.Tensor | None, tokens: int) -> list[int] | None:
    """The numbers of ``cu_seqlens_q`` or ``_k`` where the host knows them, once they are within ``tokens``.

    Raises:
        InvalidArgument: they are not.
    """
    found = numbers(starts)
    if found and (min(found) < 0 or max(found) > tokens):
        past = min(found) if min(found) < 0 else max(found)
        raise InvalidArgument(
            f"[{operation}] {name} goes to {past}, there are {tokens} tokens: give where each sequence "
            "begins and the last ends"
        )
    return found


def rows_read(operation: str, q: torch.Tensor, rows: int, index: torch.Tensor | None) -> Sequence[int] | None:
    """The cache's rows that the sequences of ``q`` ``[B, Sq, Hq, D]`` read, by ``cache_batch_idx``; None
    where only the device knows, or ``q`` is packed.

    Raises:
        InvalidArgument: there are none such.
    """
    if q.ndim != 4:
        return None
    batch = q.shape[0]
    if index is None:
        if batch > rows:
            raise InvalidArgument(
                f"[{operation}] q has {batch} sequences, the cache {rows} rows: give a row for each, or "
                "cache_batch_idx"
            )
        return range(batch)
    if index.shape != (batch,):
        raise InvalidArgument(
            f"[{operation}] cache_batch_idx is {list(index.shape)}, q has {batch} sequences: give one row "
            "for each"
        )
    found = numbers(index)
    if found and not 0 <= min(found) <= max(found) < rows:
        raise InvalidArgument(
            f"[{operation}] cache_batch_idx is {found}, the cache has rows 0 to {rows - 1}: name those"
        )
    return found

"""The lengths that FlashAttention is told, as far as the host knows them: its kernels check none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
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


def check_packed(operation: str, name: str, starts: Any, tokens: int) -> list[int] | None:
    """The numbers of ``cu_seqlens_q`` or ``_k`` where the host knows them, once they are in order and within
    ``tokens``.

    Raises:
        InvalidArgument: they are not, or are of another type, dtype or shape.
    """
    if starts is None:
        return None
    if not isinstance(starts, torch.Tensor) or starts.dtype != torch.int32 or starts.ndim != 1:
        raise InvalidArgument(f"[{operation}] {name} is {_kind(starts)}: give int32 [sequences + 1]")
    found = numbers(starts)
    if found and (min(found) < 0 or max(found) > tokens):
        past = min(found) if min(found) < 0 else max(found)
        raise InvalidArgument(
            f"[{operation}] {name} goes to {past}, there are {tokens} tokens: give where each sequence "
            "begins and the last ends"
        )
    if found and (back := next((pair for pair in pairwise(found) if pair[1] < pair[0]), None)):
        raise InvalidArgument(
            f"[{operation}] {name} goes from {back[0]} back to {back[1]}: give where each sequence begins "
            "and the last ends, in their order"
        )
    return found


def read_packed(
    operation: str, q: torch.Tensor, keys: torch.Tensor, given: Mapping[str, Any]
) -> list[int] | None:
    """Of all packed tokens ``keys``, how many are read: ``[n]``; None where only the device knows.

    Raises:
        InvalidArgument: as :func:`check_packed`, of Q and K, or these are of other numbers of sequences.
    """
    starts = given.get("cu_seqlens_k")
    found = check_packed(operation, "cu_seqlens_k", starts, keys.shape[0])
    _check_queries(operation, q, None if starts is None else len(starts) - 1, given)
    return found[-1:] if found else None


def read_in_rows(
    operation: str, q: torch.Tensor, keys: torch.Tensor, given: Mapping[str, Any]
) -> list[int] | None:
    """Of each row ``keys`` ``[B, S, H, D]``, how many positions are read; None where only the device knows.

    Raises:
        InvalidArgument: as :func:`check_packed`, of Q, or ``seqused_k`` goes past the end.
    """
    _check_queries(operation, q, keys.shape[0], given)
    holds, used = keys.shape[1], given.get("seqused_k")
    if used is None:
        return [holds] * keys.shape[0]
    lengths = told(operation, "seqused_k", q, used)
    if lengths is not None:
        check_within(operation, "seqused_k", lengths, holds)
    return lengths


def _check_queries(operation: str, q: torch.Tensor, sequences: int | None, given: Mapping[str, Any]) -> None:
    starts = given.get("cu_seqlens_q")
    check_packed(operation, "cu_seqlens_q", starts, q.shape[0])
    if starts is not None and sequences not in (None, len(starts) - 1):
        raise InvalidArgument(
            f"[{operation}] cu_seqlens_q is of {len(starts) - 1} sequences, there is K of {sequences}: give "
            "as many of both"
        )


def check_leftpad(operation: str, q: torch.Tensor, leftpad: Any, lengths: Any, holds: int) -> None:
    """Refuses a ``cache_leftpad`` that is not one int32 for each sequence, or is past its end: ``lengths``,
    or where those are None, or only the device knows them, the ``holds`` positions of the cache.

    Raises:
        InvalidArgument: see above.
    """
    batch = q.shape[0] if q.ndim == 4 else None
    if (
        not isinstance(leftpad, torch.Tensor)
        or leftpad.dtype != torch.int32
        or leftpad.ndim != 1
        or batch not in (None, leftpad.shape[0])
    ):
        raise InvalidArgument(
            f"[{operation}] cache_leftpad is {_kind(leftpad)}, q is {list(q.shape)}: give one int32 for each "
            "sequence, in a tensor"
        )
    pads = numbers(leftpad)
    if pads is None:
        return
    known = None if lengths is None else told(operation, "cache_seqlens", q, lengths)
    ends = [holds] * len(pads) if known is None else known * len(pads) if len(known) == 1 else known
    for pad, end in zip(pads, ends, strict=False):
        if not 0 <= pad <= end:
            raise InvalidArgument(
                f"[{operation}] cache_leftpad is {pad} of a sequence of {end} positions: give how many of "
                "them are padding"
            )


def _kind(given: Any) -> str:
    return (
        f"{list(given.shape)} of {given.dtype}"
        if isinstance(given, torch.Tensor)
        else f"a {type(given).__name__}"
    )


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

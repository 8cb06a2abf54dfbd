"""What the attention shims have in common: plain views of K and V, what all kernels demand of them,
leases."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import is_compiling

import vtensor
from vtensor import InvalidArgument, KVCache, VTensor
from vtensor.demands import Demands, suit

from .full_extent import FullExtent

KV = torch.Tensor | FullExtent
_GROUPED, _ALIKE = Demands(4, 1), Demands(4, 1, grouped=False)
_NOTHING: AbstractContextManager[None] = nullcontext()


def owner_of(t: KV) -> VTensor | None:
    """The VTensor that ``t`` is, or is the full extent of; None for a plain tensor."""
    if isinstance(t, VTensor):
        owner: VTensor = t  # type: ignore[assignment]  # torch's metaclass keeps mypy from narrowing
        return owner
    return t.owner if isinstance(t, FullExtent) else None


def leased(
    query: torch.Tensor, *owners: VTensor | None, cache: KVCache | None = None
) -> AbstractContextManager[Any]:
    """``vtensor.lease`` over those of ``owners`` that there are, around a launch with ``query``. A cache is
    told of the stream instead: what its slots give up later waits for it.

    None on a CPU: the kernel is done when it returns, and what it was given holds its pages until then.
    """
    if query.is_cpu:
        return _NOTHING
    if cache is not None:
        cache.record_stream()
    found = [owner for owner in owners if owner is not None]
    return vtensor.lease(*found) if found else _NOTHING


def plain(t: KV, owner: VTensor | None, positions_dim: int) -> torch.Tensor:
    """A plain tensor of what ``t`` holds, whose ``owner_of`` is ``owner``, with positions along
    ``positions_dim``.

    A VTensor says by ``grow_dim`` which of dimensions 1 and 2 its positions are, and is transposed where the
    kernel wants them in the other. A plain tensor is taken as it is, and so is its layout.
    """
    if owner is None:
        assert isinstance(t, torch.Tensor)
        return t
    return as_laid_out(owner.detach(), owner, positions_dim)


def plain_views(key: KV, value: KV, positions_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`plain` gives for both."""
    return plain(key, owner_of(key), positions_dim), plain(value, owner_of(value), positions_dim)


def plain_heads_first(
    query: torch.Tensor, key: KV, value: KV, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, KVCache | None] | None:
    """Of ``[B, H, S, D]``, plain K and V and the cache whose layer they are, where all is known at a glance
    to suit, and all positions may be read."""
    return None if is_compiling() else (_GROUPED if enable_gqa else _ALIKE).plain(query, key, value)


def as_laid_out(view: torch.Tensor, owner: VTensor, positions_dim: int) -> torch.Tensor:
    """``view`` of ``owner``, transposed where its positions are not along ``positions_dim``."""
    grow_dim = owner.grow_dim
    if grow_dim != positions_dim and owner.ndim == 4 and grow_dim in (1, 2):
        return view.transpose(1, 2)
    return view


def check_pair(
    operation: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads_dim: int
) -> None:
    """Refuses what no kernel takes: K and V of other devices, dtypes, lengths or heads.

    Raises:
        InvalidArgument: naming both sides.
    """
    if not query.device == key.device == value.device:
        raise InvalidArgument(
            f"[{operation}] query is on {query.device}, key on {key.device}, value on {value.device}: "
            "move them to one device"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidArgument(
            f"[{operation}] query is {query.dtype}, key {key.dtype}, value {value.dtype}: use one dtype"
        )
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    if of_key != of_value and of_key[:-1] != of_value[:-1]:
        raise InvalidArgument(f"[{operation}] key is {list(of_key)}, value {list(of_value)}: append to both")
    if of_key[-1] != of_query[-1]:
        raise InvalidArgument(
            f"[{operation}] key has a head size of {of_key[-1]}, query of {of_query[-1]}: "
            "was the cache made for another model?"
        )
    heads, kv_heads = of_query[heads_dim], of_key[heads_dim]
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidArgument(
            f"[{operation}] query has {heads} heads, key {kv_heads}: the first must be a multiple of the "
            "second; was the cache made for another model, or is it in another layout?"
        )


def check_rows(operation: str, query: torch.Tensor, key: torch.Tensor) -> None:
    """Refuses a query of another number of sequences than K has rows, which torch might broadcast and no
    FlashAttention takes.

    Raises:
        InvalidArgument: naming both.
    """
    if query.shape[0] != key.shape[0]:
        raise InvalidArgument(
            f"[{operation}] query has {query.shape[0]} sequences, key {key.shape[0]} rows: give a query for "
            "each row, or the rows of K that are meant"
        )


def check_groups(operation: str, query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
    """Refuses grouped heads where they are not asked for, of ``[B, H, S, D]``.

    Raises:
        InvalidArgument: naming both numbers of heads.
    """
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InvalidArgument(
            f"[{operation}] query has {query.shape[1]} heads, key {key.shape[1]}: pass enable_gqa=True"
        )


def check_rank(operation: str, name: str, t: KV, rank: int, layout: str) -> None:
    """Refuses a tensor that has not ``rank`` dimensions; ``layout`` names them for the message.

    Raises:
        InvalidArgument: it has others.
    """
    tensor = t.tensor if isinstance(t, FullExtent) else t
    if tensor.ndim != rank:
        raise InvalidArgument(f"[{operation}] {name} is {list(tensor.shape)}: give {layout}")


def check_heads_first(
    operation: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    """What kernels over ``[B, H, S, D]`` refuse.

    Raises:
        InvalidArgument: naming both sides.
    """
    if suit(_GROUPED if enable_gqa else _ALIKE, query, key, value):
        return
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_rank(operation, name, t, 4, "[batch, heads, positions, head size]")
    check_pair(operation, query, key, value, heads_dim=1)
    check_rows(operation, query, key)
    check_groups(operation, query, key, enable_gqa)


def append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: int | torch.Tensor,
    cache_batch_idx: torch.Tensor | None = None,
) -> None:
    """Copies k and v ``[B, n, H, D]`` into the caches ``[rows, S, H, D]`` behind ``cache_seqlens``, as
    FlashAttention's kernels with an append do; waits for no device."""
    batch, added = k.shape[:2]
    if isinstance(cache_seqlens, int) and cache_batch_idx is None:
        # narrow, because a slice past the end is a shorter one and takes nothing, in silence.
        k_cache[:batch].narrow(1, cache_seqlens, added).copy_(k)
        v_cache[:batch].narrow(1, cache_seqlens, added).copy_(v)
        return
    lengths = torch.as_tensor(cache_seqlens, device=k.device).expand(batch)
    rows = torch.arange(batch, device=k.device) if cache_batch_idx is None else cache_batch_idx
    positions = lengths[:, None] + torch.arange(added, device=k.device)
    k_cache[rows[:, None], positions] = k
    v_cache[rows[:, None], positions] = v

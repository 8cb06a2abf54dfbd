"""What the attention shims have in common: compiled code, full extents, leases, appends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import vtensor
from vtensor import InvalidArgument, KVCache, Reader, VTensor

from .full_extent import FullExtent

KV = torch.Tensor | FullExtent
Taken = tuple[torch.Tensor, torch.Tensor, KVCache | None]
_NOTHING: AbstractContextManager[None] = nullcontext()


def traced_views(operation: str, key: Any, value: Any, *others: Any) -> Taken:
    """``vtensor.attention.views`` for compiled code, which torch.compile cannot trace into C++.

    Compiled code takes plain tensors, and they pass unchanged. It does not ask which cache a view belongs to.
    """
    if isinstance(key, VTensor) or isinstance(value, VTensor):
        raise InvalidArgument(
            f"[{operation}] a VTensor in compiled code, which takes plain tensors: give a view, k[...]"
        )
    return key, value, None


def tensor_of(t: KV) -> Any:
    """The VTensor of a FullExtent, else ``t`` itself."""
    return t.owner if type(t) is FullExtent else t


def leased(
    operation: str, query: torch.Tensor, *tensors: Any, cache: KVCache | None = None, tile: int = 0
) -> AbstractContextManager[Any]:
    """A ``vtensor.lease`` over the VTensors among ``tensors``, for a launch with ``query``.

    A cache and a Reader record the stream instead: pages that they give up later wait for it. A cache must
    map the ``tile`` rows that the kernel reads at once. On a CPU there is no lease, because the kernel has
    ended when it returns, and its arguments keep their pages until then. Unmapped rows are zeros there.
    """
    if query.is_cpu:
        return _NOTHING
    if cache is not None:
        if cache.tile < min(tile, cache.max_len):
            raise InvalidArgument(
                f"[{operation}] {tile} rows are read at once, the cache maps with tile={cache.tile}: make it "
                f"with tile={tile} or more"
            )
        cache.record_stream()
    found = []
    for t in tensors:
        if isinstance(t, Reader):
            t.record_stream(torch.cuda.current_stream(query.device))
        elif isinstance(t, VTensor):
            found.append(t)
    return vtensor.lease(*found) if found else _NOTHING


def covered(t: FullExtent, positions_dim: int, tail: int = 0) -> torch.Tensor:
    """The tensor of ``t``, mapped to its owner's length and ``tail``, with its positions along
    ``positions_dim``, 1 or 2."""
    t.cover(t.owner.length, tail)
    return t.tensor if t.owner.grow_dim == positions_dim else t.tensor.transpose(1, 2)


def append(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None = None,
) -> int:
    """Copies k and v ``[B, n, H, D]`` into the caches ``[rows, S, H, D]`` from position ``cache_seqlens`` on.

    FlashAttention's kernels append in the same way. Returns n. Waits for no device.
    """
    operation = "flash_attn_with_kvcache"
    if k is None or v is None or cache_seqlens is None:
        raise InvalidArgument(
            f"[{operation}] one of k, v and cache_seqlens is None: give all three, or only cache_seqlens"
        )
    batch, added = q.shape[0], k.shape[1]
    for new, held in ((k, k_cache), (v, v_cache)):
        if q.ndim != 4 or new.shape != (batch, added, *held.shape[2:]):  # copies would broadcast
            raise InvalidArgument(
                f"[{operation}] new positions are {list(new.shape)}, the cache {list(held.shape)}, q "
                f"{list(q.shape)}: give as many of k and v for each sequence, of the cache's heads and size"
            )
    if isinstance(cache_seqlens, int) and cache_batch_idx is None:
        if cache_seqlens < 0:  # narrow counts it from the end
            raise InvalidArgument(f"[{operation}] cache_seqlens is {cache_seqlens}: give at least 0")
        # narrow raises if there is no room; a slice would be shorter.
        k_cache[:batch].narrow(1, cache_seqlens, added).copy_(k)
        v_cache[:batch].narrow(1, cache_seqlens, added).copy_(v)
        return added
    lengths: Any = cache_seqlens
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.full((batch,), lengths, device=k.device)
    rows = torch.arange(batch, device=k.device) if cache_batch_idx is None else cache_batch_idx
    if not lengths.shape == rows.shape == (batch,):
        raise InvalidArgument(
            f"[{operation}] lengths are {list(lengths.shape)}, rows {list(rows.shape)}, q has {batch} "
            "sequences: give one for each"
        )
    positions = lengths[:, None] + torch.arange(added, device=k.device)
    k_cache[rows[:, None], positions] = k
    v_cache[rows[:, None], positions] = v
    return added

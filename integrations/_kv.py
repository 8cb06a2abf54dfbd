"""What the attention shims have in common: their kernels' specs, for compilers too, full extents, leases."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import vtensor
from vtensor import InvalidArgument, KVCache, VTensor
from vtensor.attention import AttentionSpec

from .full_extent import FullExtent

KV = torch.Tensor | FullExtent
Taken = tuple[torch.Tensor, torch.Tensor, KVCache | None]
_NOTHING: AbstractContextManager[None] = nullcontext()


class TracedSpec:
    """In the place of an AttentionSpec for torch.compile, which cannot see into that: its calls are made
    while the graph is traced, over what the compiler knows then, and are no part of the graph. What does not
    suit ends the compilation, with an error of the compiler's that has ours in it."""

    def __init__(self, name: str, spec: AttentionSpec) -> None:
        self._name = name
        _traced[name] = spec

    def take(self, *given: Any) -> Taken:
        return self._take("take", given)

    def take_packed(self, *given: Any) -> Taken:
        return self._take("take_packed", given)

    def take_listed(self, *given: Any) -> Taken:
        return self._take("take_listed", given)

    def _take(self, method: str, given: tuple[Any, ...]) -> Taken:
        name, key, value = self._name, given[1], given[2]
        if isinstance(key, VTensor) or isinstance(value, VTensor):
            raise InvalidArgument(
                f"[{name}] a VTensor in compiled code, which takes plain tensors: give a view, k[...]"
            )
        torch._dynamo.comptime.comptime(_take_while_tracing)
        return key, value, None


_traced: dict[str, AttentionSpec] = {}


def _take_while_tracing(frame: Any) -> None:
    """Makes the call that TracedSpec._take, the traced ``frame``, has in its variables."""
    name, method = (frame.get_local(variable).as_python_constant() for variable in ("name", "method"))
    given = frame.get_local("given").as_proxy()
    known = [t.node.meta["example_value"] if isinstance(t, torch.fx.Proxy) else t for t in given]
    getattr(_traced[name], method)(*known)


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


def full_tensor(t: FullExtent, positions_dim: int) -> torch.Tensor:
    """All of ``t``, with its positions along ``positions_dim``, 1 or 2."""
    return t.tensor if t.owner.grow_dim == positions_dim else t.tensor.transpose(1, 2)


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

"""What the attention shims have in common: specs in compiled code, full extents, leases, appends."""

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
    """An AttentionSpec for compiled code, because torch.compile cannot trace into the C++ class.

    Its calls run while the graph is traced, with the shapes that the compiler knows then, and are no part of
    the graph. If arguments do not suit, the compilation ends with an error of the compiler that contains the
    spec's.
    """

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
    """Calls the spec with the arguments in ``frame``, the traced frame of ``TracedSpec._take``."""
    name, method = (frame.get_local(variable).as_python_constant() for variable in ("name", "method"))
    given = frame.get_local("given").as_proxy()
    known = [t.node.meta["example_value"] if isinstance(t, torch.fx.Proxy) else t for t in given]
    getattr(_traced[name], method)(*known)


def owner_of(t: KV) -> VTensor | None:
    """``t`` if it is a VTensor, the owner if it is a FullExtent, None if it is a plain tensor."""
    if isinstance(t, VTensor):
        owner: VTensor = t  # type: ignore[assignment]  # torch's metaclass keeps mypy from narrowing
        return owner
    return t.owner if isinstance(t, FullExtent) else None


def leased(
    query: torch.Tensor, *owners: VTensor | None, cache: KVCache | None = None
) -> AbstractContextManager[Any]:
    """A ``vtensor.lease`` over the ``owners`` that are not None, for a launch with ``query``.

    A cache records the stream instead: pages that its slots give up later wait for it. On a CPU there is no
    lease, because the kernel has ended when it returns, and its arguments keep their pages until then.
    """
    if query.is_cpu:
        return _NOTHING
    if cache is not None:
        cache.record_stream()
    found = [owner for owner in owners if owner is not None]
    return vtensor.lease(*found) if found else _NOTHING


def full_tensor(t: FullExtent, positions_dim: int) -> torch.Tensor:
    """The tensor of ``t`` with its positions along ``positions_dim``, 1 or 2."""
    return t.tensor if t.owner.grow_dim == positions_dim else t.tensor.transpose(1, 2)


def append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: int | torch.Tensor,
    cache_batch_idx: torch.Tensor | None = None,
) -> None:
    """Copies k and v ``[B, n, H, D]`` into the caches ``[rows, S, H, D]`` from position ``cache_seqlens`` on.

    FlashAttention's kernels append in the same way. Waits for no device.
    """
    batch, added = k.shape[:2]
    if isinstance(cache_seqlens, int) and cache_batch_idx is None:
        # narrow raises if there is no room; a slice would be shorter.
        k_cache[:batch].narrow(1, cache_seqlens, added).copy_(k)
        v_cache[:batch].narrow(1, cache_seqlens, added).copy_(v)
        return
    lengths = torch.as_tensor(cache_seqlens, device=k.device).expand(batch)
    rows = torch.arange(batch, device=k.device) if cache_batch_idx is None else cache_batch_idx
    positions = lengths[:, None] + torch.arange(added, device=k.device)
    k_cache[rows[:, None], positions] = k
    v_cache[rows[:, None], positions] = v

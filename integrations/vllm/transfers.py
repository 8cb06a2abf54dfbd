"""Prefill in one engine, decode in another: the KV connectors that may carry K and V between them.

vLLM registers the whole table with its connector once, most of it unmapped. Blocks are mapped, unmapped and
mapped elsewhere later. So a transport must use the pages of the moment when it reads and writes, not those of
the registration. And a block must stay mapped as long as a peer or a transfer may use it. It does, because
such a block has users in vLLM's own count, as read in 0.32.0, and blocks with users are held (``hooks.py``):

- Blocks that are received into are those of a request. If it is aborted during the transfer,
  ``Scheduler.finish_requests`` keeps them until the worker reports the end of the transfer. The worker keeps
  a failed transfer until NIXL has let go of it (``NixlBaseConnectorWorker._try_release_xfer_handle``).
- Blocks that a peer will read stay those of the finished request (``NixlPullConnectorScheduler
  .request_finished``) until the peer reports that it is done, or until the lease, which it renews, expires. A
  later read gets zeros, or what other requests wrote since.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_UNPINNED = ("tcp", "self", "posix", "sysv", "cma")
_SHARED_MEMORY = ("sm", "shm", "mm")  # UCX's names for those of the machine, and for XPMEM and KNEM
_PINNING_SHARED_MEMORY = ("dev/xpmem", "dev/knem")
_PINNING = ("sys/class/infiniband/*", "dev/nvidiactl", "dev/kfd", *_PINNING_SHARED_MEMORY)


def require_connector(vllm_config: Any) -> None:
    """Raises RuntimeError if K and V go to another engine in a way that was not tested."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    if transfer.kv_connector != "NixlConnector" or transfer.kv_connector_module_path is not None:
        raise RuntimeError(
            f"[vtensor.vllm] the KV connector is {transfer.kv_connector}: only vLLM's own NixlConnector is "
            "known to leave blocks alone that have no memory; take that one, or unset VTENSOR_VLLM"
        )
    extra = transfer.kv_connector_extra_config
    if extra.get("backends", ["UCX"]) != ["UCX"] or extra.get("bidirectional_kv_xfer", False):
        raise RuntimeError(
            f"[vtensor.vllm] kv_connector_extra_config is {extra}: NixlConnector was run over UCX, from "
            "prefill to decode; leave out backends and bidirectional_kv_xfer, or unset VTENSOR_VLLM"
        )
    if vllm_config.parallel_config.world_size != 1:
        raise RuntimeError(
            f"[vtensor.vllm] the engine has {vllm_config.parallel_config.world_size} workers: NixlConnector "
            "was run with one; take one, or unset VTENSOR_VLLM"
        )
    if os.environ.get("VTENSOR_VLLM_SHARED"):
        raise RuntimeError(
            "[vtensor.vllm] VTENSOR_VLLM_SHARED is set: blocks that wait to be read could leave the reader "
            "without memory to receive them, for good; give each engine its own VTENSOR_VLLM_BUDGET"
        )
    require_unpinned(os.environ.get("UCX_TLS", ""))


def require_unpinned(transports: str, root: Path = Path("/")) -> None:
    """Raises RuntimeError if UCX may pin registered memory with these transports: a peer would then read and
    write pages that are not the block's any more."""
    names = [name.strip() for name in transports.lower().rstrip(", ").split(",")]
    if all(name in _UNPINNED for name in names):
        return
    if names[0] in ("", "all") or names[0].startswith("^"):  # anything
        found = _present(_PINNING, root)
    elif all(name in _UNPINNED + _SHARED_MEMORY for name in names):
        found = _present(_PINNING_SHARED_MEMORY, root)
    else:
        found = [name for name in names if name not in _UNPINNED + _SHARED_MEMORY]
    if found:
        raise RuntimeError(
            f"[vtensor.vllm] UCX_TLS is {transports or 'not set'}, so NIXL may use {found[0]} and pin memory "
            "at its registration, but blocks get other memory later: "
            f"set UCX_TLS={','.join(_UNPINNED)}"
        )


def _present(patterns: tuple[str, ...], root: Path) -> list[str]:
    return [f"/{path.relative_to(root)}" for pattern in patterns for path in sorted(root.glob(pattern))]

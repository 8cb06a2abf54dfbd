"""The memory of one engine's table of blocks: the places of its bytes, and the blocks that fit the budget."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import vtensor

Part = tuple[int, int, int]


class NoRoom(Exception):
    """Memory is short, or a cached block has lost its contents."""


class TableMemory(vtensor.Blocks):
    """The blocks of one table, as vLLM 0.32 lays it out (``vllm.v1.kv_cache_interface.KVCacheConfig``). A
    block is held while a request uses it.

    Args:
        config: the table's configuration.
        device: the table's device.
        workers: workers of the engine, each with a table of its own: the budget is that of all.
    """

    def __init__(self, config: Any, device: torch.device, workers: int = 1) -> None:
        if device.type != "cpu":
            raise RuntimeError(
                f"[vtensor.vllm] the device is {device}: the plug-in was run with vLLM's CPU backend alone; "
                "unset VTENSOR_VLLM and take vtensor out of VLLM_PLUGINS"
            )
        self.parts = parts_of(config)
        self.block_bytes = sum(size for _, _, size in self.parts)
        """Bytes of one block, in all layers."""
        shared = os.environ.get("VTENSOR_VLLM_SHARED") or None
        try:
            self.pool = vtensor.Pool(
                device,
                page_size=os.environ.get("VTENSOR_VLLM_PAGE_SIZE") or page_size_for(self.parts),
                budget=os.environ.get("VTENSOR_VLLM_BUDGET") or None,
                shared_budget=shared,
                spare=0,  # pages that no block has go back to the system
            )
            self.share = self.pool.budget // workers
            """Bytes of the budget that this worker may count on."""
            if workers > 1 and shared is None:
                self.pool.budget = self.share
            self._takers = 1 if shared is None else workers  # of the free pages
        except vtensor.InvalidArgument as error:
            settings = (
                f"{name}={value}" for name, value in os.environ.items() if name.startswith("VTENSOR_VLLM_")
            )
            raise RuntimeError(f"[vtensor.vllm] with {', '.join(sorted(settings))}: {error}") from None
        self.page_size = self.pool.page_size
        super().__init__(vtensor.Arena(table_bytes(config), pool=self.pool), config.num_blocks, self.parts)
        self.count = len(self)
        self.most = self.share // self.block_bytes
        """The number of blocks that fit the budget."""
        self.most_cached = int(cached_share() * self.most)
        """The number of blocks that the prefix cache may keep while no request uses them."""

    def require_room(self, blocks: int, tokens: int) -> None:
        """Raises RuntimeError if the budget has no room for ``blocks``, as many as the longest request takes,
        at any places in the table."""
        block = sum(most_pages(part, self.page_size) for part in self.parts) * self.page_size
        if blocks + 1 <= self.share // block:
            return
        raise RuntimeError(
            f"[vtensor.vllm] a budget of {self.share:,} bytes a worker holds {self.share // block} blocks of "
            f"{block:,} bytes; one request of max_model_len {tokens} takes {blocks}, beside vLLM's null "
            "block: raise VTENSOR_VLLM_BUDGET, or lower max_model_len"
        )

    def hold(self, numbers: Iterable[int]) -> tuple[list[int], list[int]]:
        """As :meth:`vtensor.Blocks.hold`. If memory is short, raises NoRoom and changes nothing."""
        try:
            return super().hold(numbers)
        except vtensor.OutOfPages:
            raise NoRoom from None
        except vtensor.DriverError as error:
            if error.name != "ENOMEM":
                raise
            if self.mapped <= 1:  # no block could give kernel mappings back
                raise RuntimeError(f"[vtensor.vllm] {error}") from None
            raise NoRoom from None

    def shortage(self, numbers: Iterable[int]) -> int:
        """The number of these blocks, which no request uses, that find no free pages."""
        whole = self.whole(numbers)
        return max(0, len(whole) - sum(whole) - self.room)

    def trim_all(self) -> None:
        """Gives back the memory of all blocks that are not held."""
        self.arena.trim()

    @property
    def evicted(self) -> int:
        """Pages that went to others so far."""
        return self.arena.stats().pages_evicted

    @property
    def room(self) -> int:
        """Number of blocks for which the free pages and the prepared ones suffice."""
        free = self.pool.stats().pages_free // self._takers + self.arena.stats().pages_prefetched
        return free * self.page_size // self.block_bytes


class ZerosInArena(TorchFunctionMode):
    """Makes ``torch.zeros`` of the whole table return the arena, whose unmapped addresses read as zeros."""

    def __init__(self, arena: vtensor.Arena, nbytes: int) -> None:
        super().__init__()
        self.arena, self.nbytes, self.given = arena, nbytes, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self.nbytes,) and kwargs.get("dtype") is torch.int8:
            self.given = True
            return self.arena.tensor.view(torch.int8)
        return func(*args, **kwargs)


def most_pages(part: Part, page: int) -> int:
    """Pages that a block may need in this part."""
    offset, stride, size = part
    latest = page - math.gcd(offset, stride, page)  # offset in a page at which a block may begin
    return -(-(latest + size) // page)


def page_size_for(parts: list[Part]) -> int:
    """The largest page up to 64 KiB that divides every block into whole pages, else the smallest page."""
    common = math.gcd(*(number for part in parts for number in part))
    return max(4096, min(1 << 16, common & -common))


def cached_share() -> float:
    """The share of the budget that the prefix cache may keep for blocks that no request uses."""
    given = os.environ.get("VTENSOR_VLLM_CACHE") or "1"
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise RuntimeError(
            f"[vtensor.vllm] VTENSOR_VLLM_CACHE is {given!r}: give a share of the budget, from 0 to 1"
        )
    return share


def table_bytes(config: Any) -> int:
    """Bytes of the one allocation that all tensors of the table share."""
    return int(config.kv_cache_tensors[0].size)


def parts_of(config: Any) -> list[Part]:
    """The places of a block's bytes, as :class:`vtensor.Blocks` takes them.

    In layouts with the layers outermost, each layer, or each head of each layer, is a region with a place for
    every block. With the blocks outermost, a block's layers lie together. Groups of layers share addresses,
    because a block belongs to one group at a time.
    """
    count, parts = config.num_blocks, set[Part]()
    for tensor in config.kv_cache_tensors:
        stride, region = tensor.block_stride, tensor.block_stride * count
        end = tensor.offset + len(tensor.layers) * tensor.layer_stride
        together = stride > tensor.layer_stride or end - tensor.offset < region
        starts = [0] if together else range(tensor.offset, end, region)
        parts.update((start, stride, stride) for start in starts)
    if sum(size for _, _, size in parts) * count != table_bytes(config):
        raise RuntimeError(
            f"[vtensor.vllm] a KV cache of {table_bytes(config):,} bytes in {count} blocks is laid out in a "
            f"way that the plug-in does not know: {config.kv_cache_tensors}"
        )
    return sorted(parts)

"""The functions and classes of vLLM that are replaced, each as read in 0.32.0.

- ``vllm.v1.worker.utils.allocate_kv_cache``: its ``torch.zeros`` is an arena.
- ``vllm.v1.core.kv_cache_coordinator.BlockPool``: a block has memory while a request uses it.
- ``vllm.v1.core.kv_cache_manager.KVCacheManager``: ``allocate_slots`` returns None if memory is short.
- ``vllm.v1.core.sched.scheduler.Scheduler``: marks the begin and the end of each step.
- ``vllm.v1.executor.Executor.initialize_from_config``: workers in processes of their own serve the scheduler.
- ``execute_model`` and ``sample_tokens`` of such a worker: mark the end of its steps.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_max_concurrency_for_kv_cache_config
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor import Executor
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import attn_utils

from .memory import NoRoom, TableMemory, ZerosInArena, table_bytes
from .report import Shortages, say_on
from .transfers import require_connector
from .workers import STEP, Facts, Server, WorkersMemory, require_local

RETRY_SECONDS = 0.002  # if only memory of others is in the way, a step without work ends too soon

# Made by the worker, until the scheduler of the same engine, which is made next, takes it.
_pending: TableMemory | WorkersMemory | None = None


def install() -> None:
    """Replaces them, once."""
    if kv_cache_coordinator.BlockPool is GrowingBlockPool:
        return
    for module in (gpu_model_runner, attn_utils):
        _hook(module, "allocate_kv_cache", _allocate_in_arena)
    _hook(Executor, "initialize_from_config", _initialize_and_serve)
    _hook(KVCacheManager, "allocate_slots", _allocate_or_none)
    _hook(Scheduler, "add_request", _add_foreseen)
    _hook(Scheduler, "schedule", _begin_step)
    _hook(Scheduler, "update_from_output", _end_step)
    kv_cache_coordinator.BlockPool = GrowingBlockPool


def _hook(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replaces a function of ``owner`` with ``instead``, which gets the original before its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    setattr(owner, name, hooked)


# --- the worker's side ---


def _allocate_in_arena(
    allocate: Callable[..., Any], kv_cache_config: Any, device: torch.device, *args: Any, **kwargs: Any
) -> Any:
    global _pending
    if not kv_cache_config.kv_cache_tensors:
        return allocate(kv_cache_config, device, *args, **kwargs)
    vllm_config = get_current_vllm_config()
    parallel_config = vllm_config.parallel_config
    require_local(parallel_config)
    require_connector(vllm_config)
    if kv_cache_config.has_mamba_layers:
        raise RuntimeError("[vtensor.vllm] not with Mamba layers yet: unset VTENSOR_VLLM")
    memory = TableMemory(kv_cache_config, device, parallel_config.world_size)
    requests = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    longest = -(-kv_cache_config.num_blocks // max(requests, 1e-9))
    memory.require_room(int(longest), vllm_config.model_config.max_model_len)
    with ZerosInArena(memory.arena, table_bytes(kv_cache_config)) as zeros:
        caches = allocate(kv_cache_config, device, *args, **kwargs)
    if not zeros.given:
        raise RuntimeError("[vtensor.vllm] vLLM's KV cache was not made as in the release tested")
    _pending = memory
    return caches


def _initialize_and_serve(
    initialize: Callable[..., Any], executor: Executor, kv_cache_configs: list[Any]
) -> None:
    global _pending
    _pending = None
    initialize(executor, kv_cache_configs)
    if _pending is None and any(config.kv_cache_tensors for config in kv_cache_configs):
        key = secrets.token_bytes(32)
        facts = executor.collective_rpc(_serve, args=(key,))
        _pending = WorkersMemory([worker for worker in facts if worker is not None], key)


def _serve(wrapper: Any, key: bytes) -> Facts | None:
    """Starts a worker's server. Each worker runs it in its process."""
    if not isinstance(_pending, TableMemory):  # a stage without a KV cache
        return None
    worker = wrapper.worker
    worker.vtensor = server = Server(_pending, worker.rank, key)
    worker.execute_model, worker.sample_tokens = server.marking(worker.execute_model, worker.sample_tokens)
    return server.facts


# --- the scheduler's side ---


class GrowingBlockPool(BlockPool):
    """vLLM's blocks, more than there is memory for. Blocks that requests use have memory. Blocks that only
    the prefix cache knows keep it until others need it."""

    def __init__(self, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> None:
        global _pending
        super().__init__(num_gpu_blocks, *args, **kwargs)
        memory, _pending = _pending, None
        if memory is None or memory.count != num_gpu_blocks:
            raise RuntimeError(f"[vtensor.vllm] no KV cache was made for the {num_gpu_blocks} blocks planned")
        self.memory = memory
        self._cached: dict[int, KVCacheBlock] = {}  # in the index, and no request uses them; oldest first
        self._empty: set[int] = set()  # in no request and no index; they may still be mapped
        self._evicted = 0
        self._counts_table = False
        self.refused = False  # a request was refused because memory is short
        self.shortages = Shortages()
        try:
            self.memory.hold([self.null_block.block_id])
        except NoRoom:
            raise RuntimeError(
                "[vtensor.vllm] there is no memory for the first block: other engines of VTENSOR_VLLM_SHARED "
                "have the whole budget (python -m vtensor top); raise VTENSOR_VLLM_BUDGET for all, or wait"
            ) from None
        say_on(memory)

    # The blocks that the budget leaves; for BlockPool.reset_prefix_cache, those of the table.
    def get_num_free_blocks(self) -> int:
        free = super().get_num_free_blocks()
        if self._counts_table:
            return int(free)
        used = self.num_gpu_blocks - free  # blocks that wait for a step are held again without memory
        return int(max(0, min(free, self.memory.most - used)))

    def get_usage(self) -> float:
        return float(self.memory.mapped / max(1, min(self.memory.most, self.num_gpu_blocks)))

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks > self.get_num_free_blocks():
            raise NoRoom
        short = self.memory.shortage([block.block_id for block in self._first_free(num_blocks)])
        if short:  # take the longest unused cached blocks before others without memory
            self.forget_lost()
            self._take_next(self._oldest_cached(short))
        numbers = [block.block_id for block in self._first_free(num_blocks)]
        self.memory.hold(numbers)
        reused = [number for number in numbers if self._cached.pop(number, None)]
        if short:
            self.shortages.evicted += len(reused)
        self._empty.difference_update(numbers)
        return list(super().get_new_blocks(num_blocks))

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        idle = [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        numbers = [block.block_id for block in idle]
        try:
            _, lost = self.memory.hold(numbers)
        except NoRoom:
            self.forget_lost(idle)
            raise
        if lost:
            self.memory.release(numbers)
            self._forget(self.blocks[number] for number in lost)
            self.shortages.evicted += len(lost)
            raise NoRoom
        for number in numbers:
            self._cached.pop(number, None)
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        idle = [b for b in blocks if b.ref_cnt == 0 and not b.is_null and b.pool is self]
        self.memory.release([block.block_id for block in idle])
        for block in idle:
            if block.block_hash is None:
                self._empty.add(block.block_id)
            else:
                self._cached[block.block_id] = block
        self._bound_cache()
        self.rest()

    def reset_prefix_cache(self) -> bool:
        self._counts_table = True
        try:
            done = super().reset_prefix_cache()
        finally:
            self._counts_table = False
        if done:
            self._empty.update(self._cached)  # some may wait for a step
            self._cached.clear()
            self.memory.trim_all()
            self.rest()
        return bool(done)

    def rest(self) -> None:
        """Gives back blocks in no request and no index, once no request is left."""
        if self._empty and self.memory.mapped == 1:
            self.memory.trim(self._empty)
            self._empty.clear()

    def prepare(self, count: int) -> None:
        """Has the next ``count`` blocks mapped while the device computes."""
        free = self._first_free(min(count, self.get_num_free_blocks()))
        numbers = [block.block_id for block in free if block.block_id not in self._cached]
        if numbers:
            self._empty.update(numbers)
            self.memory.prepare(numbers)

    def forget_lost(self, blocks: Iterable[KVCacheBlock] | None = None) -> None:
        """Removes cached blocks that gave their memory to others from the index: of ``blocks``, or of all."""
        if blocks is None:
            evicted = self.memory.evicted
            if evicted == self._evicted:
                return
            self._evicted = evicted
            blocks = self._cached.values()
        blocks = list(blocks)
        whole = self.memory.whole([block.block_id for block in blocks])
        lost = [block for block, kept in zip(blocks, whole, strict=True) if not kept]
        self._forget(lost)
        self.shortages.evicted += len(lost)

    def _forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._cached.pop(block.block_id, None)
            self._maybe_evict_cached_block(block)

    def _first_free(self, count: int) -> list[KVCacheBlock]:
        blocks, block = [], self.free_block_queue.fake_free_list_head
        for _ in range(count):
            block = block.next_free_block
            blocks.append(block)
        return blocks

    def _bound_cache(self) -> None:
        excess = self._oldest_cached(len(self._cached) - self.memory.most_cached)
        self._forget(excess)
        self._empty.update(block.block_id for block in excess)
        self._take_next(excess)

    def _oldest_cached(self, count: int) -> list[KVCacheBlock]:
        return [block for _, block in zip(range(count), self._cached.values(), strict=False)]

    def _take_next(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self.free_block_queue.remove(block)
        self.free_block_queue.prepend_n(blocks)


def _allocate_or_none(
    allocate: Callable[..., Any], kv: KVCacheManager, request: Any, *args: Any, **kwargs: Any
) -> Any:
    managers, name = kv.coordinator.single_type_managers, request.request_id
    before = [(len(m.req_to_blocks.get(name, ())), len(m.new_block_ids)) for m in managers]
    try:
        return allocate(kv, request, *args, **kwargs)
    except NoRoom:  # the worker gets all of it or nothing
        kv.block_pool.refused = True
        if not any(blocks for blocks, _ in before):
            kv.coordinator.free(name)
        for manager, (blocks, recorded) in zip(managers, before, strict=True):
            if blocks:
                fresh = manager.req_to_blocks[name][blocks:]
                del manager.req_to_blocks[name][blocks:]
                kv.block_pool.free_blocks(reversed(fresh))
            del manager.new_block_ids[recorded:]
        return None


def _pool_of(scheduler: Scheduler) -> GrowingBlockPool | None:
    pool = scheduler.kv_cache_manager.block_pool
    return pool if isinstance(pool, GrowingBlockPool) else None


def _add_foreseen(add: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    added = add(scheduler, *args, **kwargs)
    if (pool := _pool_of(scheduler)) is not None:
        pool.prepare(_blocks_of_next_step(scheduler))
    return added


def _begin_step(schedule: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    pool = _pool_of(scheduler)
    if pool is None:
        return schedule(scheduler, *args, **kwargs)
    pool.forget_lost()
    pool.refused = False
    reset = len(scheduler.reset_preempted_req_ids)  # by a reset of the prefix cache, not by this step
    output = schedule(scheduler, *args, **kwargs)
    if output.total_num_scheduled_tokens:
        pool.prepare(_blocks_of_next_step(scheduler))
    elif pool.refused and not scheduler.running:
        pool.shortages.waits += 1
        time.sleep(RETRY_SECONDS)
    if pool.refused or pool.memory.most < pool.num_gpu_blocks:  # else vLLM's table is short, not memory
        pool.shortages.preempted += len(output.preempted_req_ids) - reset
    pool.shortages.say(time.monotonic())
    setattr(output, STEP, pool.memory.begin_step())
    if output.new_block_ids_to_zero:  # not those of requests that were preempted since
        used = [n for n in output.new_block_ids_to_zero if pool.blocks[n].ref_cnt > 0]
        output.new_block_ids_to_zero = used or None
    return output


def _blocks_of_next_step(scheduler: Scheduler) -> int:
    """The most blocks that the next step takes, for all layers alike and for the requests known now."""
    blocks, tokens, size = 0, scheduler.max_num_scheduled_tokens, scheduler.block_size
    for request in itertools.chain(scheduler.running, scheduler.waiting):
        if tokens <= 0:
            break
        has = request.num_computed_tokens
        more = min(tokens, max(1, request.num_tokens - has))
        blocks += -(-(has + more) // size) - -(-has // size)
        tokens -= more
    return blocks


def _end_step(update: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    outputs = update(scheduler, *args, **kwargs)
    if (pool := _pool_of(scheduler)) is not None:
        pool.memory.end_step()
        pool.rest()
    return outputs

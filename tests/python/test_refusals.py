"""What calls refuse: an argument that makes no sense, by a message in words that say what. Nothing is changed
by it (I8)."""

from __future__ import annotations

import dataclasses
import itertools
import math  # noqa: F401 - as others below, for expressions in the table
import pickle
import re
from types import SimpleNamespace  # noqa: F401
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import vtensor
from kv_support import UNIT, make_cache
from operations import NAMES, OPERATIONS, TORCH_OPERATIONS
from support import SHAPE_OF_A_MESSAGE, filled, open_pool, page_ids, quarter, run_snippet
from vtensor import plot, replay, testing, trace  # noqa: F401
from vtensor.replay.managers import PagedCache, StaticCache
from vtensor.serving import Engine, LengthHistogram, Promises, Request, Scheduler  # noqa: F401
from vtensor.testing.kv_model import check_contents, write

# A call a line, and words of its message. `<a | b>` stands for a line with each, NO_INTEGER for many such.
TABLE = """
--- tensors
t.<extend | shrink | truncate | prepare | reallocate>(NO_INTEGER)
t.<extend | shrink | truncate | prepare | reallocate>(<-1 | -2**62 | -2**80 | 2**63 | 2**80>)
t.<extend | shrink | truncate | prepare>(<10**6 | 2**31 | 2**62>)
t.<extend | prepare>(3) -> need 3 more positions, length is 6 of capacity 8: make it with a larger capacity=
t.append(torch.ones(3, 1024, dtype=torch.uint8)) -> reallocate
t.shrink(<7 | 7, front=True>) -> n is 7, the length 6
t.truncate(7) -> 7
rows.reallocate(5) -> 6
t.unshare(<-1, 3 | 3, 99 | 4, 2 | 7, 7 | 0, 2**63>) -> 6
t.unshare(NO_INTEGER, 3)
t.unshare(0, NO_INTEGER)
t.reindex([0])
rows.reindex(<{1, 0} | {0: 1}>) -> give integers
rows.reindex(<5 | None | [] | [[0], [1]] | ['a'] | 'ab' | torch.ones(2, 2).long() | [5] | [-3] | [2**63]>)
rows.reindex([NO_INTEGER])
rows.reindex(<torch.tensor([True, False]) | [True, False] | (False, True)>) -> give integers
rows.reindex(torch.ones(1, device='meta', dtype=torch.int)) -> index is a Tensor without memory
vtensor.together.reindex([<torch.ones(2, 3) | cache>], [[0]]) -> give a VTensor
vtensor.together.reserve(<torch.ones(2, 3) | cache>, 3) -> give a VTensor
vtensor.together.reindex([rows, rows], [[0], [0]]) -> named twice
vtensor.together.reindex(<5, [[0]] | [rows], 6 | None, []>) -> [together.reindex]
vtensor.together.reindex([rows, floats], <[[1, 0]] | [[1, 0]] * 3>) -> 2 tensors and
t.append(NO_TENSOR)
floats.append(torch.ones(<2, 1, 5, 6 | 1, 1, 5, 7 | 2, 5, 7 | 2, 1, 5, 7, 1 | () | 35>)) -> (2, 3, 5, 7)
floats.append(x.<double() | half() | int() | cfloat()>) -> torch.float32
floats.append(x.to('meta')) -> the source on meta
floats.append(<x.to_sparse() | torch.nested.nested_tensor([x])>) -> not strided
floats.append(x.requires_grad_()) -> no_grad
torch.<vmap(floats.append)(x[None]) | func.grad(floats.append)(x)> -> has no memory (a Tensor)
t.<t_() | transpose_(0, 1) | swapaxes_(0, 1) | swapdims_(0, 1) | squeeze_() | unsqueeze_(0)> -> belong to
t.<as_strided_((1,), (1,)) | set_(x) | resize_(1) | resize_as_(x)> -> belong to vtensor
setattr(t, 'data', x) -> belong to vtensor
vtensor.lease(t, <NO_TENSOR | cache>)
vtensor.lease([t], [t]).__enter__()
vtensor.lease(torch.ones(2)) -> got a Tensor
vtensor.lease(t, stream=NO_STREAM) -> [lease] stream is
t.shrink(1, stream=NO_STREAM) -> [VTensor.shrink] stream is
t.truncate(1, stream=NO_STREAM) -> [VTensor.truncate] stream is
t.fork(stream=NO_STREAM) -> [VTensor.fork] stream is
t.close(stream=NO_STREAM) -> [VTensor.close] stream is
t.record_stream(NO_STREAM) -> [VTensor.record_stream] stream is
t.shrink(1, stream=2) -> per-thread
t.record_stream(None) -> None
--- making tensors
vtensor.empty_like(<NO_TENSOR | cache>, grow_dim=0, capacity=3)
vtensor.from_tensor(<NO_TENSOR | cache>, 0, 9, pool=pool)
vtensor.from_tensor(x.requires_grad_(), 1, 9, pool=pool) -> x.detach
vtensor.from_tensor(x, <4 | -5 | 'a'>, 9, pool=pool) -> [from_tensor] grow_dim is
vtensor.from_tensor(x, 1, -1, pool=pool) -> [from_tensor] capacity is
vtensor.zeros(0, grow_dim=1, capacity=3, pool=pool) -> [zeros] grow_dim is
vtensor.from_tensor(torch.nested.nested_tensor([x]), 0, 9, pool=pool) -> x is nested
make(2, 4, 8, capacity=<NO_INTEGER | -1 | 3 | 2**61 | 2**64 | 2**100>) -> capacity
make(2, 4, 8, grow_dim=<NO_INTEGER | 3 | -4 | 2**64>)
make(<2, -4, 8 | -2, 4, 8 | 2, 4, 2**64 | 2**40, 0, 2**40 | 2**62, 0, 4 | 1, 0, 2**62>)
make(2, 4, NO_INTEGER)
make(2, 4, 8, when_full=<'explode' | [] | torch.ones(2)>) -> when_full
make(2, 4, 8, dtype=<'float32' | [] | torch.quint8>) -> dtype
make(2, 4, 8, pool=<5 | 'cpu'>) -> pool
make(2, 4, 8, device=<'cuda' | 'blah' | []>)
make(2, 4, 8, pool=None, device=<'meta' | 'tpu' | '' | 1.5>)
make(2**29, 0, 8) -> make several tensors
make(2, 4, 8, tag=<'' | 3>) -> tag
--- pools
pool_of(<prefetch | cache | spare | device_reserve | page_size | budget>=<NO_BYTES | -1 | 2**63 | 2**100>)
pool_of(page_size=<0 | 1 | 4095>) -> bytes: it must be at least 4096
pool_of(budget=<0 | 1 | 4095>) -> budget
pool_of(page_size=<4097 | 12288>) -> powers of two from 4096
pool_of(zero=<'sometimes' | None | 1.5 | []>) -> zero
pool_of(shared_budget=<'\\udc80' | 'a\\0b' | '' | 5>) -> give the name of a shared
pool_of(shared_budget='a/b') -> shared
pool_of(shared_budget='x' * 65) -> 1 to 64
vtensor.Pool(shared_budget='a') -> budget is not given
vtensor.Pool(rdma=True) -> leave it out for the CPU
<vtensor.Pool | vtensor.default_pool>(<'blah' | [] | 1.5 | 'cuda:x' | 'meta' | 'mps'>)
setattr(pool, 'budget', <NO_BYTES | 0 | -1 | 2**63>) -> budget
pool.wait_idle(<'x' | None | [] | 2j | 0 | -1 | math.nan | math.inf | 1e12 | 10**400>) -> timeout
testing.host_pool(patience=<'x' | [] | 0 | -1 | math.nan | 10**400>)
testing.fail_after(pool, <NO_INTEGER | 2**64 | -2**64>).__enter__()
testing.<check_invariants(5) | fail_after('cpu', 0).__enter__() | assert_no_leaks(5).__enter__()>
testing.simulated_cuda_pool(<5 | 'libcuda-that-is-not-there.so.1' | 'libc.so.6'>)
testing.simulated_cuda_pool('libc.so.6', device=1.5) -> device is a float: give an integer
vtensor.trace.record(<1.5 | '3' | 2**100>)
--- adopted modules, sleep
vtensor.adopt(<torch.ones(3) | 'weights' | 7 | [torch.ones(3), 7]>, pool)
vtensor.adopt(torch.nn.LazyLinear(3), pool) -> UninitializedParameter: only plain tensors
vtensor.adopt(layer, 'cpu') -> pool
vtensor.adopt(layer, pool, tag=<'' | 3>) -> tag
vtensor.memory(pool, tag='').__enter__() -> tag
vtensor.memory('cpu').__enter__() -> pool
vtensor.memory(pool).__enter__() -> vtensor.adopt
pool.<sleep(tag='KV', contents='host') | wake(tag='KV')> -> tag 'KV': there is 'tensors', 'kv'
--- arenas and blocks
arena.<map | unmap | prepare>([(0, 1, 2)]) -> ends
arena.<map | unmap | prepare>([<(5, 3) | (-1, 3) | (0, 9 * 4096) | (0, 2**70)>]) -> not in the arena
arena.<map | unmap | prepare>([(0, 1.5)]) -> float: give an integer
arena.<map | unmap | prepare>([3]) -> int: give pairs of bytes
arena.<map | unmap | prepare | holds>(<3 | None>) -> intervals is a
arena.unmap(<[(0, 5000)] | [(0, 9), (4096, 5000)] | [(0, 9)] * 3>) -> more often than it was mapped: nothing
vtensor.Arena(<0 | -1 | 2**47 | 2**70>, pool=pool)
vtensor.Arena(4096, pool=1) -> pool is an int: give a Pool
vtensor.Arena(4096, pool=pool, tag=None) -> tag
vtensor.Arena(2**50, zeros=True, pool=pool) -> of host memory for its tables
vtensor.Blocks(arena, 2, None) -> parts is None: give a sequence of (offset, stride, size)
vtensor.Blocks(arena, 2, [<None | 'abc'>]) -> : give a sequence
vtensor.Blocks(arena, 2, [(0, 1, 2.5)]) -> parts is a float: give an integer
vtensor.Blocks(arena, 10**13, [(0, 0, 1)]) -> TiB of host memory for its tables
vtensor.Blocks(arena, <0, [(0, 1, 1)] | 4, [] | 9, [(0, 4096, 4096)] | 2**40, [(0, 2**40, 1)]>)
vtensor.Blocks(arena, 4, [(<0, 4096, 0 | 1, 10000, 10000 | 0, 2**61, 1 | 0, 1 | -1, 1, 1 | 0, 1, 2**70>)])
blocks.<hold | prepare | release | whole | trim>(<[4] | [0, -1] | ['0'] | [1.5] | 3 | None>) -> [Blocks.
blocks.end_step() -> begin_step
--- making caches
cache_of(<num_layers | num_kv_heads | max_batch | max_len | layer_group | tile | bands>=<SIZE>)
cache_of(head_dim='8') -> head_dim is a str: give an integer
cache_of(max_batch=2**64) -> max_batch is 18446744073709551616: it must be at most 2**62
cache_of(max_batch=10**9) -> max_batch 1000000000 needs
cache_of(num_layers=10**9) -> num_layers 1000000000 needs
cache_of(max_len=<2**46 | 2**62>) -> pass the address space: lower max_batch or max_len
cache_of(num_kv_heads=2**62) -> each token takes
cache_of(num_kv_heads=2**61, layout='HND') -> each token takes
cache_of(<value_head_dim | lookahead>=<-1 | 'x' | 1.5>)
cache_of(bands=5) -> 4 layers, 1 of which share a page, make at most 4
cache_of(bands=3, layer_group=2) -> make at most 2
cache_of(bands=2, layer_group=2, windows=[None, 8] * 2) -> layer_group=1
cache_of(layer_group=5) -> layer_group is 5, there are 4 layers
cache_of(windows=[1]) -> 1 entries for 4 layers
cache_of(windows=[0, None, None, None]) -> window of layer 0 is 0
cache_of(windows=[1.5] * 4) -> a window is a float: give an integer
cache_of(windows=<5 | {0: 5}>)
cache_of(layout=<'page' | []>) -> layout
cache_of(dtype=<'float32' | torch.int64>) -> dtype
cache_of(device=<'blah' | [] | 'cuda:3'>)
cache_of(pool='cpu') -> pool
cache_of(tag=3) -> tag
--- lengths of a cache
cache.<step | fits | prepare>(lengths(9, UNIT)) -> slot 0 has 10 tokens and is to have 9
cache.<step | fits | prepare>(lengths(999, UNIT)) -> 999 tokens, max_len is 120
cache.<step | fits | prepare>(lengths(10, UNIT, 0, 7, 1)) -> slot 4 is free
cache.<step | fits | prepare>([10]) -> 1 lengths were given for 6 slots
cache.<step | fits | prepare>([0] * 11) -> 11 lengths were given for 6 slots
cache.<step | fits | prepare>(lengths(-1)) -> to have -1
cache.waits_for_others(<lengths(9, UNIT) | lengths(999, UNIT) | [10]>) -> [KVCache.waits_for_others]
cache.<step | prepare>(lengths(10, UNIT, 4)) -> slot 2 is swapped out
cache.fits(lengths(10, UNIT, <3 | 121 | -1>)) -> slot 2 has 4 tokens in host memory
cache.<step | prepare>(lengths(10, UNIT, 0, 8)) -> band 1 is swapped out: call swap_in
cache.<step | fits | prepare>(<{0: 3} | '100000' | None | [1.5] * 6 | ['a'] * 6>) -> : give 6 integers
cache.<step | fits | prepare>(<[2**70] * 6 | np.array(3) | torch.tensor(0) | object()>) -> : give 6 integers
cache.<step | fits | prepare>(torch.ones(6, device='meta')) -> lengths is a Tensor without memory
cache.<step | fits>(lengths(9, UNIT), bands=[0]) -> do not shrink
cache.<step | fits>(lengths(10, UNIT), bands=<[] | '0' | 3 | [0.5] | [-1] | np.array(0)>) -> [KVCache.
--- slots of a cache
cache.<free | length | wait | swap_out | swap_in>(99) -> slot 99: the cache has slots 0 to 5
cache.<free | length | fork>(<None | 'a'>) -> slot is
cache.swap_in(None) -> slot is None: give what alloc() returned
cache.<free(4) | fork(4) | swap_out(4) | truncate(4, 0) | swap_out(5, bands=[1])> -> is free
cache.fork(2) -> slot 2 is swapped out
cache.fork(0, 9) -> need 9 free slots, 2 of 6
cache.fork(0, -1) -> n is -1
cache.swap_out(<2 | [0, 2]>) -> slot 2 is swapped out already
cache.swap_out([0, 0]) -> slot 0 is named twice
cache.swap_out({0: 1}) -> slots is {0: 1}: give slots that alloc() returned
cache.swap_in(<0 | [2, 0]>) -> slot 0 is not swapped out: call swap_out first
cache.swap_in([2, 2]) -> slot 2 is named twice
cache.swap_in([2, 99]) -> slot 99: the cache has slots 0 to 5
cache.swap_in('ab') -> slots is 'ab': give slots that alloc
cache.swap_out(0, bands=[2]) -> bands is [2]: name some of 0 to 1
cache.swap_out(0, bands=[1, 1]) -> band 1 is named twice
cache.swap_out(3, bands=[0, 1]) -> band 1 is swapped out already
cache.swap_in(3, bands=[0]) -> band 0 is not swapped out
cache.<fork(3) | publish(3, [4]) | swap_out(3) | write(3, 3, 0, kv, kv)> -> 1 is swapped out: call swap_in
cache.reorder([0, 1], [0]) -> 2 slots and 1 sources
cache.reorder([0], [1]) -> source 1 is none
cache.reorder([0, 0], [0, 0]) -> slot 0 is named twice
cache.reorder(<None, [0] | [0], None>) -> slot is None: give what alloc() returned
cache.truncate(0, 11) -> has 10 tokens
cache.truncate(0, -1) -> length is -1
cache.unshare(0, -1, 3) -> start is -1
cache.unshare(0, 5, 11) -> positions 5 to 11 of slot 0, which has 10 tokens
cache.unshare(0, 5, 2) -> positions 5 to 2
cache.wait(0, -1) -> layer is -1
--- tokens
cache.alloc(<'hello' | b'hello' | 5 | 1.5 | torch.ones(2)>) -> tokens
cache.<alloc([1.5]) | alloc(['a']) | alloc([2**63]) | publish(0, [1.5])> -> is no integer of 64 bits
cache.alloc(torch.ones(2, device='meta', dtype=torch.long)) -> tokens is a Tensor without
cache.<alloc([1], | publish(0, [4],> salt=[1]) -> salt is a list
cache.<alloc([1], | publish(0, [4],> salt=chr(0xd800)) -> cannot be encoded: give
cache.alloc(expect=-1) -> expect is -1
cache.alloc(expect=2**64) -> expect is 18446744073709551616: it must be at most 4,611
cache.publish(0, range(11)) -> 11 tokens were given, slot 0 has 10: give those whose K and V are in it
cache.publish(0, b'1' * 64) -> tokens is a bytes
cache.publish(0, torch.zeros(2, 2, dtype=torch.long)) -> shape (2, 2)
cache.publish(1, [4] * 5) -> disagree
--- K and V
cache.write(0, 0, 10, kv, kv) -> layer 0, slot 0, tokens 10 to 11: the slot has 10 tokens: call step() first
cache.write(0, [0, 1], [9, UNIT], *two) -> slot 1, tokens 16 to 17
cache.write(0, 2, 0, kv, kv) -> slot 2 is swapped out: call swap_in first
cache.write(0, 4, 0, kv, kv) -> slot 4 is free
cache.write(0, 6, 0, kv, kv) -> slot 6: the cache has slots 0 to 5
cache.write(4, 0, 0, kv, kv) -> layer 4: the cache has layers 0 to 3
cache.write('k', 0, 0, kv, kv) -> layer is a str: give an integer
cache.write(0, 0, <-1 | 2**63 | 'x'>, kv, kv) -> starts is
cache.write(0, [0, 1], [0], kv, kv) -> 2 slots and 1 starts
cache.write(0, [0, 1], [0, 0], kv, kv) -> 1 tokens for 2 slots: give counts=
cache.write(0, [0, 1], [0, 0], <swapped, ragged | ragged, swapped>, counts=[3, 3]) -> 2 tokens of 3 slots
cache.write(0, [0, 1], [0, 0], <swapped, batch | batch, swapped>) -> [3, 2, 2, 32], 2 tokens of 3 slots
cache.write(0, {0}, 0, kv, kv) -> slots is {0}: give an integer, or one for each
cache.write(0, [0], [0], kv, kv, counts=[2]) -> counts has 1 entries, 2 in all
cache.write(0, 0, 0, kv[:, :1], kv) -> layer 0 takes [tokens, 2, 32] or [slots, tokens, 2, 32]
cache.write(0, 0, 0, two[0], kv) -> k has 2 tokens and v 1
cache.write(0, 0, 0, [1.0], kv) -> k is a list: give a tensor
cache.write(0, 0, 0, kv.to('meta'), kv) -> on meta
cache.write(0, 0, 0, kv.clone().requires_grad_(), kv) -> detach
cache.write(0, 0, 0, kv) -> v is missing: the cache has V
cache.write(0, 0, 0, kv, kv.half()) -> torch.float32
--- requests
request(prompt=<None | [2**64] | [2.0] | 'text' | {1} | torch.ones(3) | torch.ones(2, 3).long()>) -> token ids
request(prompt=[1, 2**63]) -> is too large
request(prompt=(1, -1)) -> negative
request(prompt=<[] | 0>) -> the length of the prompt of request 'bad' is 0: it must be at least 1
request(salt=<['tenant'] | None | chr(0xd800)>) -> [Request] salt
request(<max_new_tokens | samples>=2.5) -> of request 'bad' is a float: give an integer
request(<max_new_tokens | samples>=None) -> of request 'bad' is a NoneType: give an integer
request(<max_new_tokens | samples>=0) -> of request 'bad' is 0: it must be at least 1
request(stop=None) -> set of token ids
request(stop=<{'stop'} | {-1} | {2**63} | [1.5]>) -> token id
request(id=[1]) -> hashable
Promises(tpot=<0 | -1 | math.inf | math.nan | 'soon' | None | [1]>) -> [Promises] tpot
Promises(1.0, ttft=<0 | -1 | math.inf | math.nan>) -> [Promises] ttft is
Promises(1.0, slower=<-0.1 | math.inf | math.nan | 'much'>) -> [Promises] slower
Scheduler(cache, token_budget=5.5) -> token_budget is a float
Scheduler(cache, promises=0.2) -> promises is a float: give a Promises
Scheduler(t) -> cache is a VTensor: give a vtensor.KVCache
LengthHistogram(<0 | -1 | 1.5 | math.nan>) -> [LengthHistogram] first is
idle.add(request(prompt=60, max_new_tokens=5)) -> max_len is 64
idle.add(request(samples=5)) -> 4 slots
busy.add(request(id='a')) -> choose another id
Scheduler(cache, token_budget=3) -> raise it
busy.plan() -> complete
busy.cancel('a') -> complete it first
busy.reorder('a', [0, 2]) -> has no sequences at work
busy.complete(plan, [1]) -> 2 sequences are due one
busy.complete(plan, [1, <2.5 | 2**63 | -1 | None | '1'>]) -> token id
busy.<complete(type(plan)(), []) | abandon(type(plan)())> -> under way
Engine(print, idle) -> [Engine] scheduler is a builtin_function_or_method: give a Scheduler
Engine(idle, print).submit(<None | 'request' | ('id', [1], 2)>) -> : give a Request
Engine(idle, print).submit(request(prompt=8)) -> token ids
--- replays
<PagedCache(0, 4, 64) | StaticCache(29, 8, 30)> -> give it more
<paged | static>.<fork(0) | reorder([0], [0]) | swap_in(0)> -> one sample each: take a KVCache
paged.swap_out([0]) -> no host memory
static.step([31, 0, 0]) -> a slot has 30
replay.model_shape('llama') -> pass one of
replay.open_cache('best', replay.Server(replay.model_shape('1x8x128'), 2**30, 4, 64, 2**21, 1)) -> pass one of
replay.replay('paged', paged, [], token_bytes=1, speed=0) -> over 0
replay.replay('paged', paged, [], token_bytes=1, <slo_ttft | slo_tpot>=<0.0 | math.nan>) -> over 0
--- recordings and pictures
trace.load(NO_PATH) -> [trace.load] path is
recording.export(NO_PATH) -> [trace.export] path is
recording.export('nowhere', profile=<5 | [] | object()>) -> [trace.export] torch's profiler gave no trace
recording.__enter__() -> [trace.record] this recording was used before: make another
trace.record().<events() | summary() | dropped | capacity | export('nowhere')> -> has not begun: enter it
plot.<page_map | sharing | fragmentation>(gone) -> is closed: draw it before
plot.<memory | timeline>(<[] | recording>) -> the trace is empty: record
plot.<memory | timeline>(3) -> got an int: give
plot.<sharing | fragmentation>([]) -> no tensors
plot.<sharing | fragmentation>([x]) -> Tensor: give
plot.page_map(<x | [1] | None>) -> give one VTensor, a KVCache or an Arena
"""
VALUES = {
    "NO_INTEGER": "1.5 | '3' | None | [1] | {} | object() | torch.ones(2) | np.float32(1) | 2j | math.nan",
    "NO_BYTES": "'1GB' | '-1' | '1e9' | '' | 'GiB' | '1 000' | 1.5 | math.inf | b'1GiB' | torch.ones(2)",
    "NO_STREAM": "-1 | 2**64 | '7' | 1.5 | True | object() | SimpleNamespace(cuda_stream='s') | NoStream()",
    "NO_PATH": "5 | None | [] | object()",
    "NO_TENSOR": "5 | None | 'x' | [1.0] | object()",
    "SIZE": "1.5 | '3' | [1] | 0 | -1 | 2**64",
}


def expanded(call: str) -> list[str]:
    """One for each way to choose among the alternatives in it."""
    for name, values in VALUES.items():
        inside = re.search(rf"<[^<>]*\b{name}\b[^<>]*>", call)
        call = re.sub(rf"\b{name}\b", lambda _, new=values if inside else f"<{values}>": new, call)
    parts = [part.split(" | ") for part in re.split("[<>]", call)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


LINES = [line for line in TABLE.strip().splitlines() if not line.startswith("---")]


SIZES = "num_layers num_kv_heads head_dim max_batch max_len value_head_dim bands tile lookahead".split()


class NoStream:
    """What CUDA's Python names a stream by, with a value that none has."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, -1


class Four:
    """An integer, as numpy's are, that compares with none."""

    def __index__(self) -> int:
        return 4


class Scene:
    """Tensors, an arena with blocks, and a cache: slot 0 has 10 tokens, 1 a published prompt, 2 is swapped
    out, and of 3 band 1 is; 4 and 5 are free."""

    def __init__(self, pool: vtensor.Pool) -> None:
        self.pool = pool
        self.t = filled(pool, 6, 3, capacity=8)
        self.rows = filled(pool, 6, 3, rows=(2,))
        self.floats = vtensor.zeros(2, 3, 5, 7, grow_dim=1, capacity=100, pool=pool)
        self.arena = vtensor.Arena(8 * 4096, pool=pool)
        self.arena.map([(0, 100)])
        self.blocks = vtensor.Blocks(self.arena, 4, [(0, 4096, 4096)])
        self.blocks.hold([0])
        self.layer = torch.nn.Linear(2, 2)
        self.gone = filled(pool, 4)
        self.gone.close()
        with trace.record() as self.recording:
            pass
        self.idle, self.busy = (Scheduler(self.cache_of(max_len=64)) for _ in range(2))
        self.busy.add(self.request(id="a", samples=2))
        self.plan = self.busy.plan()
        self.paged, self.static = PagedCache(8, 4, 64, frame_tokens=4), StaticCache(100, 8, 30)
        assert self.paged.alloc() == self.static.alloc() == 0
        self.cache = cache = make_cache(pool, bands=2, num_layers=4)
        for slot, prompt in enumerate([None, [5] * UNIT, None, None]):
            assert cache.alloc(prompt) == slot
        assert cache.step(lengths(10, UNIT, 4, 7))
        write(cache, 0, 0, range(10))
        cache.publish(1, [5] * UNIT)
        cache.swap_out(2)
        cache.swap_out(3, bands=[1])
        cache.wait(2)
        cache.wait(3)

    def make(self, *sizes, **change):
        return vtensor.empty(*sizes, **({"grow_dim": 1, "capacity": 16, "pool": self.pool} | change))

    def pool_of(self, **change):
        return vtensor.Pool(**({"budget": 1 << 20, "page_size": 4096} | change))

    def cache_of(self, **change):
        sizes = {"num_layers": 4, "num_kv_heads": 1, "head_dim": 8, "max_batch": 4, "max_len": 16}
        return vtensor.KVCache(**(sizes | {"pool": self.pool, "dtype": torch.float32} | change))

    def request(self, **change):
        return Request(**{"id": "bad", "prompt": [1, 2], "max_new_tokens": 2} | change)

    def names(self) -> dict:
        own = {name: getattr(self, name) for name in ("make", "pool_of", "cache_of", "request")}
        fresh = {"x": torch.ones(2, 1, 5, 7), "kv": torch.ones(1, 2, 32), "two": [torch.ones(2, 2, 32)] * 2}
        sizes = {"batch": (2, 3), "swapped": (3, 2), "ragged": (6,)}  # 3 tokens of 2 slots
        fresh |= {name: torch.ones(*first, 2, 32) for name, first in sizes.items()}
        return globals() | vars(self) | own | fresh

    def state(self):
        stats = dataclasses.asdict(self.pool.stats())
        counts = [n for name, n in stats.items() if name.startswith(("pages_u", "pages_m", "nbytes"))]
        tensors = (self.t, self.rows, self.floats)
        facts = [(t.length, t.capacity, t.address, t.stride(), page_ids(t), t.tolist()) for t in tensors]
        of_cache = [
            getattr(self.cache.stats(), name) for name in ("slots_used", "slots_swapped", "prefix_tokens")
        ]
        return (
            counts,
            stats["tensors"],
            facts,
            self.cache.lengths,
            of_cache,
            self.arena.stats(),
            self.blocks.mapped,
        )


def lengths(*first: int) -> list[int]:
    return [*first, *[0] * (6 - len(first))]


@pytest.fixture(scope="module")
def scene():
    """One for all: nothing that is refused changes it."""
    with open_pool("host") as pool:
        made = Scene(pool)
        yield made
        check_contents(made.cache, 0, range(10))
        assert made.busy.planned is made.plan and made.idle.unfinished == 0
        made.busy.complete(made.plan, torch.tensor([3, 4]))
        assert [sequence.output for sequence in made.busy.running[0].live] == [[3], [4]]
        with pytest.raises(vtensor.InvalidArgument, match="2 live sequences"):
            made.busy.reorder("a", [0, 2])
        made.blocks.release([0])
        made.arena.unmap([(0, 100)])
        assert made.arena.stats().pages_active == 0
        assert made.cache.swap_in(2) and made.cache.step(lengths(11, UNIT + 1, 4, 7), bands=[0])


@pytest.mark.keeps_pages
@pytest.mark.parametrize("line", LINES, ids=[line.partition(" ->")[0][:70] for line in LINES])
def test_it_is_refused_in_words(scene, line):
    pattern, _, words = line.partition(" -> ")
    before = scene.state()
    for call in expanded(pattern):
        with pytest.raises(vtensor.VTensorError) as caught:
            eval(call, scene.names())
        message = str(caught.value)
        assert words in message and message.startswith("["), (call, message)
        assert SHAPE_OF_A_MESSAGE.match(message), (call, message)
        assert "incompatible" not in message  # nanobind's own word
        assert scene.state() == before, call


# --- closed ------------------------------------------------------------------------------------------------

ANSWERED = "str(t); t.close(); t.pages(); t.nbytes_mapped; cache.close(); arena.close(); blocks.mapped"


def test_what_is_closed_says_so(pool):
    """Every operation, and every one of torch's."""
    t = filled(pool, 9, rows=(2,))
    cache, arena = make_cache(pool), vtensor.Arena(4096, pool=pool)
    blocks = vtensor.Blocks(arena, 1, [(0, 4096, 4096)])
    x, kv, slot = torch.zeros(2, 1, 1024, dtype=torch.uint8), torch.zeros(2, 1, 1, 16), cache.alloc()
    names = NAMES | {"t": t, "shared": t, "cache": cache, "arena": arena, "blocks": blocks, "pool": pool}
    for one in (t, cache, arena):
        one.close()
        one.close()  # again does nothing
    on_these = [code for code in OPERATIONS if re.match(r"(t|cache|arena|blocks)\b", code)]
    for code in (*on_these, *TORCH_OPERATIONS):
        if code not in ANSWERED.split("; "):
            with pytest.raises(vtensor.Closed, match="closed"):
                eval(code, names | {"x": x, "kv": kv, "slot": slot})
                raise AssertionError(code)
    with pytest.raises(vtensor.Closed, match=r"^\[shape\] "):  # not the name of torch's getter
        t.shape  # noqa: B018
    assert t.closed and t.pages() == [] and all("closed" in repr(one) for one in (t, cache, arena, blocks))
    pool.close()
    for call in (lambda: setattr(pool, "budget", 4096), lambda: quarter(pool, 1)):
        with pytest.raises(vtensor.Closed):
            call()
    assert pool.trim() == 0
    pool.wait_idle(1)


# --- too little memory -------------------------------------------------------------------------------------


def test_what_does_not_fit_the_budget_is_counted(pool_factory, kind):
    """I8, I9, in an error that is torch's, too."""
    pool = pool_factory(kind, 6)
    t, f = filled(pool, 14, 1), filled(pool, 6, 2)
    f.close()
    pool.trim()
    f = t.fork()
    source = torch.ones(16, t.shape[1], dtype=t.dtype)
    for call, words in (
        (lambda: t.extend(16), r"[VTensor.extend] need 5 pages of 4096 bytes, the pool has 2 of 6 free"),
        (lambda: t.append(source), r"[VTensor.append] need 5 pages of 4096 bytes, the pool has 2 of 6 free"),
        (lambda: quarter(pool, 12), "need 3 pages of 4096 bytes"),
        (lambda: vtensor.from_tensor(source, 0, 16, pool=pool), "need 4 pages"),
        (lambda: f.unshare(0, 14), "[VTensor.unshare] need 4 pages"),
    ):
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            call()
        error = caught.value
        assert words in str(error) and SHAPE_OF_A_MESSAGE.match(str(error)), error
        assert type(error) is vtensor.OutOfPages and isinstance(error, (MemoryError, torch.OutOfMemoryError))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is vtensor.OutOfPages and str(again) == str(error)
        assert pool.stats().pages_free == 2 and t.eq(1).all() and f.eq(1).all()
        assert sum(not made.closed for made in pool._each_tensor()) == 2  # though the error keeps its frames
        testing.check_invariants(pool)


def test_no_memory_for_a_long_index():
    run_snippet(
        """
        import re, resource
        pool = vtensor.Pool("cpu", page_size=4096, budget=1 << 20, prefetch=0)
        t = filled(pool, 6, rows=(2,))
        index = [0] * (8 << 20)
        held = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (held + (16 << 20), resource.RLIM_INFINITY))
        try:
            t.reindex(index)
        except vtensor.OutOfPages as error:
            assert isinstance(error, MemoryError) and "ulimit" in str(error), error
        else:
            raise AssertionError("there was memory")
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert t.shape[:2] == (2, 6) and t.eq(1).all()
        t.extend(1)
        pool.close()
        """
    ).check()


def test_tables_are_refused_before_they_are_made():
    """Under a limit of addresses that they pass many times."""
    run_snippet(
        """
        import resource
        have = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (have + (1 << 30),) * 2)
        for sizes in ({"max_batch": 10**9}, {"num_layers": 10**9}):
            options = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "max_batch": 1, "max_len": 16}
            try:
                vtensor.KVCache(**(options | sizes), device="cpu")
            except vtensor.CapacityExceeded as error:
                assert "GiB free" in str(error) or "MiB free" in str(error), error
            else:
                raise AssertionError(sizes)
        """
    ).check()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_host_memory_that_is_refused_while_falling_asleep(host, monkeypatch, error):
    t = vtensor.empty(3, grow_dim=0, capacity=64, pool=host).fill_(3)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", Mock(side_effect=error("you tried to allocate")))
        words = r"\[Pool.sleep\] need .* host memory.*you tried.*keep the contents in a folder"
        with pytest.raises(vtensor.OutOfPages, match=words):
            host.sleep(contents="host")
    assert t.eq(3).all() and host.stats().nbytes_asleep == 0


# --- devices -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_cuda_pool_without_a_gpu():
    for make in (
        lambda: vtensor.Pool("cuda"),
        lambda: vtensor.default_pool("cuda"),
        lambda: vtensor.empty(2, 3, grow_dim=0, capacity=8, device="cuda"),
    ):
        for _ in range(2):
            with pytest.raises(vtensor.VTensorError, match="use the CPU") as caught:
                make()
            assert SHAPE_OF_A_MESSAGE.match(str(caught.value))


# --- taken -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [4, Four(), np.int64(4), torch.tensor(4)], ids=["int", "index", "numpy", "torch"]
)
def test_integers_of_any_kind(host, number):
    """As torch takes them."""
    sizes = dict.fromkeys(SIZES, number)
    with vtensor.KVCache(
        **sizes, layer_group=1, windows=[number] * 4, pool=host, dtype=torch.float32
    ) as made:
        assert made[3][0].shape == (4, 4, 4, 4) and len(made.bands) == 4
    assert quarter(host).extend(number).extend(True).shrink(number).length == 1


@pytest.mark.parametrize(
    "one", [torch.tensor(0), np.array(0), np.int64(0), torch.tensor([0]), np.array([0]), (0,)]
)
def test_a_slot_of_any_kind(host_cache, one):
    host_cache.alloc()
    assert host_cache.step(lengths(1))
    host_cache.swap_out(one)
    assert host_cache.lengths == [0] * 6
    host_cache.pool.wait_idle()
    assert host_cache.swap_in(one)
    assert host_cache.lengths == lengths(1)


def test_bytes_in_words_and_in_numbers():
    """One parser for options and for the command line."""
    for nbytes in ("64KiB", "64 kib", "65536", 65536, 65536.0, np.float64(65536), np.int64(65536)):
        with vtensor.Pool("cpu", page_size=4096, budget=nbytes) as pool:
            assert pool.budget == 65536
            pool.budget = nbytes
    with vtensor.Pool("cpu", page_size="64KiB", budget=1e9, prefetch="0", cache="1.5MiB") as pool:
        assert pool.page_size == 65536 and pool.budget == 10**9 // 65536 * 65536


def test_defaults_of_torch(host):
    """What is not named is as torch has it: the device, and the dtype."""
    sizes = {"num_layers": 3, "num_kv_heads": 1, "head_dim": 16, "max_batch": 1, "max_len": 16}
    torch.set_default_dtype(torch.float64)
    try:
        with vtensor.KVCache(**sizes, pool=host) as cache:
            assert cache.dtype is torch.float64 and cache.num_layers == len(cache) == 3
    finally:
        torch.set_default_dtype(torch.float32)
    makes = (
        lambda **more: vtensor.KVCache(**sizes, **more),
        lambda **more: vtensor.empty(0, grow_dim=0, capacity=8, **more),
        lambda **more: vtensor.zeros(0, grow_dim=0, capacity=8, **more),
    )
    for make in makes:
        with torch.device("meta"):
            with pytest.raises(vtensor.InvalidArgument, match="device is meta: vtensor has drivers for"):
                make()
            make(device="cpu").close()
            make(pool=host).close()
        made = make()
        assert made.pool.device.type == "cpu"
        made.close()


def test_a_lease_takes_a_list_or_one_by_one(pool):
    k, v = filled(pool, 6), filled(pool, 6)
    for given, held in (((k, v), 4), (([k, v],), 4), (((k, v),), 4), (([k],), 2), ((k,), 2)):
        with vtensor.lease(*given):
            k.truncate(0)
            v.truncate(0)
            pool.wait_idle()  # until what was ready ahead is gone
            assert pool.stats().pages_pinned == held
        pool.wait_idle()
        assert pool.stats().pages_pinned == 0
        k.extend(6)
        v.extend(6)

"""Questions 4 to 7 and 9: vtensor's tensors on a GPU, beside plain memory.

Heads are those of Llama-3-8B: 32 of queries, 8 of keys and values, of 128, in bf16.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import vtensor
from benchmarks.harness import interleave

from .driver import PAGE
from .mapping import a_page_s_life, tell
from .session import OUT_OF_TIME, Session, error_of, first_line

MIB = 1 << 20
QUERY_HEADS, HEADS, DIM = 32, 8, 128
PER_PAGE = PAGE // (HEADS * DIM * 2)  # positions of a row in a page: 1,024
BF16 = torch.bfloat16
Pair = tuple[torch.Tensor, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]  # [B, S, H, D], causal


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def noise(session: Session, *shapes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    draw = torch.Generator(session.device.name).manual_seed(0)
    for shape in shapes:
        yield torch.randn(shape, dtype=BF16, device=session.device.name, generator=draw)


def event_time(session: Session, work: Callable[[], object]) -> float:
    """Milliseconds of one launch, of ten in a row that wait in the stream when the first begins."""
    device, count = session.device, session.pick(10, 1)
    stream = device.current_stream()
    device.spin(stream, 1e-3)
    start = device.mark(stream)
    for _ in range(count):
        device.launch(stream, work)
    end = device.mark(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / count


# --- 4. The same attention kernel over a VTensor and over plain memory of the same layout. Where memory lies
# decides some percent of such a time: every trial allocates anew, in an order that changes, and the control
# is a second plain allocation.


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    length: int  # a multiple of what a page of any size holds, so that all layouts are the same
    queries: int


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@contextmanager
def sdpa_by(backend: SDPBackend) -> Iterator[Attention]:
    with sdpa_kernel(backend):
        yield sdpa


@contextmanager
def flex() -> Iterator[Attention]:
    """Without a mask: a causal one has to be made for each length, and is no part of what is compared."""
    importlib.import_module("triton")
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    yield lambda q, k, v, causal: compiled(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)


@contextmanager
def package(module: str) -> Iterator[Attention]:
    function = importlib.import_module(module).flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        result = function(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    yield attend


# FlexAttention last: it compiles for half a minute.
KERNELS = {
    "torch SDPA, FlashAttention": lambda: sdpa_by(SDPBackend.FLASH_ATTENTION),
    "torch SDPA, cuDNN": lambda: sdpa_by(SDPBackend.CUDNN_ATTENTION),
    "FlashAttention 2": lambda: package("flash_attn"),
    "FlashAttention 3": lambda: package("flash_attn_interface"),
    "FlashAttention 4": lambda: package("flash_attn.cute"),
    "FlexAttention, compiled": flex,
}


def attention(session: Session) -> None:
    shapes = session.pick(
        (
            Shape("decode, batch 16, 16k", 16, 16384, 1),
            Shape("decode, batch 1, 128k", 1, 131072, 1),
            Shape("causal prefill, batch 1, 16k", 1, 16384, 16384),
        ),
        (Shape("decode, batch 1, 2k", 1, 2048, 1), Shape("causal, batch 1, 2k", 1, 2048, 16)),
    )
    for name, make in KERNELS.items():
        try:
            with make() as attend:
                for shape in shapes[:1] if make is flex else shapes:  # each shape is compiled for
                    if session.time_left() < 5:
                        session.skipped(f"{name}, {shape.name}", OUT_OF_TIME)
                    else:
                        compare(session, f"{name}, {shape.name}", attend, shape)
        except Exception as error:
            session.skipped(name, first_line(error))


def compare(session: Session, what: str, attend: Attention, shape: Shape) -> None:
    size, queries = (shape.batch, shape.length, HEADS, DIM), (shape.batch, shape.queries, QUERY_HEADS, DIM)
    q, *values = noise(session, queries, size, size)
    causal = shape.queries > 1
    medians: dict[str, list[float]] = defaultdict(list)
    differing = 0
    for trial in session.rounds(4, 2, seconds=5):
        with allocated(session, values, trial) as pairs:
            expected = attend(q, *pairs["plain"], causal)
            for pair in pairs.values():
                differing += int((attend(q, *pair, causal) != expected).sum())
            samples = {
                which: lambda pair=pair: event_time(session, lambda: attend(q, *pair, causal))
                for which, pair in pairs.items()
            }
            for which, times in interleave(samples, session.pick(15, 2), warmup=1).items():
                medians[which].append(median(times))
    plain, control = medians.pop("plain"), medians.pop("control")
    session.figure(f"{what}, plain", plain, "ms", "CUDA events, median of each trial")
    method = "CUDA events around 10 launches, interleaved; medians of trials with fresh allocations / plain"
    for which, ours in medians.items():
        session.ratio(f"{what}, {which}", ours, plain, control, method)
    session.fact(f"{what}: elements that differ", differing)


@contextmanager
def allocated(session: Session, values: list[torch.Tensor], trial: int) -> Iterator[dict[str, Pair]]:
    """K and V over VTensors and, twice, in plain memory, with the same values and strides."""
    batch, length = values[0].shape[:2]
    pools: list[Any] = []

    def empty(page_size: int, budget: int, positions: int) -> Any:
        pools.append(session.device.pool(page_size=page_size, budget=budget, prefetch=0))
        sizes = (batch, positions, HEADS, DIM)
        return [vtensor.empty(*sizes, grow_dim=1, capacity=length, dtype=BF16, pool=pools[-1]) for _ in "kv"]

    def growing(size: int) -> Pair:
        k, v = empty(size, 2 * values[0].nbytes + 8 * size, length)
        return k.copy_(values[0]), v.copy_(values[1])

    sizes = session.pick((2 * MIB, 32 * MIB), (2 * MIB, 4 * MIB))
    strides = {size: empty(size, 8 * size, 0)[0].stride() for size in sizes}

    def plain() -> Pair:
        k, v = (torch.empty_strided(x.shape, strides[sizes[0]], dtype=BF16, device=x.device) for x in values)
        return k.copy_(values[0]), v.copy_(values[1])

    makers: dict[str, Callable[[], Pair]] = {"plain": plain, "control": plain}
    for size in sizes:
        if strides[size] == strides[sizes[0]]:  # another layout is another kernel
            makers[f"VTensor of {size // MIB} MiB pages"] = lambda size=size: growing(size)
    made = {which: makers[which]() for which in random.Random(trial).sample(list(makers), len(makers))}
    try:
        yield made
    finally:
        session.device.synchronize()
        made.clear()
        for pool in pools:
            pool.close()


# --- 5. Layers that share a page: the kernel's time over group sizes. A group of G layers lies interleaved in
# one VTensor [batch, positions, G, heads, dim]; a layer is a strided view of it, so that a page holds 1 / G
# as many positions of each. The baseline is a group of one, the control another of one.


def layer_groups(session: Session) -> None:
    batch, length = session.pick((8, 8192), (1, 1024))
    groups = session.pick((1, 2, 4, 8, 16, 32), (1, 2))
    budget = 2 * batch * length * HEADS * DIM * 2 * (sum(groups) + 1) + 64 * PAGE
    pool = session.device.pool(page_size=PAGE, budget=budget, prefetch=0)
    sizes = {"control": 1, **{f"group of {size}": size for size in groups}}
    made: dict[str, list[Any]] = {}
    for name in random.Random(0).sample(list(sizes), len(sizes)):
        shape = (batch, length, sizes[name], HEADS, DIM)
        options = {"grow_dim": 1, "capacity": length, "dtype": BF16, "pool": pool}
        made[name] = [vtensor.empty(*shape, **options).normal_() for _ in "kv"]
    (q,) = noise(session, (batch, 1, QUERY_HEADS, DIM))
    launched: dict[str, int] = defaultdict(int)

    def attend(name: str) -> None:
        layer = launched[name] % sizes[name]  # another each time, as a model goes through its layers
        launched[name] += 1
        sdpa(q, *(x[:, :, layer] for x in made[name]), False)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        samples = {name: lambda name=name: event_time(session, lambda: attend(name)) for name in sizes}
        taken = interleave(samples, session.pick(60, 2), warmup=session.pick(3, 1))
    session.device.synchronize()
    method = f"torch SDPA, FlashAttention; batch {batch}, {length} keys, 1 query; CUDA events, interleaved"
    one, control = taken.pop("group of 1"), taken.pop("control")
    session.figure("attention of one layer, group of 1", one, "ms", method)
    for name, times in taken.items():
        session.ratio(name, times, one, control, method)
    made.clear()
    pool.close()


# --- 6. A decode loop. Each step appends a position to K and V of every layer and attends over all of them;
# its time goes to the end of the device's work, as a loop that samples a token waits for it. Growth from 1k
# to 32k is sampled: in windows of steps around lengths at which a page ends. Each window is run several times
# over, back from its start.

LAYERS = 4  # of Llama's 32, so that batch 64 at 32k fits beside torch.cat's copies


class Concatenated:
    """K and V of all layers, [batch, length, HEADS, DIM]; `rewind` goes back to a shorter length."""

    tensors: list[Any] = []  # the VTensors, if any
    nbytes = 0  # of pages; 0 where torch's allocator knows

    def __init__(self, session: Session, filled: Pair, layers: int, most: int) -> None:
        self.kv = [tuple(x.contiguous() for x in filled) for _ in range(layers)]

    def append(self, layer: int, new: Pair) -> Any:
        self.kv[layer] = tuple(torch.cat(both, dim=1) for both in zip(self.kv[layer], new, strict=True))
        return self.kv[layer]

    def rewind(self, length: int) -> None:
        self.kv = [tuple(x[:, :length] for x in pair) for pair in self.kv]

    def close(self) -> None:
        pass


class Preallocated(Concatenated):
    def __init__(self, session: Session, filled: Pair, layers: int, most: int) -> None:
        self.kv = [tuple(x.new_zeros(x.shape[0], most, HEADS, DIM) for x in filled) for _ in range(layers)]
        for pair in self.kv:
            for buffer, x in zip(pair, filled, strict=True):
                buffer[:, : x.shape[1]].copy_(x)
        self.rewind(filled[0].shape[1])

    def append(self, layer: int, new: Pair) -> Any:
        at = self.lengths[layer]
        self.lengths[layer] = at + 1
        for buffer, x in zip(self.kv[layer], new, strict=True):
            buffer[:, at : at + 1].copy_(x)
        return [buffer[:, : at + 1] for buffer in self.kv[layer]]

    def rewind(self, length: int) -> None:
        self.lengths = [length] * len(self.kv)


class Growing(Concatenated):
    ahead = 0

    def __init__(self, session: Session, filled: Pair, layers: int, most: int) -> None:
        budget = int(session.device.free_memory() * 0.85) // PAGE * PAGE
        self.pool = session.device.pool(page_size=PAGE, budget=budget, prefetch=self.ahead)
        sizes = (filled[0].shape[0], 0, HEADS, DIM)
        options = {"grow_dim": 1, "capacity": most, "dtype": BF16, "pool": self.pool}
        self.kv = [tuple(vtensor.empty(*sizes, **options).append(x) for x in filled) for _ in range(layers)]
        self.tensors = [t for pair in self.kv for t in pair]

    def append(self, layer: int, new: Pair) -> Any:
        return [t.append(x) for t, x in zip(self.kv[layer], new, strict=True)]

    def rewind(self, length: int) -> None:
        for t in self.tensors:
            t.truncate(length)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.pool.stats().pages_used * PAGE

    def close(self) -> None:
        for t in self.tensors:
            t.close()
        self.pool.close()


class GrowingAhead(Growing):
    ahead = 1 << 30  # bytes a tensor: a page of each row, of as many as a question has


GROWERS: dict[str, type[Concatenated]] = {
    "torch.cat": Concatenated,
    "preallocated": Preallocated,
    "preallocated again": Preallocated,
    "VTensor, synchronous": Growing,
    "VTensor with the worker": GrowingAhead,
}


def decode(session: Session) -> None:
    layers = session.pick(LAYERS, 1)
    session.fact("layers", f"{layers} of 32; tokens/s are those of these layers' attention")
    lengths, batches = session.pick((1024, 8192, 32768), (1024,)), session.pick((1, 4, 16, 64), (1,))
    # The largest last: it takes a third of the time.
    windows = sorted(((batch, length) for batch in batches for length in lengths), key=math.prod)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for batch, length in windows:
            window(session, batch, length, layers)


def window(session: Session, batch: int, length: int, layers: int) -> None:
    """All growers around `length`, where a page ends, at this batch size."""
    steps = session.pick(128, 6)
    what = f"batch {batch}, {length:,} positions"
    needed = 2 * layers * batch * (length + steps // 2) * HEADS * DIM * 2
    if session.time_left() < 6 + needed / 6e8:  # filling and mapping take most of it
        session.skipped(what, OUT_OF_TIME)
        return
    start, most = length - steps // 2, (length // PER_PAGE + 2) * PER_PAGE
    row, one = (1, start, HEADS, DIM), (batch, 1, HEADS, DIM)
    k, v, *new, q = noise(session, row, row, one, one, (batch, 1, QUERY_HEADS, DIM))
    filled = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
    outputs: dict[str, torch.Tensor] = {}
    for name in random.Random(length + batch).sample(list(GROWERS), len(GROWERS)):
        before = session.device.forget_peak()
        try:
            grower = GROWERS[name](session, filled, layers, most)
            try:
                taken, outputs[name] = repeat(session, grower, layers, q, (new[0], new[1]), start, steps)
                memory = (session.device.peak() - before + grower.nbytes) / needed
            finally:
                session.device.synchronize()
                grower.close()
                del grower
            tell_steps(session, f"{name}, {what}", batch, -start % PER_PAGE, taken)
            session.fact(f"memory of {name}, {what}, times what the positions need", round(memory, 3))
        except Exception as error:
            session.skipped(f"{name}, {what}", first_line(error))
    wrong = [n for n, x in outputs.items() if not torch.allclose(x, outputs[next(iter(outputs))], 2e-2, 2e-2)]
    session.fact(f"results that differ, {what}", wrong or "none")


def repeat(
    session: Session, grower: Concatenated, layers: int, q: torch.Tensor, new: Pair, start: int, steps: int
) -> tuple[list[list[float]], torch.Tensor]:
    """Seconds of each step, by round; and the last output."""
    rounds, output = [], q
    for done in range(session.pick(6, 2)):
        if done:
            grower.rewind(start)
            session.device.synchronize()
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            with vtensor.lease(*grower.tensors) if grower.tensors else contextlib.nullcontext():
                for layer in range(layers):
                    output = sdpa(q, *grower.append(layer, new), False)
            session.device.synchronize()
            times.append(time.perf_counter() - begun)
        rounds.append(times)
    return rounds, output.clone()


def tell_steps(session: Session, what: str, batch: int, at: int, taken: list[list[float]]) -> None:
    """The figures of one grower, of whose steps number `at` begins a page."""
    first, *rounds = taken  # kernels are loaded in the first, and pages are fresh
    rates = [batch * len(times) / sum(times) for times in rounds]
    session.figure(what, rates, "tokens/s", "host clock, whole windows")
    ended = "host clock, to the end of the device's work"
    session.figure(f"step of {what}", [seconds * 1e3 for times in rounds for seconds in times], "ms", ended)
    session.figure(f"step that begins a page, {what}", [times[at] * 1e3 for times in rounds], "ms", ended)
    session.figure(f"the same with fresh memory, {what}", [first[at] * 1e3], "ms", ended)


# --- 7. A CUDA graph captured once, and replayed while the tensor grows beneath it. It holds one query's
# attention over the whole reservation, of which the length in a device tensor says how much is there. It
# gathers rows below that length only, so that what is not mapped is not read.


def attend_to(
    q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, length: torch.Tensor
) -> torch.Tensor:
    """[HEADS, DIM] of q over the first `length` rows of kv [capacity, 2, HEADS, DIM]; float32."""
    rows = kv.index_select(0, torch.minimum(positions, length - 1))
    k, v = rows[:, 0].float(), rows[:, 1].float()
    scores = (k * q).sum(-1) / DIM**0.5
    scores = scores.masked_fill((positions >= length).unsqueeze(1), float("-inf"))
    return (scores.softmax(0).unsqueeze(-1) * v).sum(0)


def graphs(session: Session) -> None:
    device, name = session.device, session.device.name
    capacity, step = session.pick(24, 4) * PER_PAGE, session.pick(97, 500)
    shape = (capacity, 2, HEADS, DIM)
    source, q = noise(session, shape, (HEADS, DIM))
    q, positions = q.float(), torch.arange(capacity, device=name)
    length = torch.full((1,), 10, device=name)
    result = torch.empty(HEADS, DIM, device=name)
    pool = device.pool(page_size=PAGE, budget=2 * source.nbytes + 8 * PAGE, prefetch=0)
    t = vtensor.empty(0, *shape[1:], grow_dim=0, capacity=capacity, dtype=BF16, pool=pool).append(source[:10])
    # The whole reservation as one tensor: only what the graph gathers from it is mapped.
    full = session.tensor_at(t.address, shape, BF16)
    with vtensor.lease(t):
        replay = device.capture(lambda: result.copy_(attend_to(q, full, positions, length)))

    wrong = identical = crossings = 0
    times, growths = [], []
    while t.length + step <= capacity and session.time_left() > 4:
        before = t.nbytes_mapped
        start = time.perf_counter()
        t.append(source[t.length : t.length + step])
        growths.append((time.perf_counter() - start) * 1e6)
        crossings += t.nbytes_mapped > before
        length.fill_(t.length)
        result.zero_()
        device.synchronize()
        start = time.perf_counter()
        replay()
        device.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        expected = attend_to(q, source, positions, length)
        wrong += not torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
        identical += torch.equal(result, expected)
    session.figure(f"append of {step} positions between replays, no look-ahead", growths)
    session.figure("replay over the growing tensor", times, "us", "host clock, to the end of the replay")
    session.fact("replays", len(times))
    session.fact("pages mapped between replays, times", crossings)
    session.fact("replays with a wrong result, to 1e-4 of the same kernels over a plain tensor", wrong)
    session.fact("replays with a result that is the same bit for bit", identical)

    answers: list[str] = []
    out = torch.zeros(16, device=name)

    def calls_in_a_capture() -> None:
        out.add_(1)
        answers[:] = a_page_s_life(session.driver)

    ended = error_of(lambda: (device.capture(calls_in_a_capture, warmup=0)(), device.synchronize()))
    session.fact("VMM calls during a capture, mode global", ", ".join(answers))
    session.fact("the error of that capture, and what its replay added", f"{ended}, {int(out[0])}")


# --- 9. Torch operations that walk a whole storage, over a plain view of a tensor of several rows. The
# storage has holes between the rows (I3's exception), which fault on a GPU. Each runs in a process of its
# own.

OPERATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "clone, which reads the view only": lambda view: view.clone(),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda view: torch.save(view, io.BytesIO()),
    "untyped_storage().clone()": lambda view: view.untyped_storage().clone(),
}


def torch_copies(session: Session) -> None:
    with ThreadPoolExecutor(len(OPERATIONS)) as together:
        ends = list(together.map(lambda case: session.apart(copy_in_process, case, seconds=30), OPERATIONS))
    for case, end in zip(OPERATIONS, ends, strict=True):
        tell(session, case, end)


def copy_in_process(session: Session, case: str) -> None:
    pool = session.device.pool(page_size=PAGE, budget=64 * PAGE, prefetch=0)
    t = vtensor.empty(4, 300, HEADS, DIM, grow_dim=1, capacity=16384, dtype=BF16, pool=pool).fill_(1)
    session.device.synchronize()
    view = t.alias()

    def check() -> None:
        if not bool((view == 1).all()):
            raise ValueError("wrong contents")

    session.fact("bytes of the storage", view.untyped_storage().nbytes())
    session.fact("bytes mapped", t.nbytes_mapped)
    session.fact("begun", True)
    for what, work in (
        ("error", lambda: OPERATIONS[case](view)),
        ("error of reading the view afterwards", check),
        ("error of growing the tensor afterwards", lambda: t.extend(2000)),
    ):
        session.fact(what, error_of(lambda work=work: (work(), session.device.synchronize())))

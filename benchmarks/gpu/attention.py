"""4. The same attention kernel over a VTensor and over plain memory of the same layout.

Where memory lies decides some percent of such a time: every trial allocates anew, in an order that changes,
and the control is a second plain allocation. Heads as in Llama-3-8B: 32 of queries, 8 of keys and values, of
128.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import vtensor
from benchmarks.harness import interleave

from .pools import open_pool
from .session import OUT_OF_TIME, Session, first_line

MIB = 1 << 20
QUERY_HEADS, HEADS, DIM = 32, 8, 128
Attention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor
]  # q, k, v [B, S, H, D], causal
Pair = tuple[torch.Tensor, torch.Tensor]


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
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError("triton is not installed")
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        # Without a mask: a causal one has to be made for each length, and is no part of what is compared.
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, enable_gqa=True)

    yield attend


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


def run(session: Session) -> None:
    shapes = session.pick(
        (
            Shape("decode, batch 16, 16k", 16, 16384, 1),
            Shape("decode, batch 1, 128k", 1, 131072, 1),
            Shape("causal prefill, batch 1, 16k", 1, 16384, 16384),
        ),
        (Shape("decode, batch 1, 2k", 1, 2048, 1), Shape("causal, batch 1, 2k", 1, 2048, 16)),
    )
    pages = session.pick((2 * MIB, 32 * MIB), (2 * MIB, 4 * MIB))
    for name, make in KERNELS.items():
        worst: list[float] = []
        differing = 0
        try:
            with make() as attend:
                for shape in shapes:
                    if name.startswith("Flex") and shape != shapes[0]:
                        continue  # each shape is compiled for
                    if session.time_left() < 5:
                        session.skipped(f"{name}, {shape.name}", OUT_OF_TIME)
                        continue
                    ratios, wrong = compare(session, name, attend, shape, pages)
                    worst += ratios
                    differing += wrong
        except Exception as error:
            session.skipped(name, first_line(error))
        if worst:
            session.answer(
                f"{name}: VTensor against plain memory {min(worst):.3f} to {max(worst):.3f} times (medians "
                f"over shapes and page sizes), {differing} elements differ."
            )


def compare(
    session: Session, name: str, attend: Attention, shape: Shape, page_sizes: tuple[int, ...]
) -> tuple[list[float], int]:
    """The ratios of the medians, by page size, and how many elements of the results differ."""
    target = session.device.torch_device
    generator = torch.Generator(target).manual_seed(0)

    def random_tensor(length: int, heads: int) -> torch.Tensor:
        size = (shape.batch, length, heads, DIM)
        return torch.randn(size, dtype=torch.bfloat16, device=target, generator=generator)

    q = random_tensor(shape.queries, QUERY_HEADS)
    values = random_tensor(shape.length, HEADS), random_tensor(shape.length, HEADS)
    causal = shape.queries > 1
    medians: dict[str, list[float]] = defaultdict(list)
    differing = 0
    for trial in session.rounds(4, 2, seconds=5):
        with allocated(session, values, page_sizes, trial) as pairs:
            expected = attend(q, *pairs["plain"], causal)
            for pair in pairs.values():
                differing += int((attend(q, *pair, causal) != expected).sum())
            samples = {
                which: lambda pair=pair: event_time(session, lambda: attend(q, *pair, causal))
                for which, pair in pairs.items()
            }
            taken = interleave(samples, session.pick(15, 2), warmup=1)
            for which, times in taken.items():
                medians[which].append(sorted(times)[len(times) // 2])
    method = "CUDA events around 10 launches, interleaved; medians of trials with fresh allocations / plain"
    session.figure(
        f"{name}, {shape.name}, plain", medians["plain"], "ms", "CUDA events, median of each trial"
    )
    ratios = [
        session.ratio(
            f"{name}, {shape.name}, {which}", medians[which], medians["plain"], medians["control"], method
        )
        for which in medians
        if which not in ("plain", "control")
    ]
    return ratios, differing


def event_time(session: Session, work: Callable[[], object]) -> float:
    """Milliseconds of one launch, of ten in a row that wait in the stream when the first begins."""
    device, count = session.device, session.pick(10, 1)
    stream = current_stream(session)
    device.spin(stream, 1e-3)
    start = device.mark(stream)
    for _ in range(count):
        device.launch(stream, work)
    end = device.mark(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / count


_stand_in: list[object] = []


def current_stream(session: Session) -> object:
    """The stream that torch launches into; in a rehearsal one that stands in for it."""
    if not session.rehearsal:
        return torch.cuda.current_stream()
    if not _stand_in:
        _stand_in.append(session.device.stream())
    return _stand_in[0]


def strides_of(session: Session, x: torch.Tensor, page_size: int) -> tuple[int, ...]:
    """The strides of a VTensor of x's shape with such pages."""
    with open_pool(session, page_size, 8 * page_size) as pool:
        sizes = (x.shape[0], 0, *x.shape[2:])
        return vtensor.empty(*sizes, grow_dim=1, capacity=x.shape[1], dtype=x.dtype, pool=pool).stride()


@contextmanager
def allocated(
    session: Session, values: Pair, page_sizes: tuple[int, ...], trial: int
) -> Iterator[dict[str, Pair]]:
    """K and V over VTensors and, twice, in plain memory, with the same values and strides."""
    pools = []
    strides = [strides_of(session, values[0], size) for size in page_sizes]

    def plain() -> Pair:
        k, v = (torch.empty_strided(x.shape, strides[0], dtype=x.dtype, device=x.device) for x in values)
        return k.copy_(values[0]), v.copy_(values[1])

    def growing(page_size: int) -> Pair:
        pool = open_pool(session, page_size, 2 * values[0].nbytes + 8 * page_size)
        pools.append(pool)
        length = values[0].shape[1]
        k, v = (vtensor.from_tensor(x, grow_dim=1, capacity=length, pool=pool) for x in values)
        return k, v

    makers: dict[str, Callable[[], Pair]] = {"plain": plain, "control": plain}
    for size, stride in zip(page_sizes, strides, strict=True):
        if stride != strides[0]:
            continue  # another layout is another kernel
        makers[f"VTensor of {size // MIB} MiB pages"] = lambda size=size: growing(size)
    names = list(makers)
    random.Random(trial).shuffle(names)
    made = {which: makers[which]() for which in names}
    try:
        yield made
    finally:
        session.device.synchronize()
        for which, pair in made.items():
            if which.startswith("VTensor"):
                for t in pair:
                    t.close()
        for pool in pools:
            pool.close()

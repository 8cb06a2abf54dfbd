"""What the attention shims add to the kernel call they pass on: their own time, and its share at 8k keys.

FlashAttention's kernels need a GPU: where 2 is installed and runs, its calls are the bare ones. On a CPU a
module of the same functions takes its place. For the shims' own time these do nothing; for the share at 8k
keys they are SDPA, as a user would write it. The bare call reads the same memory as the shim's, because what
a cache of the processor still holds counts for more than a shim. The share is that of a step over several
layers with memory of their own, as a model takes it: of one call between others the shim's code would be
cold, and not the bare call's, which all of them run.
Not measured here: 3 and 4, whose functions differ in how the shims pass arguments on only.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from vtensor.integrations import flash_attention, sdpa
from vtensor.integrations import flex_attention as flex

import vtensor

from .harness import Bar, Figure, Sample, Settings, clock, excess, interleave, slowdown

QUERY_HEADS, HEADS, HEAD_DIM = 32, 8, 128  # of Llama-3-8B
MOST_MICROSECONDS = 15
MOST_SLOWDOWN = 1.01
CALLS = 50  # one alone is too short for the clock
LAYERS = 8
FEW = 2  # keys

Call = Callable[[int], object]  # with its number in the sample: calls go over the layers in turn


@dataclass(frozen=True)
class Case:
    """A call by the shim, and the bare kernel's; ``undo`` takes back what calls have appended."""

    name: str
    ours: Call
    bare: Call
    undo: Callable[[], object] = lambda: None
    against: str = "the bare call"


def run(settings: Settings) -> list[Figure]:
    figures = []
    length = settings.pick(8192, 256)
    with torch.no_grad():
        for kernel, keys, figure_of in ((nothing, FEW, own_time), (attend, length, share)):
            with module(settings, kernel) as flash:
                # Of those that do nothing the keys do not count, but there is to be room for all appends, and
                # FlashAttention 2 appends to no fewer than there are query heads to a head of K.
                of_flash = flash_cases(settings, flash, max(keys, CALLS + QUERY_HEADS // HEADS))
                for case in chain(of_flash, sdpa_cases(settings, keys)):
                    figures.append(figure_of(settings, case, keys))
            if not settings.quick:  # it compiles for seconds
                figures += [figure_of(settings, case, keys) for case in flex_cases(settings, keys)]
    return figures


def own_time(settings: Settings, case: Case, length: int) -> Figure:
    taken = measured(settings, case, CALLS, 101)
    return excess(case.name, case.against, *taken, bar=Bar(MOST_MICROSECONDS))


def share(settings: Settings, case: Case, length: int) -> Figure:
    taken = measured(settings, case, LAYERS, 41)
    return slowdown(f"{case.name} over {length:,} keys", case.against, *taken, bar=Bar(MOST_SLOWDOWN))


def measured(
    settings: Settings, case: Case, calls: int, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a call by the shim, of the bare one, and of that again as the control."""

    def sample(call: Call) -> Sample:
        def several() -> None:
            for number in range(calls):
                call(number)

        def once() -> float:
            seconds = clock(several, settings.wait) / calls
            case.undo()
            return seconds

        return once

    samples = {"ours": sample(case.ours), "bare": sample(case.bare), "control": sample(case.bare)}
    taken = interleave(samples, settings.pick(rounds, 3), warmup=3)
    return taken["ours"], taken["bare"], taken["control"]


# --- the bare kernels ---------------------------------------------------------------------------------------


def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return q


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """One query of each row, ``[B, 1, Hq, D]``, which sees all keys."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)


@contextmanager
def module(settings: Settings, kernel: Callable[..., torch.Tensor]) -> Iterator[Any]:
    """``flash_attn``: the installed one on a GPU, else one whose functions call ``kernel``."""
    if settings.device == "cuda" and "fa2" in flash_attention.available():
        yield sys.modules["flash_attn"]
        return

    def with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False):  # type: ignore[no-untyped-def]
        stop = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
        if k is not None:
            stop += k.shape[1]
            k_cache[:, cache_seqlens:stop], v_cache[:, cache_seqlens:stop] = k, v
        return kernel(q, k_cache[:, :stop], v_cache[:, :stop], causal)

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):  # type: ignore[no-untyped-def]
        return kernel(q[None], k[None], v[None], causal)[0]

    stand_in: Any = types.ModuleType("flash_attn")
    stand_in.flash_attn_func = lambda q, k, v, causal=False: kernel(q, k, v, causal)
    stand_in.flash_attn_with_kvcache = with_kvcache
    stand_in.flash_attn_varlen_func = varlen
    with mock.patch.dict(sys.modules, flash_attn=stand_in):
        flash_attention.look_again()
        yield stand_in
    flash_attention.look_again()


# --- the calls ----------------------------------------------------------------------------------------------


Layer = tuple[Any, Any, torch.Tensor, torch.Tensor]


def layers_of(settings: Settings, *sizes: int, grow_dim: int, dtype: torch.dtype) -> list[Layer]:
    """K and V of noise as VTensors, and their plain views."""

    def make() -> Any:
        noise = torch.randn(sizes, device=settings.device).to(dtype)
        return vtensor.from_tensor(noise, grow_dim=grow_dim, capacity=sizes[grow_dim])

    pairs = [(make(), make()) for _ in range(settings.pick(LAYERS, 2))]
    return [(k, v, k.alias(), v.alias()) for k, v in pairs]


def in_turn(layers: Sequence[Any]) -> Callable[[int], Any]:
    """The layer of the call with this number."""
    return lambda number: layers[number % len(layers)]


def flash_cases(settings: Settings, bare: Any, length: int) -> Iterator[Case]:
    options: dict[str, Any] = {"causal": True}
    ours = {**options, "backend": "fa2"}
    sizes = (1, length, HEADS, HEAD_DIM)
    layers = layers_of(settings, *sizes, grow_dim=1, dtype=torch.bfloat16)
    q = torch.randn(1, 1, QUERY_HEADS, HEAD_DIM, device=settings.device).bfloat16()
    new = torch.randn(1, 1, HEADS, HEAD_DIM, device=settings.device).bfloat16()

    layer = in_turn(layers)

    yield Case(
        "flash_attn_func",
        lambda i: flash_attention.flash_attn_func(q, *layer(i)[:2], **ours),
        lambda i: bare.flash_attn_func(q, *layer(i)[2:], **options),
    )
    yield Case(
        "flash_attn_with_kvcache",
        lambda i: flash_attention.flash_attn_with_kvcache(q, *layer(i)[:2], cache_seqlens=length, **ours),
        lambda i: bare.flash_attn_with_kvcache(q, *layer(i)[2:], cache_seqlens=length, **options),
    )
    start = length - CALLS  # so that no page is crossed, more or less: see mapper.py for that

    def append(i: int) -> None:
        k, v, *_ = layer(i)
        flash_attention.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=k.length, **ours)

    def append_bare(i: int) -> None:
        at = start + i // len(layers)
        bare.flash_attn_with_kvcache(q, *layer(i)[2:], new, new, cache_seqlens=at, **options)

    def undo() -> None:
        for k, v, *_ in layers:
            k.truncate(start), v.truncate(start)

    undo()
    yield Case(
        "flash_attn_with_kvcache and its append",
        append,
        append_bare,
        undo,
        "the bare call, into preallocated memory",
    )
    for k, v, *_ in layers:
        k.extend(length - start), v.extend(length - start)
    starts = [torch.tensor([0, n], dtype=torch.int32, device=settings.device) for n in (1, length)]
    row = in_turn([[t[0] for t in tensors] for tensors in layers])
    yield Case(
        "flash_attn_varlen_func",
        lambda i: flash_attention.flash_attn_varlen_func(q[0], *row(i)[:2], *starts, 1, length, **ours),
        lambda i: bare.flash_attn_varlen_func(q[0], *row(i)[2:], *starts, 1, length, **options),
    )
    cache = vtensor.KVCache(len(layers), HEADS, HEAD_DIM, 1, length + CALLS, torch.bfloat16, settings.device)
    cache.alloc()
    if cache.step([length]):
        slots = [cache[number] for number in range(len(layers))]
        for (k, v), (_, _, plain_k, plain_v) in zip(slots, layers, strict=True):
            k[0, :length], v[0, :length] = plain_k[0], plain_v[0]
        slot = in_turn(slots)
        yield Case(
            "flash_attn_with_kvcache over a KVCache",
            lambda i: flash_attention.flash_attn_with_kvcache(q, *slot(i), cache_seqlens=length, **ours),
            lambda i: bare.flash_attn_with_kvcache(q, *slot(i), cache_seqlens=length, **options),
        )
    cache.close()
    close(layers)


def sdpa_cases(settings: Settings, length: int) -> Iterator[Case]:
    layers = layers_of(settings, 1, HEADS, length, HEAD_DIM, grow_dim=2, dtype=torch.float32)
    layer = in_turn(layers)
    q = torch.randn(1, QUERY_HEADS, 1, HEAD_DIM, device=settings.device)
    yield Case(
        "SDPA",
        lambda i: sdpa.scaled_dot_product_attention(q, *layer(i)[:2], enable_gqa=True),
        lambda i: scaled_dot_product_attention(q, *layer(i)[2:], enable_gqa=True),
    )
    close(layers)


def flex_cases(settings: Settings, length: int) -> Iterator[Case]:
    """Against the same compiled function of torch, over views of the same strides."""
    layers = layers_of(settings, 1, HEADS, length, HEAD_DIM, grow_dim=2, dtype=torch.float32)
    layer = in_turn(layers)
    q = torch.randn(1, QUERY_HEADS, 1, HEAD_DIM, device=settings.device)
    compiled = torch.compile(flex_attention, fullgraph=True)
    yield Case(
        "FlexAttention",
        lambda i: flex.flex_attention(q, *layer(i)[:2], enable_gqa=True),
        lambda i: compiled(q, *layer(i)[2:], enable_gqa=True),
        against="the compiled call",
    )
    close(layers)


def close(layers: list[Layer]) -> None:
    for k, v, *_ in layers:
        k.close(), v.close()

"""What the attention shims add to the call that they pass on: their own time, and its share at 8k keys.

Where FlashAttention 2 is installed and runs, its call is the bare one. Elsewhere a function that does nothing
takes
its place: what is left is the shim's own time.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vtensor.integrations import flash_attention, sdpa

import vtensor

from .harness import Bar, Figure, Sample, Settings, clock, excess, interleave, slowdown

HEADS, HEAD_DIM = 8, 128
MOST_MICROSECONDS = 15
MOST_SLOWDOWN = 1.01


def run(settings: Settings) -> list[Figure]:
    with torch.no_grad():
        return [
            *with_flash(settings),
            alone("SDPA", settings, sdpa.scaled_dot_product_attention, scaled_dot_product_attention),
            at_8k_keys(settings),
        ]


def caches(length: int, grow_dim: int, settings: Settings) -> tuple[vtensor.VTensor, vtensor.VTensor]:
    """K and V of zeros, [1, heads, length, head size] where they grow along dimension 2."""
    sizes = (1, HEADS, length, HEAD_DIM) if grow_dim == 2 else (1, length, HEADS, HEAD_DIM)
    options = {"dtype": torch.bfloat16, "device": settings.device}
    k = vtensor.zeros(*sizes, grow_dim=grow_dim, capacity=length + 4096, **options)
    return k, vtensor.empty_like(k)


def many(call: Callable[[], object], settings: Settings) -> Sample:
    """Seconds of one of 50 calls: one alone is too short for the clock."""

    def sample() -> float:
        def calls() -> None:
            for _ in range(50):
                call()

        return clock(calls, settings.wait) / 50

    return sample


def alone(
    what: str, settings: Settings, shim: Callable[..., Any], bare: Callable[..., Any], grow_dim: int = 2
) -> Figure:
    """The shim's time over a single key, where the kernel's own is nearly nothing."""
    k, v = caches(2, grow_dim, settings)
    q = torch.zeros_like(k[...][..., :1, :] if grow_dim == 2 else k[:, :1])
    plain_k, plain_v = k.clone(), v.clone()
    samples = {
        "ours": many(lambda: shim(q, k, v), settings),
        "bare": many(lambda: bare(q, plain_k, plain_v), settings),
        "control": many(lambda: bare(q, plain_k, plain_v), settings),
    }
    taken = interleave(samples, settings.pick(101, 3), warmup=3)
    k.close()
    v.close()
    return excess(
        what, "the bare call", taken["ours"], taken["bare"], taken["control"], Bar(MOST_MICROSECONDS)
    )


def with_flash(settings: Settings) -> list[Figure]:
    installed = sys.modules.get("flash_attn")
    if settings.device == "cuda" and "fa2" in flash_attention.available():
        return flash(settings, sys.modules["flash_attn"])
    stand_in: Any = types.ModuleType("flash_attn")
    stand_in.flash_attn_func = lambda q, k, v, causal=False: q
    stand_in.flash_attn_with_kvcache = (
        lambda q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False: q
    )
    sys.modules["flash_attn"] = stand_in
    flash_attention.look_again()
    try:
        return flash(settings, stand_in)
    finally:
        del sys.modules["flash_attn"]
        if installed is not None:
            sys.modules["flash_attn"] = installed
        flash_attention.look_again()


def flash(settings: Settings, module: Any) -> list[Figure]:
    """flash_attn_func, and flash_attn_with_kvcache with the append of one position."""
    func, with_kvcache = module.flash_attn_func, module.flash_attn_with_kvcache

    def shim(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attention.flash_attn_func(q, k, v, causal=True, backend="fa2")

    def bare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return func(q, k, v, causal=True)

    figures = [alone("flash_attn_func", settings, shim, bare, grow_dim=1)]
    k, v = caches(2, 1, settings)
    new = torch.zeros_like(k[:, :1])

    def append_by_shim() -> None:
        flash_attention.flash_attn_with_kvcache(
            new, k, v, new, new, cache_seqlens=k.length, causal=True, backend="fa2"
        )
        k.shrink(1)
        v.shrink(1)

    def append_by_hand() -> None:
        length = k.length
        k.extend(1)
        v.extend(1)
        with_kvcache(new, k, v, new, new, cache_seqlens=length, causal=True)
        k.shrink(1)
        v.shrink(1)

    samples = {
        "ours": many(append_by_shim, settings),
        "bare": many(append_by_hand, settings),
        "control": many(append_by_hand, settings),
    }
    taken = interleave(samples, settings.pick(101, 3), warmup=3)
    k.close()
    v.close()
    figures.append(
        excess(
            "flash_attn_with_kvcache and its append",
            "two extends and the bare call",
            taken["ours"],
            taken["bare"],
            taken["control"],
            Bar(MOST_MICROSECONDS),
        )
    )
    return figures


def at_8k_keys(settings: Settings) -> Figure:
    """SDPA of one query over 8k keys: the shim's share."""
    length = settings.pick(8192, 256)
    values = torch.randn(1, HEADS, length, HEAD_DIM, device=settings.device)
    k, v = (vtensor.from_tensor(values, grow_dim=2, capacity=length + 4096) for _ in range(2))
    q = torch.randn(1, HEADS, 1, HEAD_DIM, device=settings.device)
    view = k[...], v[...]
    samples = {
        "ours": lambda: clock(lambda: sdpa.scaled_dot_product_attention(q, k, v), settings.wait),
        "bare": lambda: clock(lambda: scaled_dot_product_attention(q, *view), settings.wait),
        "control": lambda: clock(lambda: scaled_dot_product_attention(q, *view), settings.wait),
    }
    taken = interleave(samples, settings.pick(201, 3), warmup=5)
    k.close()
    v.close()
    return slowdown(
        f"SDPA over {length:,} keys",
        "the bare call",
        taken["ours"],
        taken["bare"],
        taken["control"],
        Bar(MOST_SLOWDOWN),
    )

"""5. Layers that share a page: the kernel's time over group sizes.

A group of G layers lies interleaved in one VTensor [batch, positions, G, heads, dim]; a layer is a strided
view of it, so that a page holds 1 / G as many positions of each. The baseline is a group of one, the control
another of one.
"""

from __future__ import annotations

import random
from collections import defaultdict

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import vtensor
from benchmarks.harness import interleave

from .attention import DIM, HEADS, QUERY_HEADS, event_time, sdpa
from .pools import open_pool
from .session import Session

PAGE = 2 << 20


def run(session: Session) -> None:
    target = session.device.torch_device
    batch, length = session.pick((8, 8192), (1, 1024))
    groups = session.pick((1, 2, 4, 8, 16, 32), (1, 2))
    layer_bytes = batch * length * HEADS * DIM * 2
    pool = open_pool(session, PAGE, 2 * layer_bytes * (sum(groups) + 1) + 64 * PAGE)
    names = ["control", *(f"group of {size}" for size in groups)]
    made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    sizes = {name: 1 if name == "control" else int(name.rsplit(" ", 1)[1]) for name in names}
    for name in random.Random(0).sample(names, len(names)):
        shape = (batch, length, sizes[name], HEADS, DIM)
        made[name] = tuple(
            vtensor.empty(*shape, grow_dim=1, capacity=length, dtype=torch.bfloat16, pool=pool).normal_()
            for _ in "kv"
        )
    q = torch.randn(batch, 1, QUERY_HEADS, DIM, dtype=torch.bfloat16, device=target)
    launched: dict[str, int] = defaultdict(int)

    def attend(name: str) -> None:
        k, v = made[name]
        layer = launched[name] % sizes[name]  # another each time, as a model goes through its layers
        launched[name] += 1
        sdpa(q, k[:, :, layer], v[:, :, layer], False)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        samples = {name: lambda name=name: event_time(session, lambda: attend(name)) for name in names}
        taken = interleave(samples, session.pick(60, 2), warmup=session.pick(3, 1))
    session.device.synchronize()
    method = f"torch SDPA, FlashAttention; batch {batch}, {length} keys, 1 query; CUDA events, interleaved"
    session.figure("attention of one layer, group of 1", taken["group of 1"], "ms", method)
    curve = {
        size: session.ratio(
            f"group of {size}", taken[f"group of {size}"], taken["group of 1"], taken["control"], method
        )
        for size in groups[1:]
    }
    session.answer(
        "Time of a layer's attention against a layer with pages of its own: "
        + ", ".join(f"{size} layers {ratio:.3f}" for size, ratio in curve.items())
        + "."
    )
    for pair in made.values():
        for t in pair:
            t.close()
    pool.close()

"""Kernels to run beside the calls under test: one bound by memory bandwidth, and a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .session import Session


@dataclass(frozen=True)
class Kernel:
    name: str
    launch: Callable[[], object]
    is_right: Callable[[], bool]  # of what the last launch wrote; waits for it


def make_kernels(session: Session) -> list[Kernel]:
    device = session.device.torch_device
    values = torch.arange(session.pick(256 << 20, 1 << 20), dtype=torch.int32, device=device)
    copied = torch.zeros_like(values)
    side = session.pick(8192, 256)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(side, side, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2)
    )
    product = torch.empty_like(a)
    expected = torch.mm(a, b, out=product).clone()

    def copy_is_right() -> bool:
        session.device.synchronize()
        right = torch.equal(copied, values)
        copied.zero_()
        session.device.synchronize()
        return right

    def product_is_right() -> bool:
        session.device.synchronize()
        right = torch.equal(product, expected)
        product.zero_()
        session.device.synchronize()
        return right

    def in_rehearsal_slowly(work: Callable[[], object]) -> Callable[[], object]:
        return (lambda: (time.sleep(0.01), work())) if session.rehearsal else work

    copy = in_rehearsal_slowly(lambda: copied.copy_(values))
    multiply = in_rehearsal_slowly(lambda: torch.mm(a, b, out=product))
    return [
        Kernel(f"copy of {values.nbytes >> 20} MiB", copy, copy_is_right),
        Kernel(f"bf16 product {side}^3", multiply, product_is_right),
    ]


def launch_run(session: Session, stream: Any, kernel: Kernel, count: int) -> list[Any]:
    """Launches the kernel `count` times; the events between, count + 1 of them."""
    marks = [session.device.mark(stream)]
    for _ in range(count):
        session.device.launch(stream, kernel.launch)
        marks.append(session.device.mark(stream))
    return marks


def milliseconds(marks: list[Any]) -> list[float]:
    """What each kernel between the events took; waits for the last."""
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]

"""6. A decode loop at the attention shape of Llama-3-8B: 32 heads of queries, 8 of keys and values, of 128,
bf16.

Each step appends a position to K and V of every layer and attends over all of them; its time goes to the end
of the device's work, as a loop that samples a token waits for it. Growth from 1k to 32k is sampled: in
windows of steps around lengths at which a page ends. Each window is run several times over, back from its
start.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import vtensor

from .attention import DIM, HEADS, QUERY_HEADS, sdpa
from .pools import lease, open_pool
from .session import OUT_OF_TIME, Session, first_line

PAGE = 2 << 20
PER_PAGE = PAGE // (HEADS * DIM * 2)  # positions of a row in a page: 1,024
LAYERS = 4  # of Llama's 32, so that batch 64 at 32k fits beside torch.cat's copies
Pair = tuple[torch.Tensor, torch.Tensor]


class Grower:
    """K and V of all layers, [batch, length, HEADS, DIM]; `rewind` goes back to a shorter length."""

    def __init__(self, session: Session, filled: Pair, layers: int, most: int) -> None:
        raise NotImplementedError

    def append(self, layer: int, new: Pair) -> Pair:
        raise NotImplementedError

    def rewind(self, length: int) -> None:
        raise NotImplementedError

    def tensors(self) -> list[Any]:
        """The VTensors, if any."""
        return []

    def nbytes(self) -> int:
        """Bytes of pages; 0 where torch's allocator knows."""
        return 0

    def close(self) -> None:
        pass


class Concatenated(Grower):
    def __init__(self, session: Session, filled: Pair, layers: int, most: int) -> None:
        self._kv = [tuple(x.contiguous() for x in filled) for _ in range(layers)]

    def append(self, layer: int, new: Pair) -> Pair:
        k, v = (torch.cat([old, x], dim=1) for old, x in zip(self._kv[layer], new, strict=True))
        self._kv[layer] = k, v
        return k, v

    def rewind(self, length: int) -> None:
        self._kv = [(k[:, :length], v[:, :length]) for k, v in self._kv]


class Preallocated(Grower):
    def __init__(self, session: Session, filled: Pair, layers: int, most: int) -> None:
        batch, length = filled[0].shape[:2]
        self._kv = [tuple(x.new_zeros(batch, most, HEADS, DIM) for x in filled) for _ in range(layers)]
        for pair in self._kv:
            for buffer, x in zip(pair, filled, strict=True):
                buffer[:, :length].copy_(x)
        self._lengths = [length] * layers

    def append(self, layer: int, new: Pair) -> Pair:
        at = self._lengths[layer]
        self._lengths[layer] = at + 1
        for buffer, x in zip(self._kv[layer], new, strict=True):
            buffer[:, at : at + 1].copy_(x)
        k, v = self._kv[layer]
        return k[:, : at + 1], v[:, : at + 1]

    def rewind(self, length: int) -> None:
        self._lengths = [length] * len(self._lengths)


class Growing(Grower):
    look_ahead = False

    def __init__(self, session: Session, filled: Pair, layers: int, most: int) -> None:
        free = session.driver.memory()[1]
        self._pool = open_pool(session, PAGE, int(free * 0.85) // PAGE * PAGE, self.look_ahead)
        make = vtensor.empty
        batch = filled[0].shape[0]
        self._kv = [
            tuple(
                make(batch, 0, HEADS, DIM, grow_dim=1, capacity=most, dtype=x.dtype, pool=self._pool)
                for x in filled
            )
            for _ in range(layers)
        ]
        for pair in self._kv:
            for t, x in zip(pair, filled, strict=True):
                t.append(x)

    def append(self, layer: int, new: Pair) -> Pair:
        k, v = self._kv[layer]
        return k.append(new[0]), v.append(new[1])

    def rewind(self, length: int) -> None:
        for t in self.tensors():
            t.truncate(length)

    def tensors(self) -> list[Any]:
        return [t for pair in self._kv for t in pair]

    def nbytes(self) -> int:
        return self._pool.stats().pages_used * PAGE

    def close(self) -> None:
        for t in self.tensors():
            t.close()
        self._pool.close()


class GrowingAhead(Growing):
    look_ahead = True


GROWERS: dict[str, type[Grower]] = {
    "torch.cat": Concatenated,
    "preallocated": Preallocated,
    "preallocated again": Preallocated,
    "VTensor, synchronous": Growing,
    "VTensor with the mapper": GrowingAhead,
}


def run(session: Session) -> None:
    batches = session.pick((1, 16, 64, 4), (1,))
    lengths = session.pick((1024, 32768, 8192), (1024,))
    layers = session.pick(LAYERS, 1)
    session.fact(
        "layers",
        f"{layers} of 32",
        "all else as in Llama-3-8B; tokens/s are those of these layers' attention",
    )
    # The largest last: it takes a third of the time.
    windows = sorted(((batch, length) for batch in batches for length in lengths), key=math.prod)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for batch, length in windows:
            window(session, batch, length, layers)


@dataclass(frozen=True)
class Measured:
    speed: float  # tokens a second
    p99: float  # of a step, in ms
    memory: float  # times what the positions need
    output: torch.Tensor


def window(session: Session, batch: int, length: int, layers: int) -> None:
    """All growers around `length`, where a page ends, at this batch size."""
    steps = session.pick(128, 6)
    what = f"batch {batch}, {length:,} positions"
    needed = 2 * layers * batch * (length + steps // 2) * HEADS * DIM * 2
    if session.time_left() < 6 + needed / 6e8:  # filling and mapping take most of it
        session.skipped(what, OUT_OF_TIME)
        return
    start, most = length - steps // 2, (length // PER_PAGE + 2) * PER_PAGE
    target = session.device.torch_device
    generator = torch.Generator(target).manual_seed(0)

    def random_tensor(rows: int, positions: int, heads: int) -> torch.Tensor:
        size = (rows, positions, heads, DIM)
        return torch.randn(size, dtype=torch.bfloat16, device=target, generator=generator)

    row = random_tensor(1, start, HEADS), random_tensor(1, start, HEADS)
    filled = row[0].expand(batch, -1, -1, -1), row[1].expand(batch, -1, -1, -1)
    new = random_tensor(batch, 1, HEADS), random_tensor(batch, 1, HEADS)
    q = random_tensor(batch, 1, QUERY_HEADS)

    measured: dict[str, Measured] = {}
    names = list(GROWERS)
    random.Random(length + batch).shuffle(names)
    for name in names:
        session.device.forget()
        before = session.device.allocated()
        session.device.peak_allocated()
        try:
            grower = GROWERS[name](session, filled, layers, most)
            try:
                taken, output = repeat(session, grower, layers, q, new, start, steps)
                peak = session.device.peak_allocated() - before + grower.nbytes()
                speed, p99 = write(session, name, what, batch, -start % PER_PAGE, taken, peak / needed)
                measured[name] = Measured(speed, p99, peak / needed, output)
            finally:
                session.device.synchronize()
                grower.close()
                del grower
        except Exception as error:
            session.skipped(f"{name}, {what}", first_line(error))
    compare(session, what, measured)


def repeat(
    session: Session, grower: Grower, layers: int, q: torch.Tensor, new: Pair, start: int, steps: int
) -> tuple[list[list[float]], torch.Tensor]:
    """Seconds of each step, by round; and the last output."""
    device, output = session.device, q
    tensors = grower.tensors()

    def step() -> None:
        nonlocal output
        with lease(tensors):
            for layer in range(layers):
                k, v = grower.append(layer, new)
                output = sdpa(q, k, v, False)

    rounds = []
    for done in range(session.pick(6, 2)):
        if done:
            grower.rewind(start)
            device.synchronize()
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            step()
            device.synchronize()
            times.append(time.perf_counter() - begun)
        rounds.append(times)
    return rounds, output.clone()


def write(
    session: Session, name: str, what: str, batch: int, at: int, taken: list[list[float]], memory: float
) -> tuple[float, float]:
    """Writes the figures of one grower, of whose steps number `at` begins a page; tokens/s and the p99 of a
    step."""
    first, *rounds = taken  # kernels are loaded in the first, and pages are fresh
    steps = [seconds * 1e3 for times in rounds for seconds in times]
    rates = [batch * len(times) / sum(times) for times in rounds]
    speed = session.figure(f"{name}, {what}", rates, "tokens/s", "host clock, whole windows")
    session.figure(f"step of {name}, {what}", steps, "ms", "host clock, to the end of the device's work")
    session.figure(
        f"step of {name} that begins a page, {what}", [r[at] * 1e3 for r in rounds], "ms", "host clock"
    )
    session.figure(f"the same with fresh memory, {name}, {what}", [first[at] * 1e3], "ms", "host clock, once")
    method = "peak of torch's allocator and the pool's pages in use, the first round included"
    session.fact(f"memory of {name}, {what}, times what the positions need", round(memory, 3), method)
    return speed, sorted(steps)[int(0.99 * (len(steps) - 1))]


def compare(session: Session, what: str, measured: dict[str, Measured]) -> None:
    """Answers with all growers beside the preallocated one, where that could be measured."""
    baseline = measured.get("preallocated")
    if baseline is None:
        return
    parts = [
        f"{name} {it.speed:,.0f} tokens/s ({it.speed / baseline.speed:.3f} of preallocated), p99 of a step "
        f"{it.p99:.3g} ms, memory {it.memory:.2f} x"
        for name in GROWERS
        if (it := measured.get(name))
    ]
    wrong = [
        name
        for name, it in measured.items()
        if not torch.allclose(it.output, baseline.output, rtol=2e-2, atol=2e-2)
    ]
    parts += [f"WRONG results: {', '.join(wrong)}"] if wrong else ["all results agree"]
    session.answer(f"{what}: {'; '.join(parts)}.")

"""7. A CUDA graph captured once, and replayed while the tensor grows beneath it.

The graph holds one query's attention over the whole reservation, of which the length in a device tensor says
how much is there. It gathers rows below that length only, so that what is not mapped is not read.
"""

from __future__ import annotations

import time

import torch

import vtensor

from .driver import Driver
from .pools import lease, open_pool
from .session import Session, first_line

PAGE = 2 << 20
HEADS, DIM = 8, 128
PER_PAGE = PAGE // (HEADS * DIM * 2)  # positions to a page: 1,024


def attend(q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """[HEADS, DIM] of q over the first `length` rows of kv [capacity, 2, HEADS, DIM]; float32."""
    rows = kv.index_select(0, torch.minimum(positions, length - 1))
    k, v = rows[:, 0].float(), rows[:, 1].float()
    scores = (k * q).sum(-1) / DIM**0.5
    scores = scores.masked_fill((positions >= length).unsqueeze(1), float("-inf"))
    return (scores.softmax(0).unsqueeze(-1) * v).sum(0)


def run(session: Session) -> None:
    device = session.device
    target = device.torch_device
    capacity = session.pick(24, 4) * PER_PAGE
    generator = torch.Generator(target).manual_seed(0)
    source = torch.randn(capacity, 2, HEADS, DIM, dtype=torch.bfloat16, device=target, generator=generator)
    q = torch.randn(HEADS, DIM, device=target, generator=generator)
    positions = torch.arange(capacity, device=target)
    length = torch.ones(1, dtype=torch.int64, device=target)
    result = torch.empty(HEADS, DIM, device=target)

    pool = open_pool(session, PAGE, 2 * capacity * HEADS * DIM * 2 + 8 * PAGE)
    t = vtensor.empty(0, 2, HEADS, DIM, grow_dim=0, capacity=capacity, dtype=torch.bfloat16, pool=pool)
    t.append(source[:10])
    length.fill_(10)
    # The whole reservation as one tensor: only what the graph gathers from it is mapped.
    full = session.tensor_at(t.address, (capacity, 2, HEADS, DIM), torch.bfloat16)
    with lease([t]):
        replay = device.capture(lambda: result.copy_(attend(q, full, positions, length)))

    step = session.pick(97, 500)
    wrong = identical = replays = crossings = 0
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
        expected = attend(q, source, positions, torch.full_like(length, t.length))
        wrong += not torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
        identical += torch.equal(result, expected)
        replays += 1
    session.figure("append between replays", growths, "us", f"host clock, {step} positions, no look-ahead")
    session.figure("replay over the growing tensor", times, "us", "host clock, to the end of the replay")
    session.fact("replays", replays)
    session.fact("pages mapped between replays, times", crossings, "nbytes_mapped grew")
    session.fact(
        "replays with a wrong result", wrong, "against the same kernels over a plain tensor, to 1e-4"
    )
    session.fact("replays with a result that is the same bit for bit", identical)
    session.answer(
        f"{'Yes' if wrong == 0 else 'NO'}: {replays} replays of one graph, {crossings} growths of the "
        f"mapping between them, {wrong} wrong results."
    )
    if not session.rehearsal:
        session.answer(calls_during_capture(session))


def calls_during_capture(session: Session) -> str:
    """What VMM calls answer during a capture, and whether they end it (torch's default mode, global)."""
    answers: list[str] = []
    out = torch.zeros(16, device=session.device.torch_device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out.add_(1)
            a_page_s_life(session.driver, answers)
        graph.replay()
        session.device.synchronize()
        ended = f"the capture is good, and its replay adds {int(out[0])}"
    except Exception as error:
        ended = f"the capture ends with {first_line(error)}"
    session.fact(
        "VMM calls during a capture", ", ".join(answers), "by the capturing thread, capture mode global"
    )
    return f"VMM calls during a capture: {', '.join(answers)}; {ended}."


def a_page_s_life(driver: Driver, answers: list[str]) -> None:
    """Makes, maps and gives back a page, as far as the driver lets it; appends what each call answered."""

    def went_well(call: str, code: int) -> bool:
        answers.append(f"{call} {driver.name_of(code)}")
        return code == 0

    code, address = driver.reserve(PAGE)
    is_reserved = went_well("reserve", code)
    code, handle = driver.create(PAGE)
    is_made = went_well("create", code)
    if is_reserved and is_made and went_well("map", driver.map(address, PAGE, handle)):
        went_well("set-access", driver.set_access(address, PAGE))
        went_well("unmap", driver.unmap(address, PAGE))
    if is_made:
        went_well("release", driver.release(handle))
    if is_reserved:
        went_well("address-free", driver.free(address, PAGE))

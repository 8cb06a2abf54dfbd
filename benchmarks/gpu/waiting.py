"""3. Whether driver calls wait for kernels that run elsewhere: each is made beside a long kernel, on other
memory.

A call waited where the kernel was over when it returned. The kernel is one that touches no memory, and a
matrix product repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .calls import timed
from .driver import READ_ONLY, Pages
from .kernels import make_kernels
from .session import Session

PAGE = 2 << 20


@dataclass
class Call:
    """A call to time, and what makes it possible again afterwards."""

    name: str
    make: Callable[[], int]
    restore: Callable[[], object]
    idle: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    waited: int = 0
    too_late: int = 0  # made after the end of the kernel: says nothing


def run(session: Session) -> None:
    busy_seconds = session.pick(0.02, 0.03)
    with Pages(session.driver, PAGE, 8, 4) as pages:
        pages.map_all()
        session.tensor_at(pages.address, (4 * PAGE,), torch.uint8).fill_(1)
        session.device.synchronize()
        calls = make_calls(session, pages)
        product = make_kernels(session)[1]
        stream = session.device.stream()
        session.device.launch(stream, product.launch)
        session.device.spin(stream, 1e-3)
        session.device.synchronize()

        def spin() -> None:
            session.device.spin(stream, busy_seconds)

        def multiply() -> None:
            for _ in range(session.pick(20, 3)):
                session.device.launch(stream, product.launch)

        names = []
        for load_name, load in (("a kernel that only spins", spin), (product.name, multiply)):
            for call in calls:
                call.beside, call.waited, call.too_late = [], 0, 0
            for _ in session.rounds(15, 2, seconds=10):
                for call in calls:
                    one_call(session, stream, load, call)
            names += report(session, load_name, calls)
    waits = ", ".join(names)
    session.answer(
        f"These waited for a running kernel: {waits}." if waits else "No call waits for running kernels."
    )


def one_call(session: Session, stream: Any, load: Callable[[], None], call: Call) -> None:
    for is_beside in (False, True):
        if is_beside:
            load()
            end = session.device.mark(stream)
            time.sleep(0.002)  # for the kernel to be running, and not only launched
            over_before = end.query()
        code, microseconds = timed(call.make)
        if is_beside:
            call.waited += end.query() and not over_before
            call.too_late += over_before
            end.synchronize()
        session.driver.must(code)
        (call.beside if is_beside else call.idle).append(microseconds)
        session.device.synchronize()
        call.restore()


def report(session: Session, load: str, calls: list[Call]) -> list[str]:
    """Writes the figures; the names of the calls that waited in more than half of the rounds."""
    waited = []
    for call in calls:
        if not call.beside:
            continue
        method = "host clock; the kernel works on other memory"
        session.figure(f"{call.name}, nothing running", call.idle, "us", method)
        session.figure(f"{call.name}, beside {load}", call.beside, "us", method)
        times = len(call.beside) - call.too_late
        session.fact(
            f"{call.name} returned after the end of {load}", f"{call.waited} of {times}", "event query"
        )
        if call.waited > times / 2 or times == 0:
            waited.append(f"{call.name} (beside {load})")
        call.idle = []
    return waited


def make_calls(session: Session, pages: Pages) -> list[Call]:
    """Slots 0 to 3 are mapped and were written by a kernel; 4 to 7 are not mapped."""
    driver = session.driver
    size = pages.page_size
    made: list[int] = []

    def create() -> int:
        code, handle = driver.create(size)
        made.append(handle)
        return code

    def reserve() -> int:
        code, address = driver.reserve(size)
        made.append(address)
        return code

    def map_again() -> None:
        driver.must(pages.map(1, pages.handles[1]))
        driver.must(pages.set_access(1))
        session.tensor_at(pages.at(1), (size,), torch.uint8).fill_(1)
        session.device.synchronize()

    spare: list[int] = []

    def more_spare() -> None:
        code, handle = driver.create(size)
        driver.must(code)
        spare.append(handle)

    more_spare()
    ranges: list[int] = []

    def more_ranges() -> None:
        code, address = driver.reserve(size)
        driver.must(code)
        ranges.append(address)

    more_ranges()

    def fresh_access() -> int:
        return pages.map(5, pages.handles[0]) or pages.set_access(5)

    return [
        Call("cuMemUnmap", lambda: pages.unmap(1), map_again),
        Call(
            "cuMemSetAccess, to read-only",
            lambda: pages.set_access(2, 1, READ_ONLY),
            lambda: pages.set_access(2),
        ),
        Call("cuMemMap and cuMemSetAccess of a fresh page", fresh_access, lambda: pages.unmap(5)),
        Call("cuMemCreate", create, lambda: driver.release(made.pop())),
        Call("cuMemRelease, and the memory goes", lambda: driver.release(spare.pop()), more_spare),
        Call("cuMemAddressReserve", reserve, lambda: driver.free(made.pop(), size)),
        Call("cuMemAddressFree", lambda: driver.free(ranges.pop(), size), more_ranges),
        Call("cuMemGetInfo", lambda: driver.memory()[0], lambda: None),
    ]

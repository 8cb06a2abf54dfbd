"""10. May the GPU itself wait for a mapping? A stream waits for a flag, and a kernel behind it touches a page
that is mapped only then; the host maps the page and sets the flag.

What a mapper might do meanwhile is tried one after the other, in processes of their own. A call that waits
for the stream could never return: a watchdog sets the flag after two seconds, and the call counts as a
deadlock, but none that the watchdog did not rescue does. The kernel may then fault, because its page is not
mapped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .driver import Pages
from .session import Session

PAGE = 2 << 20
WATCHDOG_SECONDS = 2.0
RESCUED = "ended by the watchdog"


class Waiting:
    """A stream that waits for a flag, and then fills pages that may not be mapped yet."""

    def __init__(self, session: Session, stream: Any, over: torch.Tensor, value: int) -> None:
        self._session, self._flag = session, session.device.flag()
        self._over = threading.Event()
        session.driver.must(session.device.hold(session.driver, stream, self._flag))
        session.device.launch(stream, lambda: over.fill_(value))
        self._end = session.device.mark(stream)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        if not self._over.wait(WATCHDOG_SECONDS):
            self._session.fact(RESCUED, True)  # first: what follows may end the process
            self._flag.fill_(1)

    def finish(self) -> float:
        """Sets the flag and waits for the kernel; microseconds from the one to the other."""
        start = time.perf_counter()
        self._flag.fill_(1)
        while not self._end.query():
            if time.perf_counter() > start + WATCHDOG_SECONDS:
                raise TimeoutError("the kernel did not run after the flag was set")
        self._over.set()
        return (time.perf_counter() - start) * 1e6


def map_page(session: Session, pages: Pages, other: Any = None) -> None:
    pages.driver.must(pages.map(0, pages.handles[0]))
    pages.driver.must(pages.set_access(0))


def create_and_map(session: Session, pages: Pages, other: Any) -> None:
    code, handle = pages.driver.create(PAGE)
    pages.driver.must(code)
    pages.handles.append(handle)
    pages.driver.must(pages.map(0, handle))
    pages.driver.must(pages.set_access(0))


def map_and_zero(session: Session, pages: Pages, other: Any) -> None:
    map_page(session, pages)
    page = session.tensor_at(pages.at(0), (PAGE,), torch.uint8)
    session.device.launch(other, page.zero_)
    session.device.mark(other).synchronize()


def unmap_other(session: Session, pages: Pages, other: Any) -> None:
    pages.driver.must(pages.unmap(3))


def reserve_and_free(session: Session, pages: Pages, other: Any) -> None:
    code, address = pages.driver.reserve(PAGE)
    pages.driver.must(code)
    pages.driver.must(pages.driver.free(address, PAGE))


def create_and_release(session: Session, pages: Pages, other: Any) -> None:
    code, handle = pages.driver.create(PAGE)
    pages.driver.must(code)
    pages.driver.must(pages.driver.release(handle))


ACTIONS: dict[str, Callable[[Session, Pages, Any], None]] = {
    "map and set-access": map_page,
    "create, map and set-access": create_and_map,
    "map, set-access and zeroing in another stream": map_and_zero,
    "unmap of another page": unmap_other,
    "reserve and address-free": reserve_and_free,
    "create and release": create_and_release,
}


def while_waiting(session: Session, name: str) -> None:
    device, action = session.device, ACTIONS[name]
    stream, other = (
        device.stream(),
        device.stream(),
    )  # torch has 32 in all: more calls would give the first again
    warm = torch.zeros(16, dtype=torch.int32, device=device.torch_device)
    as_bytes = torch.zeros(16, dtype=torch.uint8, device=device.torch_device)
    for one in (stream, other):  # a kernel that is first loaded while a stream waits might wait for it
        device.launch(one, lambda: warm.fill_(1))
        device.launch(one, as_bytes.zero_)
    session.driver.must(device.hold(session.driver, stream, device.flag().fill_(1)))
    device.synchronize()

    times, delays, wrong = [], [], 0
    for done in session.rounds(30, 3, seconds=4):
        with Pages(session.driver, PAGE, 4, 2) as pages:
            session.driver.must(pages.map(3, pages.handles[1]))  # the page for `unmap_other`
            session.driver.must(pages.set_access(3))
            over = session.tensor_at(pages.address, (PAGE // 4,), torch.int32)
            waiting = Waiting(session, stream, over, done + 1)
            start = time.perf_counter()
            action(session, pages, other)
            times.append((time.perf_counter() - start) * 1e6)
            if 0 not in pages.mapped:
                map_page(session, pages)
            delays.append(waiting.finish())
            wrong += int((over != done + 1).sum())
            device.synchronize()
    session.figure(f"{name}, while a stream waits for the flag", times, "us", "host clock around the calls")
    session.figure(
        f"{name}: from the flag to the end of the kernel", delays, "us", "host clock, event query in a loop"
    )
    session.fact("wrong elements", wrong)


CASES = {name: partial(while_waiting, name=name) for name in ACTIONS}


def run(session: Session) -> None:
    deadlocks, broken, wrong = [], [], 0
    for name in CASES:
        end = session.run_case(name, 15)
        session.forward(found for found in end.findings if found["kind"] == "figure")
        rescued = end.facts.get(RESCUED, False)
        wrong += end.facts.get("wrong elements", 0)
        how = "DEADLOCK, until the watchdog set the flag" if rescued else f"the process {end.text}"
        session.fact(f"{name}, while a stream waits for the flag", how)
        if rescued:
            deadlocks.append(name)
        elif end.code != 0:
            said = (end.error_tail.strip().splitlines() or [""])[-1]
            broken.append(f"{name}: the process {end.text} {said}".strip())
    session.fact("wrong elements written by kernels that had waited", wrong)
    if deadlocks:
        session.answer(f"These do not return while a stream waits for a flag: {'; '.join(deadlocks)}.")
    for reason in broken:
        session.answer(f"Could not be tried to its end: {reason}.")
    fine = [
        name for name in CASES if name not in deadlocks and not any(b.startswith(f"{name}:") for b in broken)
    ]
    if fine:
        session.answer(f"No deadlock, with {wrong} wrong elements: {'; '.join(fine)}.")

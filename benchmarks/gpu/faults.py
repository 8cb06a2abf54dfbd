"""8. Faults on purpose, each in a process of its own: what error they give, and whether the parent lives.

A write through a read-only alias, a read past the mapped end, and the unmapping of pages beneath a running
kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .driver import READ_ONLY, Pages
from .session import Session, first_line

PAGE = 2 << 20


def write_through_read_only(session: Session) -> None:
    pages = Pages(session.driver, PAGE, 2, 1)
    session.driver.must(pages.map(0, pages.handles[0]))
    session.driver.must(pages.set_access(0))
    session.driver.must(pages.map(1, pages.handles[0]))
    code = pages.set_access(1, 1, READ_ONLY)
    session.fact("set-access to read-only", session.driver.name_of(code))
    session.tensor_at(pages.at(0), (PAGE,), torch.uint8).fill_(7)
    session.device.synchronize()
    alias = session.tensor_at(pages.at(1), (PAGE,), torch.uint8)
    session.fact("the alias reads", int(alias.max()))
    touch(session, lambda: alias.fill_(1))
    session.fact("reading the alias afterwards", _attempt(lambda: int(alias[0])))


def read_past_end(session: Session) -> None:
    pages = Pages(session.driver, PAGE, 4, 1)
    pages.map_all()
    seen = session.tensor_at(pages.address, (4 * PAGE,), torch.uint8)
    seen[:PAGE].fill_(1)
    session.device.synchronize()
    touch(session, lambda: seen.sum())


def unmap_beneath_kernel(session: Session) -> None:
    pages = Pages(session.driver, PAGE, 64, 64)
    pages.map_all()
    seen = session.tensor_at(pages.address, (64 * PAGE,), torch.uint8)
    seen.fill_(1)
    stream = session.device.stream()
    session.device.spin(stream, 1e-3)
    session.device.synchronize()

    def unmap_then_wait() -> None:
        session.device.spin(stream, 0.05)
        for _ in range(20):
            session.device.launch(stream, lambda: seen.add_(1))
        session.fact("cuMemUnmap", session.driver.name_of(pages.unmap(0, 64)))

    touch(session, unmap_then_wait)


def touch(session: Session, work: Callable[[], object]) -> None:
    """Does what faults, and says what can still be done afterwards."""
    session.fact("begun", True)
    session.fact("error", _attempt(lambda: (work(), session.device.synchronize())))
    session.fact(
        "a kernel afterwards", _attempt(lambda: int(torch.ones(4, device=session.device.torch_device).sum()))
    )
    code, address = session.driver.reserve(PAGE)
    session.fact("a VMM call afterwards", session.driver.name_of(code))


def _attempt(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return first_line(error)
    return "none"


CASES = {
    "a write through a read-only alias": write_through_read_only,
    "a read past the mapped end": read_past_end,
    "unmapping beneath a running kernel": unmap_beneath_kernel,
}


def run(session: Session) -> None:
    own = torch.arange(1 << 20, device=session.device.torch_device)
    expected = int(own.sum())
    for case in CASES:
        end = session.run_case(case, 15)
        for name, value in end.facts.items():
            session.fact(f"{case}: {name}", value)
        alive = parent_lives(session, own, expected)
        session.fact(f"{case}: the process {end.text}; the parent", alive)
        if "begun" not in end.facts:
            session.answer(f"{case}: could not be tried, {end.text}: {end.error_tail.strip()[-200:]}")
            continue
        error = end.facts.get("error", f"the process {end.text}")
        session.answer(
            f"{case}: {error}. Afterwards in that process: {_afterwards(end.facts)}. The parent {alive}."
        )


def _afterwards(facts: dict[str, object]) -> str:
    kernel = facts.get("a kernel afterwards")
    return (
        "nothing"
        if kernel is None
        else f"a kernel gives {kernel}, a VMM call {facts.get('a VMM call afterwards')}"
    )


def parent_lives(session: Session, own: torch.Tensor, expected: int) -> str:
    """Whether kernels, mapping and old contents are as before in this process."""
    try:
        with Pages(session.driver, PAGE, 1, 1) as pages:
            pages.map_all()
            fresh = session.tensor_at(pages.address, (PAGE,), torch.uint8).fill_(3)
            good = int(fresh.max()) == 3 and int(own.sum()) == expected
            session.device.synchronize()
    except Exception as error:
        return f"is broken: {first_line(error)}"
    return "lives" if good else "lives, with wrong contents"

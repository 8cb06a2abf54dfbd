"""1. What every VMM call costs at several page sizes, what merged set-access saves, and what kept handles
save.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter_ns

import torch
from cuda.bindings import driver as cuda

from .driver import Driver, Pages
from .session import Session

MIB = 1 << 20
HOST_CLOCK = "host clock around one call, up to the first figure of it cuda-bindings'; pages written before"


def timed(call: Callable[..., int], *arguments: object) -> tuple[int, float]:
    """(the driver's answer, microseconds)."""
    start = perf_counter_ns()
    code = call(*arguments)
    return code, (perf_counter_ns() - start) / 1e3


class Clock:
    """Microseconds by what was called; a refusal raises."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.taken: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, call: Callable[..., int], *arguments: object) -> None:
        code, microseconds = timed(call, *arguments)
        self.driver.must(code)
        self.taken[name].append(microseconds)

    def made(self, name: str, call: Callable[..., tuple[int, int]], *arguments: object) -> int:
        """As above, for calls that return what they made."""
        start = perf_counter_ns()
        code, result = call(*arguments)
        microseconds = (perf_counter_ns() - start) / 1e3
        self.driver.must(code)
        self.taken[name].append(microseconds)
        return result


def run(session: Session) -> None:
    driver = session.driver
    overhead = [timed(cuda.cuDeviceGetCount)[1] for _ in range(session.pick(5000, 200))]
    session.figure("cuda-bindings and a trivial driver call (cuDeviceGetCount)", overhead, "us", "host clock")
    session.fact("the GPUDirect RDMA flag", driver.rdma, "of cuMemCreate, wherever handles are made here")
    session.fact(
        "VMM calls in a thread without a context",
        _without_context(driver),
        "reserve, create, map, set-access, unmap, release, address-free",
    )

    sizes = session.pick((2, 4, 8, 16, 32), (2, 4))
    medians = {size: every_call(session, size * MIB) for size in sizes}
    small = medians[sizes[0]]
    session.answer(
        f"Medians in us at {sizes[0]} MiB a page: "
        + ", ".join(f"{name} {value:.3g}" for name, value in small.items())
        + "."
    )
    by_size = ", ".join(
        f"{size} MiB {sum(m[call] for call in ('create', 'map', 'set-access')):.3g}"
        for size, m in medians.items()
    )
    session.answer(f"create + map + set-access of one page in us: {by_size}.")
    kept = (small["create"] + small["map"] + small["set-access"]) / (small["map"] + small["set-access"])
    session.answer(
        f"A page of {sizes[0]} MiB from a kept handle is mapped {kept:.3g} times as fast as a fresh one."
    )
    dirty = fresh_memory(session, sizes[0] * MIB)
    session.fact("fresh handles after written ones were released", dirty, "pages read back by a kernel")
    session.answer(f"Memory of new handles, after as many written ones were released: {dirty}.")
    for size in sizes:
        gains = merged_calls(session, size * MIB)
        session.answer(
            "Gain of merging: " + ", ".join(f"{call} {gain:.3g} x" for call, gain in gains.items()) + "."
        )


def _without_context(driver: Driver) -> str:
    answers: list[str] = []

    def work() -> None:
        size = driver.granularity
        reserved, address = driver.reserve(size)
        created, handle = driver.create(size)
        codes = [reserved, created, driver.map(address, size, handle), driver.set_access(address, size)]
        codes += [driver.unmap(address, size), driver.release(handle), driver.free(address, size)]
        answers.extend(driver.name_of(code) for code in codes)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    return (
        "all succeed" if set(answers) == {"CUDA_SUCCESS"} else ", ".join(answers) or "no answer within 30 s"
    )


def every_call(session: Session, size: int) -> dict[str, float]:
    """The calls, one page at a time; medians by name."""
    driver = session.driver
    clock = Clock(driver)
    pages = session.pick(64, 2)
    for done in session.rounds(9, 2, seconds=4):
        _one_round(session, clock, pages, size)
        if done == 0:
            clock.taken.clear()  # a warm-up
    what = f"{size // MIB} MiB"
    method = f"{HOST_CLOCK}; ranges of {pages} pages"
    return {
        name: session.figure(f"{name}, {what}", values, "us", method) for name, values in clock.taken.items()
    }


def _one_round(session: Session, clock: Clock, pages: int, size: int) -> None:
    driver = session.driver
    for _ in range(session.pick(16, 1)):
        address = clock.made("reserve", driver.reserve, pages * size, size)
        clock("address-free", driver.free, address, pages * size)
    address = clock.made("reserve", driver.reserve, pages * size, size)
    for _ in range(session.pick(16, 1)):
        handle = clock.made("create without the RDMA flag", driver.create_plain, size)
        driver.must(driver.release(handle))
    handles = [clock.made("create", driver.create, size) for _ in range(pages)]
    addresses = [address + i * size for i in range(pages)]
    half = pages // 2
    for at, handle in zip(addresses, handles, strict=True):
        clock("map", driver.map, at, size, handle)
    for at in addresses:
        clock("set-access", driver.set_access, at, size)
    session.tensor_at(address, (pages * size,), torch.uint8).fill_(1)
    session.device.synchronize()
    for handle in handles[:half]:
        clock("release, still mapped", driver.release, handle)
    for at in addresses[:half]:
        clock("unmap, and the memory goes", driver.unmap, at, size)
    for at in addresses[half:]:
        clock("unmap, handle kept", driver.unmap, at, size)
    for handle in handles[half:]:
        clock("release, and the memory goes", driver.release, handle)
    clock("address-free", driver.free, address, pages * size)


def merged_calls(session: Session, size: int) -> dict[str, float]:
    """One set-access, and one unmap, over n pages, against n of them; the gain at the most pages."""
    driver = session.driver
    counts = session.pick((1, 2, 4, 8, 16, 32, 64), (1, 2))
    taken: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
    with Pages(driver, size, max(counts), max(counts)) as pages:

        def once(count: int, merged: bool) -> None:
            runs = [(0, count)] if merged else [(slot, 1) for slot in range(count)]
            for slot, handle in enumerate(pages.handles[:count]):
                driver.must(pages.map(slot, handle))
            access = [timed(driver.set_access, pages.at(at), n * size) for at, n in runs]
            unmap = [timed(driver.unmap, pages.at(at), n * size) for at, n in runs]
            pages.mapped.clear()
            for call, answers in (("set-access", access), ("unmap", unmap)):
                for code, _ in answers:
                    driver.must(code)
                taken[call, count, merged].append(sum(microseconds for _, microseconds in answers))

        for _ in session.rounds(60, 2, seconds=1.5):
            for count in counts:
                once(count, True)
                once(count, False)
    what, method = f"{size // MIB} MiB", "host clock, interleaved; n calls / one call of the same round"
    gains = {}
    for call in ("set-access", "unmap"):
        for count in counts:
            single, merged = taken[call, count, False], taken[call, count, True]
            session.figure(
                f"one {call} over {count} pages of {what}", merged, "us", "host clock, interleaved"
            )
            gain = [a / b for a, b in zip(single, merged, strict=True)]
            gains[call] = session.figure(
                f"gain of one {call} over {count} pages of {what}", gain, "x", method
            )
    return {f"{call} over {counts[-1]} pages of {what}": gain for call, gain in gains.items()}


def fresh_memory(session: Session, size: int) -> str:
    """Whether handles made after written ones were released show what those held."""
    pages = session.pick(64, 2)
    with Pages(session.driver, size, pages, pages) as written:
        written.map_all()
        session.tensor_at(written.address, (pages * size,), torch.uint8).fill_(255)
        session.device.synchronize()
    with Pages(session.driver, size, pages, pages) as fresh:
        fresh.map_all()
        seen = session.tensor_at(fresh.address, (pages, size), torch.uint8)
        dirty = int((seen != 0).any(dim=1).sum())
        del seen
    return f"{dirty} of {pages} not all zero"

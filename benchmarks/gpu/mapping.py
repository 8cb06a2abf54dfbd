"""Questions 1 to 3, 8 and 10 to 12: the driver's calls by themselves and beside kernels. They need no
vtensor."""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from cuda.bindings import driver as cuda

from .driver import (
    HANDLE_TYPES,
    NO_ACCESS,
    PAGE,
    READ_ONLY,
    Answer,
    Driver,
    Pages,
    map_at,
    must,
    name_of,
    reserve,
)
from .session import End, Session, error_of, first_line

MIB = 1 << 20
Times = dict[str, list[float]]  # microseconds by what was called


def timed(taken: Times, name: str, call: Callable[..., Answer], *arguments: Any) -> int:
    """What the call made, or 0; a refusal raises."""
    start = perf_counter_ns()
    answer = call(*arguments)
    taken[name].append((perf_counter_ns() - start) / 1e3)
    return must(answer)


# --- 1. What every call costs, what merged set-access and unmap save, and what kept handles save


def calls(session: Session) -> None:
    driver = session.driver
    trivial: Times = defaultdict(list)
    for _ in range(session.pick(5000, 200)):
        timed(trivial, "", cuda.cuDeviceGetCount)
    session.figure("cuda-bindings and a trivial driver call (cuDeviceGetCount)", trivial[""])
    session.fact("the GPUDirect RDMA flag, wherever handles are made here", driver.rdma)
    session.fact("VMM calls in a thread without a context", without_context(driver))
    sizes = [mib * MIB for mib in session.pick((2, 4, 8, 16, 32), (2, 4))]
    for size in sizes:
        every_call(session, size)
    session.fact("fresh handles after written ones were released", fresh_memory(session, sizes[0]))
    for size in sizes:
        merged_calls(session, size)


def without_context(driver: Driver) -> str:
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.extend(a_page_s_life(driver)))
    thread.start()
    thread.join(30)
    return ", ".join(answers) or "no answer within 30 s"


def a_page_s_life(driver: Driver) -> list[str]:
    """Makes, maps and gives back a page, as far as the driver lets it; what each call answered."""
    answers: list[str] = []

    def went_well(call: str, answer: Answer) -> int:
        """What the call made, or 1; 0 where it was refused."""
        answers.append(f"{call} {name_of(answer)}")
        return 0 if answer[0] != 0 else must(answer) or 1

    address = went_well("reserve", reserve(PAGE))
    handle = went_well("create", driver.create(PAGE))
    if address and handle and went_well("map", map_at(address, PAGE, handle)):
        went_well("set-access", driver.set_access(address, PAGE))
        went_well("unmap", cuda.cuMemUnmap(address, PAGE))
    if handle:
        went_well("release", cuda.cuMemRelease(handle))
    if address:
        went_well("address-free", cuda.cuMemAddressFree(address, PAGE))
    return answers


def every_call(session: Session, size: int) -> None:
    """The calls, one page at a time."""
    taken: Times = defaultdict(list)
    pages = session.pick(64, 2)
    for done in session.rounds(9, 2, seconds=4):
        one_round(session, taken, pages, size)
        if done == 0:
            taken.clear()  # a warm-up
    what = f"{size // MIB} MiB"
    cost = {name: session.figure(f"{name}, {what}", values) for name, values in taken.items()}
    mapping = cost["map"] + cost["set-access"]
    session.fact(f"a page of {what} with a kept handle", f"{cost['create'] / mapping + 1:.3g} times as fast")


def one_round(session: Session, taken: Times, pages: int, size: int) -> None:
    driver = session.driver
    for _ in range(session.pick(16, 1)):
        address = timed(taken, "reserve", reserve, pages * size, size)
        timed(taken, "address-free", cuda.cuMemAddressFree, address, pages * size)
        handle = timed(taken, "create without the RDMA flag", driver.create_plain, size)
        must(cuda.cuMemRelease(handle))
    address = timed(taken, "reserve", reserve, pages * size, size)
    handles = [timed(taken, "create", driver.create, size) for _ in range(pages)]
    addresses = [address + i * size for i in range(pages)]
    half = pages // 2
    for at, handle in zip(addresses, handles, strict=True):
        timed(taken, "map", map_at, at, size, handle)
    for at in addresses:
        timed(taken, "set-access", driver.set_access, at, size)
    session.tensor_at(address, (pages * size,), torch.uint8).fill_(1)
    session.device.synchronize()
    for handle in handles[:half]:
        timed(taken, "release, still mapped", cuda.cuMemRelease, handle)
    for at in addresses[:half]:
        timed(taken, "unmap, and the memory goes", cuda.cuMemUnmap, at, size)
    for at in addresses[half:]:
        timed(taken, "unmap, handle kept", cuda.cuMemUnmap, at, size)
    for handle in handles[half:]:
        timed(taken, "release, and the memory goes", cuda.cuMemRelease, handle)
    timed(taken, "address-free", cuda.cuMemAddressFree, address, pages * size)


def merged_calls(session: Session, size: int) -> None:
    """One set-access, and one unmap, over n pages, against n of them."""
    driver = session.driver
    counts = session.pick((1, 2, 4, 8, 16, 32, 64), (1, 2))
    taken: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
    with Pages(driver, max(counts), max(counts), size) as pages:
        for _ in session.rounds(60, 2, seconds=1.5):
            for count, merged in ((count, merged) for count in counts for merged in (True, False)):
                runs = [(0, count)] if merged else [(slot, 1) for slot in range(count)]
                for slot in range(count):
                    must(pages.map(slot, slot))
                spent: Times = defaultdict(list)
                for at, n in runs:
                    timed(spent, "set-access", driver.set_access, pages.at(at), n * size)
                for at, n in runs:
                    timed(spent, "unmap", cuda.cuMemUnmap, pages.at(at), n * size)
                pages.mapped.clear()
                for call, microseconds in spent.items():
                    taken[call, count, merged].append(sum(microseconds))
    method = "host clock, interleaved; n calls / one call of the same round"
    for call in ("set-access", "unmap"):
        for count in counts:
            single, merged = taken[call, count, False], taken[call, count, True]
            what = f"one {call} over {count} pages of {size // MIB} MiB"
            session.figure(what, merged)
            session.figure(
                f"gain of {what}", [a / b for a, b in zip(single, merged, strict=True)], "x", method
            )


def fresh_memory(session: Session, size: int) -> str:
    """Whether handles made after written ones were released show what those held."""
    count = session.pick(64, 2)
    with Pages(session.driver, count, count, size).put_all() as written:
        session.tensor_at(written.address, (count * size,), torch.uint8).fill_(255)
        session.device.synchronize()
    with Pages(session.driver, count, count, size).put_all() as fresh:
        seen = session.tensor_at(fresh.address, (count, size), torch.uint8)
        return f"{int((seen != 0).any(dim=1).sum())} of {count} not all zero"


# --- Kernels to run beside the calls under test: one bound by memory bandwidth, and a matrix product


@dataclass(frozen=True)
class Kernel:
    name: str
    launch: Callable[[], object]
    is_right: Callable[[], bool]  # of what the last launch wrote; waits for it


def make_kernels(session: Session) -> list[Kernel]:
    device = session.device.name
    values = torch.arange(session.pick(256 << 20, 1 << 20), dtype=torch.int32, device=device)
    copied = torch.zeros_like(values)
    side = session.pick(8192, 256)
    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device, generator=draw) for _ in range(2))
    product = torch.empty_like(a)
    expected = torch.mm(a, b, out=product).clone()

    def is_right(written: torch.Tensor, wanted: torch.Tensor) -> bool:
        session.device.synchronize()
        right = torch.equal(written, wanted)
        written.zero_()
        session.device.synchronize()
        return right

    copy, multiply = partial(copied.copy_, values), partial(torch.mm, a, b, out=product)
    return [
        Kernel(f"copy of {values.nbytes >> 20} MiB", copy, partial(is_right, copied, values)),
        Kernel(f"bf16 product {side}^3", multiply, partial(is_right, product, expected)),
    ]


def launch_run(session: Session, stream: Any, kernel: Kernel, count: int) -> list[Any]:
    """Launches the kernel `count` times; the events between, count + 1 of them."""
    marks = [session.device.mark(stream)]
    for _ in range(count):
        session.device.launch(stream, kernel.launch)
        marks.append(session.device.mark(stream))
    return marks


def milliseconds(marks: list[Any]) -> list[float]:
    """What each kernel between the events took, sorted; waits for the last."""
    marks[-1].synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))


# --- 2. Mapping fresh addresses beside running kernels: right results, and the cost to kernel and call

OWN = 8  # of so many mappings one is of a handle that was just created; the others share a few


def beside_kernels(session: Session) -> None:
    method = "host clock, 2 MiB pages, fresh addresses"
    idle: Times = defaultdict(list)
    map_pages(session, idle, None, session.pick(400, 10))
    for call, microseconds in idle.items():
        session.figure(f"{call}, nothing running", microseconds, "us", method)
    for kernel in make_kernels(session):
        beside(session, kernel, method)


def map_pages(session: Session, taken: Times, until: Any, most: int, touch: Any = None) -> tuple[int, int]:
    """Maps fresh pages one by one, until the event has passed or `most` are mapped; then checks each. How
    many it mapped, and how many have wrong contents.

    With the stream `touch`, kernels in it write the pages at once, beside those that run.
    """
    driver, count, shared = session.driver, 0, min(most, 64)
    early: list[tuple[int, torch.Tensor]] = []
    with Pages(driver, most, shared) as pages:
        while count < most and (until is None or not until.query()):
            is_own = count % OWN == OWN - 1
            if is_own:
                pages.handles.append(timed(taken, "create", driver.create, PAGE))
            timed(taken, "map", pages.map, count, -1 if is_own else count % shared)
            timed(taken, "set-access", pages.set_access, count)
            if touch is not None and is_own:
                early.append((count, session.tensor_at(pages.at(count), (512,), torch.int64)))
                session.device.launch(touch, lambda written=early[-1]: written[1].fill_(written[0]))
            count += 1
        if until is not None:
            until.synchronize()  # the checks below must not slow it down
        session.device.synchronize()
        wrong = sum(not bool((t == slot).all()) for slot, t in early)
        return count, wrong + wrong_pages(session, pages, count, shared)


def wrong_pages(session: Session, pages: Pages, count: int, handles: int) -> int:
    """Writes through every mapping and reads back; those of one handle must show the same."""
    seen = session.tensor_at(pages.address, (count, PAGE // 8), torch.int64)
    slot = torch.arange(count, device=session.device.name)
    seen.copy_(slot.unsqueeze(1).expand_as(seen))
    low, high = seen.amin(dim=1), seen.amax(dim=1)
    session.device.synchronize()
    # Slots of one handle are written in no given order: any of their numbers may stand there, mixed too.
    is_own = slot % OWN == OWN - 1
    own = is_own & (low == slot) & (high == slot)
    shared = ~is_own & (low % handles == slot % handles) & (high % handles == slot % handles)
    return count - int((own | shared).sum())


def beside(session: Session, kernel: Kernel, method: str) -> None:
    """Each round runs the same launches three times: alone, alone again (the control), and with the host
    mapping pages all the while, never at an address that was mapped before."""
    stream, launches, most = session.device.stream(), session.pick(40, 3), session.pick(1024, 10)
    milliseconds(launch_run(session, stream, kernel, 3))  # loads the kernel
    taken: Times = defaultdict(list)
    medians: dict[str, list[float]] = defaultdict(list)
    slowest: dict[str, list[float]] = defaultdict(list)
    order, shuffled, bouts, wrong = ["alone", "again", "mapping"], random.Random(0), [], 0
    for _ in session.rounds(12, 2, seconds=10):
        shuffled.shuffle(order)
        for name in order:
            marks = launch_run(session, stream, kernel, launches)
            if name == "mapping":
                bouts.append(map_pages(session, taken, marks[-1], most))
            times = milliseconds(marks)
            medians[name].append(times[len(times) // 2])
            slowest[name].append(times[-1])
            wrong += not kernel.is_right()
    marks = launch_run(session, stream, kernel, launches)
    bouts.append(map_pages(session, defaultdict(list), marks[-1], most, touch=session.device.stream()))
    wrong += not kernel.is_right()

    by_events = (
        "CUDA events around each launch; a run with mapping / alone, same round; control: alone / alone"
    )
    for what, of in (("median", medians), (f"slowest launch of {launches}", slowest)):
        session.ratio(
            f"{kernel.name} beside mapping, {what}", of["mapping"], of["alone"], of["again"], by_events
        )
    session.figure(f"{kernel.name}, alone", medians["alone"], "ms", "CUDA events, median of each run")
    for call, microseconds in taken.items():
        session.figure(f"{call}, beside {kernel.name}", microseconds, "us", method)
    session.fact(f"runs of {kernel.name} beside mapping with a wrong result", wrong)
    pages, bad = map(sum, zip(*bouts, strict=True))
    session.fact(f"pages mapped beside {kernel.name} with wrong contents", f"{bad} of {pages}")


# --- 3. Whether driver calls wait for kernels that run elsewhere: each beside a long kernel, on other memory


@dataclass
class Call:
    """A call to time, and what makes it possible again afterwards."""

    name: str
    make: Callable[[], Answer]
    restore: Callable[[], object] = lambda: None
    times: Times = field(default_factory=lambda: defaultdict(list))
    waited: int = 0
    too_late: int = 0  # made after the end of the kernel: says nothing


def waiting(session: Session) -> None:
    busy_seconds = session.pick(0.02, 0.03)
    with Pages(session.driver, 8, 4).put_all() as pages:
        session.tensor_at(pages.address, (4 * PAGE,), torch.uint8).fill_(1)
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

        for load_name, load in (("a kernel that only spins", spin), (product.name, multiply)):
            calls = make_calls(session, pages)
            for _ in session.rounds(15, 2, seconds=10):
                for call in calls:
                    one_call(session, stream, load, call)
            for call in calls:
                report(session, load_name, call)


def one_call(session: Session, stream: Any, load: Callable[[], None], call: Call) -> None:
    """Alone, then beside the load. It waited where the kernel was over when it returned."""
    timed(call.times, "idle", call.make)
    session.device.synchronize()
    call.restore()
    load()
    end = session.device.mark(stream)
    time.sleep(0.002)  # for the kernel to be running, and not only launched
    over_before = end.query()
    timed(call.times, "beside", call.make)
    call.waited += end.query() and not over_before
    call.too_late += over_before
    session.device.synchronize()
    call.restore()


def report(session: Session, load: str, call: Call) -> None:
    method = "host clock; the kernel works on other memory"
    session.figure(f"{call.name}, nothing running", call.times["idle"], "us", method)
    session.figure(f"{call.name}, beside {load}", call.times["beside"], "us", method)
    times = len(call.times["beside"]) - call.too_late
    waits = "it WAITS" if call.waited > times / 2 or times == 0 else "it does not wait"
    session.fact(f"{call.name} returned after the end of {load}", f"{call.waited} of {times}: {waits}")


def make_calls(session: Session, pages: Pages) -> list[Call]:
    """Slots 0 to 3 are mapped and were written by a kernel; 4 to 7 are not mapped."""
    create, reserve_one = partial(session.driver.create, PAGE), partial(reserve, PAGE)
    handles, ranges = [must(create())], [must(reserve_one())]  # one of each is there to give back

    def making(made: list[int], call: Callable[[], Answer]) -> Answer:
        answer = call()
        made.append(must(answer))
        return answer

    def release() -> Answer:
        return cuda.cuMemRelease(handles.pop())

    def free() -> Answer:
        return cuda.cuMemAddressFree(ranges.pop(), PAGE)

    def map_again() -> None:
        pages.put(1, 1)
        session.tensor_at(pages.at(1), (PAGE,), torch.uint8).fill_(1)
        session.device.synchronize()

    made, reserved = partial(making, handles, create), partial(making, ranges, reserve_one)
    read_only = partial(pages.set_access, 2, 1, READ_ONLY)
    calls: dict[str, tuple[Callable[[], Answer], Callable[[], object]]] = {
        "cuMemUnmap": (lambda: pages.unmap(1), map_again),
        "cuMemSetAccess, to read-only": (read_only, lambda: pages.set_access(2)),
        "cuMemMap and cuMemSetAccess of a fresh page": (lambda: pages.put(5, 0), lambda: pages.unmap(5)),
        "cuMemCreate": (made, release),
        "cuMemRelease, and the memory goes": (release, made),
        "cuMemAddressReserve": (reserved, free),
        "cuMemAddressFree": (free, reserved),
        "cuMemGetInfo": (cuda.cuMemGetInfo, lambda: None),
    }
    return [Call(name, *both) for name, both in calls.items()]


# --- 8. Faults on purpose, each in a process of its own: what error they give, and whether the parent lives


def faults(session: Session) -> None:
    own = torch.arange(1 << 20, device=session.device.name)
    expected = int(own.sum())
    for work in (write_through_read_only, read_past_end, unmap_beneath_kernel):
        case = work.__name__.replace("_", " ")
        tell(session, case, session.apart(work, seconds=15))
        session.fact(f"{case}: the parent", parent_lives(session, own, expected))


def tell(session: Session, case: str, end: End) -> None:
    for name, value in end.facts.items():
        session.fact(f"{case}: {name}", value)
    session.fact(f"{case}: the process", end.text)


def write_through_read_only(session: Session) -> None:
    pages = Pages(session.driver, 2, 1)
    pages.put(0, 0)
    session.fact("set-access to read-only", name_of(pages.put(1, 0, READ_ONLY)))
    session.tensor_at(pages.at(0), (PAGE,), torch.uint8).fill_(7)
    session.device.synchronize()
    alias = session.tensor_at(pages.at(1), (PAGE,), torch.uint8)
    session.fact("the alias reads", int(alias.max()))
    fault(session, lambda: alias.fill_(1))
    session.fact("reading the alias afterwards", error_of(lambda: int(alias[0])))


def read_past_end(session: Session) -> None:
    pages = Pages(session.driver, 4, 1).put_all()
    seen = session.tensor_at(pages.address, (4 * PAGE,), torch.uint8)
    seen[:PAGE].fill_(1)
    session.device.synchronize()
    fault(session, lambda: seen.sum())


def unmap_beneath_kernel(session: Session) -> None:
    pages = Pages(session.driver, 64, 64).put_all()
    seen = session.tensor_at(pages.address, (64 * PAGE,), torch.uint8)
    seen.fill_(1)
    stream = session.device.stream()
    session.device.spin(stream, 1e-3)
    session.device.synchronize()

    def unmap_then_wait() -> None:
        session.device.spin(stream, 0.05)
        for _ in range(20):
            session.device.launch(stream, lambda: seen.add_(1))
        session.fact("cuMemUnmap", name_of(pages.unmap(0, 64)))

    fault(session, unmap_then_wait)


def fault(session: Session, work: Callable[[], object]) -> None:
    """Does what faults, and says what can still be done afterwards."""
    session.fact("begun", True)
    session.fact("error", error_of(lambda: (work(), session.device.synchronize())))
    session.fact(
        "a kernel afterwards", error_of(lambda: int(torch.ones(4, device=session.device.name).sum()))
    )
    session.fact("a VMM call afterwards", name_of(reserve(PAGE)))


def parent_lives(session: Session, own: torch.Tensor, expected: int) -> str:
    """Whether kernels, mapping and old contents are as before in this process."""
    try:
        with Pages(session.driver, 1, 1).put_all() as pages:
            fresh = session.tensor_at(pages.address, (PAGE,), torch.uint8).fill_(3)
            good = int(fresh.max()) == 3 and int(own.sum()) == expected
            session.device.synchronize()
    except Exception as error:
        return f"is broken: {first_line(error)}"
    return "lives" if good else "lives, with WRONG contents"


# --- 10. May the GPU itself wait for a mapping? A stream waits for a flag, and a kernel behind it touches a
# page that is mapped only then. What a worker might do meanwhile is tried, each in a process of its own. A
# call that waits for the stream could never return: a watchdog sets the flag, and only a call that it rescued
# counts as a deadlock.

WATCHDOG_SECONDS = 2.0
RESCUED = "DEADLOCK, until the watchdog set the flag"


def create_and_put(session: Session, pages: Pages, other: Any) -> Answer:
    pages.handles.append(must(session.driver.create(PAGE)))
    return pages.put(0, -1)


def put_and_zero(session: Session, pages: Pages, other: Any) -> Answer:
    answer = pages.put(0, 0)
    page = session.tensor_at(pages.at(0), (PAGE,), torch.uint8)
    session.device.launch(other, page.zero_)
    session.device.mark(other).synchronize()
    return answer


ACTIONS: dict[str, Callable[[Session, Pages, Any], Answer]] = {
    "map and set-access": lambda session, pages, other: pages.put(0, 0),
    "create, map and set-access": create_and_put,
    "map, set-access and zeroing in another stream": put_and_zero,
    "unmap of another page": lambda session, pages, other: pages.unmap(3),
    "reserve and address-free": lambda session, pages, other: cuda.cuMemAddressFree(
        must(reserve(PAGE)), PAGE
    ),
    "create and release": lambda session, pages, other: cuda.cuMemRelease(must(session.driver.create(PAGE))),
}


class Waiting:
    """A stream that waits for a flag, and then fills pages that may not be mapped yet."""

    def __init__(self, session: Session, stream: Any, over: torch.Tensor, value: int) -> None:
        self._session, self._flag = session, session.device.flag()
        self._over = threading.Event()
        session.device.hold(stream, self._flag)
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


def stream_wait(session: Session) -> None:
    for name in ACTIONS:
        end = session.apart(while_waiting, name, seconds=15)
        session.forward(end.findings, "figure")
        session.fact(f"{name}, while a stream waits for the flag", verdict(end))


def verdict(end: End) -> str:
    if RESCUED in end.facts:
        return RESCUED
    wrong = end.facts.get("wrong elements")
    return f"no deadlock, {wrong} wrong elements" if end.code == 0 else f"not tried to its end: {end.text}"


def while_waiting(session: Session, name: str) -> None:
    device = session.device
    stream, other = device.stream(), device.stream()  # torch has 32: more calls would give the first again
    numbers = torch.zeros(16, dtype=torch.int32, device=device.name)
    as_bytes = torch.zeros(16, dtype=torch.uint8, device=device.name)
    for one in (stream, other):  # a kernel that is first loaded while a stream waits might wait for it
        device.launch(one, lambda: numbers.fill_(1))
        device.launch(one, as_bytes.zero_)
    device.hold(stream, device.flag().fill_(1))
    device.synchronize()
    taken: Times = defaultdict(list)
    delays, wrong = [], 0
    for done in session.rounds(30, 3, seconds=4):
        with Pages(session.driver, 4, 2) as pages:
            pages.put(3, 1)  # the page for the unmapping
            over = session.tensor_at(pages.address, (PAGE // 4,), torch.int32)
            waits = Waiting(session, stream, over, done + 1)
            timed(taken, name, ACTIONS[name], session, pages, other)
            if 0 not in pages.mapped:
                pages.put(0, 0)
            delays.append(waits.finish())
            wrong += int((over != done + 1).sum())
            device.synchronize()
    session.figure(f"{name}, while a stream waits for the flag", taken[name])
    session.figure(
        f"{name}: from the flag to the end of the kernel", delays, "us", "host clock, query in a loop"
    )
    session.fact("wrong elements", wrong)


# --- 11. Which addresses a kernel may be given: what cuPointerGetAttribute(DEVICE_POINTER) answers to them.
# Triton asks it of every tensor that it launches a kernel over, and raises where the answer is no; so do
# torch.compile and FlexAttention. The first page of a KVCache's layer is not mapped while slot 0 is free, or
# once its window passed it.


def pointers(session: Session) -> None:
    for address, answer in answers_by_address(session.driver).items():
        session.fact(f"DEVICE_POINTER of an address that is {address}", name_of(answer))
    if importlib.util.find_spec("triton") is None or session.device.name.type != "cuda":
        session.skipped("Triton kernels", "they need Triton and a GPU")
        return
    for slot, is_mapped in ((1, "is"), (0, "is not")):
        case = f"a Triton kernel over a tensor whose first page {is_mapped} mapped"
        tell(session, case, session.apart(triton_reads, slot, seconds=20))


def answers_by_address(driver: Driver) -> dict[str, Answer]:
    """Of a range of six pages: what is asked of each."""
    device_pointer = partial(
        cuda.cuPointerGetAttribute, cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    )
    with Pages(driver, 6, 4) as pages:
        pages.put(0, 0)
        pages.put(1, 1, READ_ONLY)
        pages.put(2, 2)
        must(pages.set_access(2, 1, NO_ACCESS))
        must(pages.map(3, 3))
        asked = {
            "mapped": pages.at(0),
            "mapped, inside a page": pages.at(0) + PAGE // 2,
            "mapped read-only": pages.at(1),
            "mapped, and its access taken away": pages.at(2),
            "mapped, and never given access": pages.at(3),
            "reserved": pages.at(5),
        }
        answers = {name: device_pointer(address) for name, address in asked.items()}
        must(pages.map(4, 0))
        must(pages.unmap(4))
        answers["reserved, and was mapped before"] = device_pointer(pages.at(4))
    answers["no longer reserved"] = device_pointer(pages.address)
    return answers


def triton_reads(session: Session, slot: int) -> None:
    """A Triton kernel that is given the page at `slot` of two, and reads in the second one only."""
    from .triton_kernel import read_one

    with Pages(session.driver, 2, 1) as pages:
        pages.put(1, 0)
        second = session.tensor_at(pages.at(1), (PAGE // 4,), torch.int32).fill_(42)
        given = session.tensor_at(pages.at(slot), (PAGE // 4,), torch.int32)
        out = torch.zeros(1, dtype=torch.int32, device=session.device.name)
        session.device.synchronize()
        offset = (second.data_ptr() - given.data_ptr()) // 4
        session.fact("Triton's error", error_of(lambda: read_one[(1,)](given, offset, out)))
        session.fact("it reads, of 42", int(out))


# --- 12. What it costs to make memory so that its handles can be given to other processes. The handle type is
# chosen when the memory is made.

LIFE = ("create", "map", "set-access", "unmap", "release")


def handle_types(session: Session) -> None:
    driver, taken = session.driver, {}
    for name, kind in HANDLE_TYPES.items():
        answer = driver.create_plain(PAGE, kind)
        session.fact(f"cuMemCreate with {name}", name_of(answer))
        if answer[0] == 0:
            must(cuda.cuMemRelease(answer[1]))
            taken[name] = kind
    address, pages = must(reserve(PAGE)), session.pick(32, 2)
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    kinds = {**taken, "again": HANDLE_TYPES["none"]}
    for done in session.rounds(60, 3, seconds=8):
        for name, kind in kinds.items():
            times: Times = defaultdict(list)
            for _ in range(pages):
                handle = timed(times, "create", driver.create_plain, PAGE, kind)
                timed(times, "map", map_at, address, PAGE, handle)
                timed(times, "set-access", driver.set_access, address, PAGE)
                timed(times, "unmap", cuda.cuMemUnmap, address, PAGE)
                timed(times, "release", cuda.cuMemRelease, handle)
            if done > 0:  # the first is a warm-up
                for call in LIFE:
                    means[name, call].append(sum(times[call]) / pages)
    must(cuda.cuMemAddressFree(address, PAGE))
    method = f"host clock, the mean of {pages} pages of 2 MiB, interleaved; control: none, again"
    for call in LIFE:
        session.figure(f"{call}, none", means["none", call], "us", method)
        for name in [name for name in taken if name != "none"]:
            sides: list[Sequence[float]] = [means[kind, call] for kind in (name, "none", "again")]
            session.ratio(f"{call}, {name} / none", *sides, method)

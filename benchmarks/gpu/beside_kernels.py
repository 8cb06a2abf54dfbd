"""2. Mapping fresh addresses beside running kernels: right results, and the cost to the kernel and to the
call.

Each round runs the same launches three times: alone, alone again (the control), and with the host mapping
pages all the while, never at an address that was mapped before.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import torch

from .calls import timed
from .driver import Pages
from .kernels import Kernel, launch_run, make_kernels, milliseconds
from .session import Session

PAGE = 2 << 20
BY_EVENTS = (
    "CUDA events around each launch; median of a run with mapping / alone, same round; control: alone / alone"
)
CALLS = ("map", "set-access", "create")


def run(session: Session) -> None:
    stream = session.device.stream()
    wrong_kernels = wrong_pages = mapped = 0
    sentences = []
    idle = map_pages(session, None, session.pick(400, 10))
    for call, microseconds in idle.times.items():
        session.figure(
            f"{call}, nothing running", microseconds, "us", "host clock, 2 MiB pages, fresh addresses"
        )
    for kernel in make_kernels(session):
        outcome = beside(session, stream, kernel)
        wrong_kernels += outcome["wrong runs"]
        wrong_pages += outcome["wrong pages"]
        mapped += outcome["mapped"]
        sentences.append(outcome["sentence"])
    session.fact(
        "runs of kernels with a wrong result", wrong_kernels, "bit for bit against the same kernel alone"
    )
    session.fact(
        "freshly mapped pages with wrong contents", wrong_pages, f"of {mapped}, written and read by kernels"
    )
    right = "right" if wrong_kernels + wrong_pages == 0 else "WRONG"
    session.answer(
        f"Results are {right}: {mapped} pages mapped beside kernels, {wrong_pages} with wrong contents."
    )
    for sentence in sentences:
        session.answer(sentence)


class Mapped:
    """What a bout of mapping took, and how many pages it mapped while the kernels ran."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self.wrong = self.count = 0


OWN = 8  # of so many mappings, one is of a handle that was just created; the others share a few


def map_pages(session: Session, until: Any | None, most: int, touch: Any | None = None) -> Mapped:
    """Maps fresh pages one by one, until the event has passed or `most` are mapped; then checks each.

    With the stream `touch`, kernels in it write the pages at once, beside those that run.
    """
    driver, found = session.driver, Mapped()
    handles = min(most, 64)
    early: list[torch.Tensor] = []
    with Pages(driver, PAGE, most, handles) as pages:
        while found.count < most and (until is None or not until.query()):
            slot = found.count
            if slot % OWN == OWN - 1:
                (code, handle), microseconds = _timed_create(session)
                driver.must(code)
                pages.handles.append(handle)
                found.times["create"].append(microseconds)
            else:
                handle = pages.handles[slot % handles]
            for name, call, arguments in (
                ("map", driver.map, (pages.at(slot), PAGE, handle)),
                ("set-access", driver.set_access, (pages.at(slot), PAGE)),
            ):
                code, microseconds = timed(call, *arguments)
                driver.must(code)
                found.times[name].append(microseconds)
            pages.mapped.add(slot)
            found.count += 1
            if touch is not None and slot % OWN == OWN - 1:
                start = session.tensor_at(pages.at(slot), (512,), torch.int64)
                early.append(start)
                session.device.launch(touch, lambda start=start, slot=slot: start.fill_(slot))
        if until is not None:
            until.synchronize()  # the checks below must not slow it down
        session.device.synchronize()
        slots = range(OWN - 1, found.count, OWN)
        found.wrong += sum(not bool((t == slot).all()) for t, slot in zip(early, slots, strict=False))
        found.wrong += _wrong_pages(session, pages, found.count, handles)
    return found


def _timed_create(session: Session) -> tuple[tuple[int, int], float]:
    made: list[tuple[int, int]] = []
    _, microseconds = timed(lambda: made.append(session.driver.create(PAGE)) or 0)
    return made[0], microseconds


def _wrong_pages(session: Session, pages: Pages, count: int, handles: int) -> int:
    """Writes through every mapping and reads back; those of one handle must show the same."""
    seen = session.tensor_at(pages.address, (count, PAGE // 8), torch.int64)
    device = session.device.torch_device
    number = torch.arange(count, device=device)
    seen.copy_(number.unsqueeze(1).expand_as(seen))
    session.device.synchronize()
    low, high = seen.amin(dim=1), seen.amax(dim=1)
    session.device.synchronize()
    # Slots of one handle are written in no given order: any of their numbers may stand there, mixed too.
    is_own = number % OWN == OWN - 1
    own = is_own & (low == number) & (high == number)
    shared = ~is_own & (low % handles == number % handles) & (high % handles == number % handles)
    return count - int((own | shared).sum())


def beside(session: Session, stream: Any, kernel: Kernel) -> dict[str, Any]:
    launches = session.pick(40, 3)
    milliseconds(launch_run(session, stream, kernel, 3))  # loads the kernel
    most = session.pick(1024, 10)
    medians: dict[str, list[float]] = defaultdict(list)
    slowest: dict[str, list[float]] = defaultdict(list)
    beside_times: dict[str, list[float]] = defaultdict(list)
    wrong_runs = wrong_pages = mapped = 0
    order = ["alone", "again", "mapping"]
    shuffled = random.Random(0)
    for _ in session.rounds(12, 2, seconds=10):
        shuffled.shuffle(order)
        for name in order:
            marks = launch_run(session, stream, kernel, launches)
            if name == "mapping":
                found = map_pages(session, marks[-1], most)
                for call, microseconds in found.times.items():
                    beside_times[call] += microseconds
                wrong_pages, mapped = wrong_pages + found.wrong, mapped + found.count
            times = sorted(milliseconds(marks))
            medians[name].append(times[len(times) // 2])
            slowest[name].append(times[-1])
            wrong_runs += not kernel.is_right()
    marks = launch_run(session, stream, kernel, launches)
    found = map_pages(session, marks[-1], most, touch=session.device.stream())
    wrong_pages, mapped = wrong_pages + found.wrong, mapped + found.count
    wrong_runs += not kernel.is_right()

    slower = session.ratio(
        f"{kernel.name} beside mapping", medians["mapping"], medians["alone"], medians["again"], BY_EVENTS
    )
    session.ratio(
        f"{kernel.name} beside mapping, slowest launch of {launches}",
        slowest["mapping"],
        slowest["alone"],
        slowest["again"],
        BY_EVENTS.replace("median", "slowest launch"),
    )
    session.figure(f"{kernel.name}, alone", medians["alone"], "ms", "CUDA events, median of each run")
    cost = {
        call: session.figure(
            f"{call}, beside {kernel.name}", beside_times[call], "us", "host clock, 2 MiB pages"
        )
        for call in CALLS
        if beside_times[call]
    }
    sentence = (
        f"{kernel.name} takes {slower:.3f} times as long beside mapping; a call beside it, median in us: "
    )
    sentence += ", ".join(f"{call} {value:.3g}" for call, value in cost.items()) + "."
    return {"wrong runs": wrong_runs, "wrong pages": wrong_pages, "mapped": mapped, "sentence": sentence}

"""What the driver answers to VMM calls, errors included, in lines that the simulated libcuda is checked
against.

A line is one call: ``{"case": ..., "call": "cuMemUnmap", "range": 0, "offset": 0, "size": 2097152, "answer":
"CUDA_ERROR_INVALID_VALUE"}``. Ranges and handles are numbered in the order in which the case made them, so
that any driver can play the lines again. A case shares nothing with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from .driver import NO_ACCESS, READ_ONLY, READ_WRITE, Driver
from .session import Session

Line = dict[str, Any]
ARGUMENTS = {
    "cuMemAddressReserve": ("size", "alignment"),
    "cuMemCreate": ("size",),
    "cuMemMap": ("range", "offset", "size", "handle", "handle_offset"),
    "cuMemSetAccess": ("range", "offset", "size", "access"),
    "cuMemUnmap": ("range", "offset", "size"),
    "cuMemRelease": ("handle",),
    "cuMemAddressFree": ("range", "offset", "size"),
    "cuMemsetD8": ("range", "offset", "size"),
    "cuMemcpyDtoD": ("range", "offset", "from_offset", "size"),
    "cuCtxSynchronize": (),
}
IN_GRANULES = {"size", "alignment", "offset", "handle_offset", "from_offset"}


class Player:
    """Makes the calls of one case on a driver, and at the end gives back what they left."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ranges: list[tuple[int, int]] = []  # address, size; (0, 0) where it was refused
        self._handles: list[int] = []
        self._mapped: list[tuple[int, int]] = []  # whatever was ever mapped
        self._released: set[int] = set()
        self._freed: set[int] = set()

    def play(self, line: Line) -> str:
        """The answer's name. `line` holds the call and its arguments, in bytes."""
        return self._driver.name_of(
            getattr(self, "_" + line["call"])(**{a: line[a] for a in ARGUMENTS[line["call"]]})
        )

    def _at(self, range: int, offset: int) -> int:
        return self._ranges[range][0] + offset

    def _cuMemAddressReserve(self, size: int, alignment: int) -> int:
        code, address = self._driver.reserve(size, alignment)
        self._ranges.append((address, size) if code == 0 else (0, 0))
        return code

    def _cuMemCreate(self, size: int) -> int:
        code, handle = self._driver.create(size)
        self._handles.append(handle if code == 0 else 0)
        return code

    def _cuMemMap(self, range: int, offset: int, size: int, handle: int, handle_offset: int) -> int:
        code = self._driver.map(self._at(range, offset), size, self._handles[handle], handle_offset)
        if code == 0:
            self._mapped.append((self._at(range, offset), size))
        return code

    def _cuMemSetAccess(self, range: int, offset: int, size: int, access: int) -> int:
        return self._driver.set_access(self._at(range, offset), size, access)

    def _cuMemUnmap(self, range: int, offset: int, size: int) -> int:
        return self._driver.unmap(self._at(range, offset), size)

    def _cuMemRelease(self, handle: int) -> int:
        code = self._driver.release(self._handles[handle])
        if code == 0:
            self._released.add(handle)
        return code

    def _cuMemAddressFree(self, range: int, offset: int, size: int) -> int:
        code = self._driver.free(self._at(range, offset), size)
        if code == 0:
            self._freed.add(range)
        return code

    def _cuMemsetD8(self, range: int, offset: int, size: int) -> int:
        return self._driver.fill(self._at(range, offset), 1, size)

    def _cuMemcpyDtoD(self, range: int, offset: int, from_offset: int, size: int) -> int:
        return self._driver.copy(self._at(range, offset), self._at(range, from_offset), size)

    def _cuCtxSynchronize(self) -> int:
        return self._driver.synchronize()

    def close(self) -> None:
        """Gives back what is left; the answers say nothing, because what is left depends on the case's."""
        for address, size in self._mapped:
            self._driver.unmap(address, size)
        for number, handle in enumerate(self._handles):
            if handle and number not in self._released:
                self._driver.release(handle)
        for number, (address, size) in enumerate(self._ranges):
            if address and number not in self._freed:
                self._driver.free(address, size)


def reserve(size: float = 4, alignment: float = 0) -> tuple[Any, ...]:
    return ("cuMemAddressReserve", size, alignment)


def create(size: float = 1) -> tuple[Any, ...]:
    return ("cuMemCreate", size)


def put(
    offset: float, size: float = 1, handle: int = 0, handle_offset: float = 0, range: int = 0
) -> tuple[Any, ...]:
    return ("cuMemMap", range, offset, size, handle, handle_offset)


def access(offset: float, size: float = 1, flags: int = READ_WRITE, range: int = 0) -> tuple[Any, ...]:
    return ("cuMemSetAccess", range, offset, size, flags)


def unmap(offset: float, size: float = 1, range: int = 0) -> tuple[Any, ...]:
    return ("cuMemUnmap", range, offset, size)


def release(handle: int = 0) -> tuple[Any, ...]:
    return ("cuMemRelease", handle)


def free(size: float = 4, offset: float = 0, range: int = 0) -> tuple[Any, ...]:
    return ("cuMemAddressFree", range, offset, size)


def fill(offset: float, size: float) -> tuple[Any, ...]:
    return ("cuMemsetD8", 0, offset, size)


def copy(to: float, origin: float, size: float) -> tuple[Any, ...]:
    return ("cuMemcpyDtoD", 0, to, origin, size)


WAIT = ("cuCtxSynchronize",)
MAPPED = (reserve(), create(), put(0), access(0))
TWO_GRANULES = (reserve(), create(2), put(0, 2))
TWO_PAGES = (reserve(), create(), create(), put(0), put(1, handle=1))

# Sizes and offsets in granules. Those that may end their process, or leave its context in error, come last.
CASES_IN_ORDER: dict[str, tuple[tuple[Any, ...], ...]] = {
    "a page's life": (*MAPPED, fill(0, 1), WAIT, unmap(0), release(), free()),
    "release while mapped": (*MAPPED, release(), fill(0, 1), WAIT, unmap(0), free()),
    "one handle at two addresses": (
        reserve(),
        create(),
        put(0),
        put(1),
        access(0),
        access(1, 1, READ_ONLY),
        unmap(0),
    ),
    "set-access once for several pages": (*TWO_PAGES, access(0, 2), fill(0, 2), WAIT, unmap(0, 2)),
    "set-access twice, from read-write to read-only and back": (
        *MAPPED,
        access(0, 1, READ_ONLY),
        access(0, 1, NO_ACCESS),
        access(0),
    ),
    "set-access where nothing is mapped": (reserve(), access(0)),
    "set-access over mapped and unmapped": (reserve(), create(), put(0), access(0, 2), access(0)),
    "set-access on part of a page": (*TWO_GRANULES, access(0, 1), access(1, 1), access(0, 2)),
    "set-access from the middle of one page to the middle of the next": (
        reserve(),
        create(2),
        create(2),
        put(0, 2),
        put(2, 2, handle=1),
        access(1, 2),
        access(0, 4),
    ),
    "set-access of size 0": (*MAPPED, access(0, 0)),
    "unmap of several pages": (*TWO_PAGES, unmap(0, 2)),
    "unmap before set-access": (reserve(), create(), put(0), unmap(0)),
    "unmap twice": (*MAPPED, unmap(0), unmap(0)),
    "unmap where nothing was mapped": (reserve(), unmap(0)),
    "unmap of part of a page": (*TWO_GRANULES, unmap(0, 1), unmap(1, 1), unmap(0, 2)),
    "unmap of a page and part of the next": (
        reserve(),
        create(),
        create(2),
        put(0),
        put(1, 2, handle=1),
        unmap(0, 2),
        unmap(0, 3),
    ),
    "unmap over a hole": (
        reserve(),
        create(),
        create(),
        put(0),
        put(2, handle=1),
        unmap(0, 3),
        unmap(0),
        unmap(2),
    ),
    "unmap of a page and addresses behind it": (*MAPPED, unmap(0, 2), unmap(0)),
    "unmap of size 0": (*MAPPED, unmap(0, 0)),
    "map over what is mapped": (*MAPPED, create(), put(0, handle=1)),
    "map half over what is mapped": (*TWO_GRANULES, create(2), put(1, 2, handle=1)),
    "map again after unmap": (*MAPPED, unmap(0), put(0), access(0), fill(0, 1), WAIT),
    "map of part of a handle": (reserve(), create(2), put(0, 1), put(0, 2)),
    "map at an offset into the handle": (reserve(), create(2), put(0, 1, handle_offset=1), put(0, 2)),
    "map of more than the handle": (reserve(), create(), put(0, 2)),
    "map of size 0": (reserve(), create(), put(0, 0)),
    "map at no multiple of the granularity": (reserve(), create(), put(0.5)),
    "map past the end of the range": (reserve(1), create(2), put(0, 2)),
    "free with the wrong size": (reserve(), free(2), free(8), free(4)),
    "free from the middle": (reserve(), free(2, 2), free(4)),
    "free twice": (reserve(), free(), free()),
    "create of size 0": (create(0),),
    "create of half a granule": (create(0.5),),
    "reserve of size 0": (reserve(0),),
    "reserve of half a granule": (reserve(0.5),),
    "reserve with an alignment": (reserve(4, 16), create(), put(0), access(0)),
    "reserve with an alignment of three granules": (reserve(3, 3),),
    # RISKY from here on. Releasing what was released is not among them: the reference calls it undefined.
    "free while mapped": (*MAPPED, free(), unmap(0), free()),
    "map of a handle that was released and is mapped elsewhere": (*MAPPED, release(), put(1)),
    "copy from behind what is mapped": (*MAPPED, copy(0, 1, 1), WAIT),
    "fill over the end of what is mapped": (*MAPPED, fill(0.5, 1), WAIT),
    "fill of what is read-only": (reserve(), create(), put(0), access(0, 1, READ_ONLY), fill(0, 1), WAIT),
}

RISKY = list(CASES_IN_ORDER)[-5:]


def lines_of(case: str, granularity: int) -> Iterator[Line]:
    """The calls of a case, with sizes in bytes and without answers."""
    for call, *values in CASES_IN_ORDER[case]:
        arguments = dict(zip(ARGUMENTS[call], values, strict=True))
        in_bytes = {a: int(v * granularity) if a in IN_GRANULES else v for a, v in arguments.items()}
        yield {"case": case, "call": call, **in_bytes}


def differences(driver: Driver, lines: Iterable[Line]) -> list[str]:
    """Plays recorded lines on `driver`; where it answers otherwise than it did when they were recorded.

    Only the first of a case counts: what follows goes on from another state.
    """
    cases: dict[str, list[Line]] = {}
    for line in lines:
        cases.setdefault(line["case"], []).append(line)
    found = []
    for case, calls in cases.items():
        player = Player(driver)
        for line in calls:
            answer = player.play(line)
            if answer != line["answer"]:
                shown = ", ".join(f"{a}={line[a]}" for a in ARGUMENTS[line["call"]])
                found.append(
                    f"{case}: {line['call']}({shown}) answered {line['answer']} there, {answer} here"
                )
                break
        player.close()
    return found


def play(session: Session, cases: Sequence[str]) -> None:
    """Records the cases in order, up to one that leaves the device in error."""
    driver = session.driver
    driver.must(driver.retain_context())
    for case in cases:
        player = Player(driver)
        for line in lines_of(case, driver.granularity):
            session.call({**line, "answer": player.play(line)})
        player.close()
        if driver.synchronize() != 0:
            return


def run(session: Session) -> None:
    session.fact("granularity", session.driver.granularity, "cuMemGetAllocationGranularity, minimum; bytes")
    safe = list(CASES_IN_ORDER)[: -len(RISKY)]
    play(session, safe)
    with ThreadPoolExecutor(len(RISKY)) as together:  # most of their time goes to starting
        ends = list(together.map(lambda case: session.run_case(case, 30), RISKY))
    for end in ends:
        session.forward(found for found in end.findings if found["kind"] == "call")
    ended = [f"{case} {end.text}" for case, end in zip(RISKY, ends, strict=True) if end.code != 0]
    session.fact("cases that ended the process", ended or "none")
    session.answer(f"{len(CASES_IN_ORDER)} cases were played: the recording has every call with its answer.")


CASES = {case: partial(play, cases=[case]) for case in RISKY}

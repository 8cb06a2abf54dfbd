"""0. What the driver answers to VMM calls, wrong ones included, in lines that the simulated libcuda is held
to.

A line is one call: ``{"case": ..., "call": "cuMemUnmap", "range": 0, "offset": 0, "size": 2097152, "answer":
"CUDA_ERROR_INVALID_VALUE"}``. Ranges and handles are numbered in the order in which the case made them, so
that any driver can play the lines again. A case shares nothing with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cuda.bindings import driver as cuda

from .driver import Driver, map_at, name_of, reserve
from .session import Session

Line = dict[str, Any]
# The words of a case: the call, and its arguments with what they are where the case does not give them.
CALLS: dict[str, tuple[str, dict[str, float]]] = {
    "reserve": ("cuMemAddressReserve", {"size": 4, "alignment": 0}),
    "create": ("cuMemCreate", {"size": 1}),
    "map": ("cuMemMap", {"offset": 0, "size": 1, "handle": 0, "handle_offset": 0, "range": 0}),
    "access": ("cuMemSetAccess", {"offset": 0, "size": 1, "access": 3, "range": 0}),
    "unmap": ("cuMemUnmap", {"offset": 0, "size": 1, "range": 0}),
    "release": ("cuMemRelease", {"handle": 0}),
    "free": ("cuMemAddressFree", {"size": 4, "offset": 0, "range": 0}),
    "fill": ("cuMemsetD8", {"offset": 0, "size": 1, "range": 0}),
    "copy": ("cuMemcpyDtoD", {"offset": 0, "from_offset": 0, "size": 1, "range": 0}),
    "wait": ("cuCtxSynchronize", {}),
}
ARGUMENTS = dict(CALLS.values())
IN_GRANULES = {"size", "alignment", "offset", "handle_offset", "from_offset"}

MAPPED = "reserve; create; map; access"
TWO_GRANULES = "reserve; create 2; map 0 2"
TWO_PAGES = "reserve; create; create; map; map 1 1 1"
CASES = {
    "a page's life": f"{MAPPED}; fill; wait; unmap; release; free",
    "release while mapped": f"{MAPPED}; release; fill; wait; unmap; free",
    "one handle at two addresses": "reserve; create; map 0; map 1; access 0; access 1 1 1; unmap 0",
    "set-access once for several pages": f"{TWO_PAGES}; access 0 2; fill 0 2; wait; unmap 0 2",
    "set-access from read-write to read-only and back": f"{MAPPED}; access 0 1 1; access 0 1 0; access",
    "set-access where nothing is mapped": "reserve; access",
    "set-access over mapped and unmapped": "reserve; create; map; access 0 2; access",
    "set-access on part of a page": f"{TWO_GRANULES}; access 0 1; access 1 1; access 0 2",
    "set-access from the middle of one page to the middle of the next":
        "reserve; create 2; create 2; map 0 2; map 2 2 1; access 1 2; access 0 4",
    "set-access of size 0": f"{MAPPED}; access 0 0",
    "unmap of several pages": f"{TWO_PAGES}; unmap 0 2",
    "unmap before set-access": "reserve; create; map; unmap",
    "unmap twice": f"{MAPPED}; unmap; unmap",
    "unmap where nothing was mapped": "reserve; unmap",
    "unmap of part of a page": f"{TWO_GRANULES}; unmap 0 1; unmap 1 1; unmap 0 2",
    "unmap of a page and part of the next":
        "reserve; create; create 2; map; map 1 2 1; unmap 0 2; unmap 0 3",
    "unmap over a hole": "reserve; create; create; map; map 2 1 1; unmap 0 3; unmap 0; unmap 2",
    "unmap of a page and addresses behind it": f"{MAPPED}; unmap 0 2; unmap",
    "unmap of size 0": f"{MAPPED}; unmap 0 0",
    "map over what is mapped": f"{MAPPED}; create; map 0 1 1",
    "map half over what is mapped": f"{TWO_GRANULES}; create 2; map 1 2 1",
    "map again after unmap": f"{MAPPED}; unmap; map; access; fill; wait",
    "map of part of a handle": "reserve; create 2; map 0 1; map 0 2",
    "map at an offset into the handle": "reserve; create 2; map 0 1 0 1; map 0 2",
    "map of more than the handle": "reserve; create; map 0 2",
    "map of size 0": "reserve; create; map 0 0",
    "map at no multiple of the granularity": "reserve; create; map 0.5",
    "map past the end of the range": "reserve 1; create 2; map 0 2",
    "free with the wrong size": "reserve; free 2; free 8; free 4",
    "free from the middle": "reserve; free 2 2; free 4",
    "free twice": "reserve; free; free",
    "create of size 0": "create 0",
    "create of half a granule": "create 0.5",
    "reserve of size 0": "reserve 0",
    "reserve of half a granule": "reserve 0.5",
    "reserve with an alignment": "reserve 4 16; create; map; access",
    "reserve with an alignment of three granules": "reserve 3 3",
    # Those that may end their process, or leave its context in error. Releasing what was released is not
    # among them: the reference calls it undefined.
    "free while mapped": f"{MAPPED}; free; unmap; free",
    "map of a handle that was released and is mapped elsewhere": f"{MAPPED}; release; map 1",
    "copy from behind what is mapped": f"{MAPPED}; copy 0 1 1; wait",
    "fill over the end of what is mapped": f"{MAPPED}; fill 0.5 1; wait",
    "fill of what is read-only": "reserve; create; map; access 0 1 1; fill; wait",
}  # fmt: skip
SAFE, RISKY = list(CASES)[:-5], list(CASES)[-5:]


def lines_of(case: str, granularity: int) -> Iterator[Line]:
    """The calls of a case, with sizes in bytes and without answers."""
    for step in CASES[case].split("; "):
        word, *values = step.split()
        call, arguments = CALLS[word]
        given = dict(zip(arguments, map(float, values), strict=False))
        in_bytes = {
            a: int(v * (granularity if a in IN_GRANULES else 1)) for a, v in {**arguments, **given}.items()
        }
        yield {"case": case, "call": call, **in_bytes}


class Player:
    """Makes the calls of one case on a driver, and at the end gives back what they left."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ranges: list[int] = []  # addresses; 0 where it was refused
        self._handles: list[int] = []
        self._left: list[tuple[Any, ...]] = []  # calls that give back what is left, last made first

    def play(self, line: Line) -> str:
        """The answer's name. `line` holds the call and its arguments, in bytes."""
        call, size = line["call"], line.get("size", 0)
        base = self._ranges[line["range"]] if "range" in line else 0
        at, handle = base + line.get("offset", 0), self._handles[line["handle"]] if "handle" in line else 0
        if call == "cuMemAddressReserve":
            answer = reserve(size, line["alignment"])
            self._ranges.append(int(answer[1]) if answer[0] == 0 else 0)
            undo = cuda.cuMemAddressFree, self._ranges[-1], size
        elif call == "cuMemCreate":
            answer = self._driver.create(size)
            self._handles.append(int(answer[1]) if answer[0] == 0 else 0)
            undo = cuda.cuMemRelease, self._handles[-1]
        elif call == "cuMemMap":
            answer = map_at(at, size, handle, line["handle_offset"])
            undo = cuda.cuMemUnmap, at, size
        elif call == "cuMemSetAccess":
            return name_of(self._driver.set_access(at, size, line["access"]))
        else:
            function = getattr(cuda, call)
            arguments = {
                "cuMemRelease": (handle,),
                "cuMemsetD8": (at, 1, size),
                "cuMemcpyDtoD": (at, base + line.get("from_offset", 0), size),
                "cuCtxSynchronize": (),
            }.get(call, (at, size))
            answer = function(*arguments)
            if answer[0] == 0 and (function, *arguments) in self._left:
                self._left.remove((function, *arguments))
            return name_of(answer)
        if answer[0] == 0:
            self._left.insert(0, undo)
        return name_of(answer)

    def close(self) -> None:
        for call, *arguments in self._left:  # what was unmapped in parts by the case is refused
            call(*arguments)


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


def play(driver: Driver, cases: Sequence[str]) -> Iterator[Line]:
    """The lines of the cases with their answers, up to a case that leaves the device in error."""
    for case in cases:
        player = Player(driver)
        for line in lines_of(case, driver.granularity):
            yield {**line, "answer": player.play(line)}
        player.close()
        if cuda.cuCtxSynchronize()[0] != 0:
            return


def play_into(session: Session, cases: Sequence[str]) -> None:
    for line in play(session.driver, cases):
        session.note("call", **line)


def record(session: Session) -> None:
    session.fact("granularity", session.driver.granularity)
    play_into(session, SAFE)
    with ThreadPoolExecutor(len(RISKY)) as together:  # most of their time goes to starting
        ends = list(together.map(lambda case: session.apart(play_into, [case], seconds=30), RISKY))
    for case, end in zip(RISKY, ends, strict=True):
        session.forward(end.findings)
        session.fact(f"{case}: the process", end.text)

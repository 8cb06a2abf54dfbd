"""12. What it costs to make memory so that its handles can be given to other processes.

vtensor makes its memory for no other process. Sharing pages between processes would need a handle type,
which is chosen when the memory is made.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from .calls import timed
from .driver import FABRIC, NOT_SHAREABLE, POSIX_DESCRIPTOR, Driver
from .session import Session

PAGE = 2 << 20
TYPES = {"none": NOT_SHAREABLE, "a POSIX descriptor": POSIX_DESCRIPTOR, "fabric": FABRIC}
CALLS = ("create", "map", "set-access", "unmap", "release")


def run(session: Session) -> None:
    driver = session.driver
    taken = {}
    for name, kind in TYPES.items():
        code, handle = driver.create_plain(PAGE, kind)
        session.fact(f"cuMemCreate with {name}", driver.name_of(code))
        if code == 0:
            driver.must(driver.release(handle))
            taken[name] = kind
        else:
            session.skipped(name, driver.name_of(code))
    code, address = driver.reserve(PAGE)
    driver.must(code)
    pages = session.pick(32, 2)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    kinds = {**taken, "none, again": NOT_SHAREABLE}
    for done in session.rounds(60, 3, seconds=8):
        for name, kind in kinds.items():
            spent = [one_life(driver, address, kind) for _ in range(pages)]
            if done > 0:  # the first is a warm-up
                for call in CALLS:
                    times[name, call].append(sum(life[call] for life in spent) / pages)
    driver.must(driver.free(address, PAGE))

    method = f"host clock, the mean of {pages} pages of 2 MiB, interleaved; control: without a type, again"
    for call in CALLS:
        session.figure(f"{call}, none", times["none", call], "us", method)
    said = []
    for name in [name for name in taken if name != "none"]:
        ratios = {
            call: session.ratio(
                f"{call}, {name} / none",
                *(times[kind, call] for kind in (name, "none", "none, again")),
                method,
            )
            for call in CALLS
        }
        said.append(f"{name}: " + ", ".join(f"{call} {ratio:.3g} x" for call, ratio in ratios.items()))
    refused = ", ".join(name for name in TYPES if name not in taken)
    session.answer(f"Against memory without a handle type: {'; '.join(said) or 'no other is taken'}.")
    if refused:
        session.answer(f"Refused here: {refused}.")


def one_life(driver: Driver, address: int, kind: int) -> dict[str, float]:
    """Microseconds of each call in a page's life."""
    made: list[int] = []

    def create() -> int:
        code, handle = driver.create_plain(PAGE, kind)
        made.append(handle)
        return code

    calls = {
        "create": create,
        "map": lambda: driver.map(address, PAGE, made[0]),
        "set-access": partial(driver.set_access, address, PAGE),
        "unmap": partial(driver.unmap, address, PAGE),
        "release": lambda: driver.release(made[0]),
    }
    spent = {}
    for name in CALLS:
        code, spent[name] = timed(calls[name])
        driver.must(code)
    return spent

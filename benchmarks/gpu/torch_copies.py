"""9. Torch operations that walk a whole storage, over a plain view of a tensor of several rows.

The storage of such a view has holes between the rows (I3's exception), which fault on a GPU. Each operation
runs in a process of its own: what error does it give, does the process live, and the context in it?
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import vtensor

from .pools import open_pool
from .session import Session, first_line

PAGE = 2 << 20
OPERATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "clone, which reads the view only": lambda view: view.clone(),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda view: torch.save(view, io.BytesIO()),
    "untyped_storage().clone()": lambda view: view.untyped_storage().clone(),
}


def in_process(session: Session, operation: Callable[[torch.Tensor], object]) -> None:
    pool = open_pool(session, PAGE, 64 * PAGE)
    t = vtensor.empty(4, 300, 8, 128, grow_dim=1, capacity=16384, dtype=torch.bfloat16, pool=pool)
    t.fill_(1)
    session.device.synchronize()
    view = t.alias()
    session.fact("bytes of the storage", view.untyped_storage().nbytes())
    session.fact("bytes mapped", t.nbytes_mapped)
    session.fact("begun", True)
    session.fact("error", _attempt(session, lambda: operation(view)))
    session.fact("the view reads right afterwards", _attempt(session, lambda: _check(view)))
    session.fact("the tensor grows afterwards", _attempt(session, lambda: t.extend(2000)))


def _check(view: torch.Tensor) -> None:
    if not bool((view == 1).all()):
        raise ValueError("wrong contents")


def _attempt(session: Session, work: Callable[[], object]) -> str:
    try:
        work()
        session.device.synchronize()
    except Exception as error:
        return first_line(error)
    return "none"


CASES = {
    name: lambda session, operation=operation: in_process(session, operation)
    for name, operation in OPERATIONS.items()
}


def run(session: Session) -> None:
    with ThreadPoolExecutor(len(CASES)) as together:
        ends = list(together.map(lambda case: session.run_case(case, 30), CASES))
    for case, end in zip(CASES, ends, strict=True):
        for name, value in end.facts.items():
            session.fact(f"{case}: {name}", value)
        session.fact(f"{case}: the process", end.text)
        if "begun" not in end.facts:
            session.answer(f"{case}: could not be tried, {end.text}: {end.error_tail.strip()[-200:]}")
            continue
        facts = end.facts
        error = facts.get("error", f"the process {end.text}")
        reads, grows = (facts.get(f"the {what} afterwards") for what in ("view reads right", "tensor grows"))
        lives = f"The process lives; reading it afterwards: error {reads}; growing it: error {grows}"
        session.answer(f"{case}: error {error}. {lives if reads is not None else 'The process is gone'}.")

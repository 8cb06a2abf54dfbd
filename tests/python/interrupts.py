"""Exceptions from outside, one before every bytecode of an operation in turn (I17).

::

    def check(made, outcome):
        assert made.length in (1, 2)  # as before, or as after
        made.extend(1)

    at_every_bytecode(setup=make, operation=lambda made: made.extend(1), check=check)

The operation is begun again from a fresh ``setup()`` for each place, and interrupted at the first that was
not tried yet. Nothing is drawn and nothing is timed: two runs of a deterministic operation try the same
places in the same order.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import vtensor

__all__ = ["Interrupt", "Outcome", "at_bytecode", "at_every_bytecode", "moment", "path", "place"]


class Interrupt(BaseException):
    """What comes from outside: as KeyboardInterrupt, no ``except Exception`` catches it."""


@dataclass(frozen=True)
class Outcome:
    """How one try of the operation ended."""

    where: str
    """Before which bytecode it was interrupted; empty where it came to its end."""
    result: Any = None
    """What it returned, where it came to its end."""

    @property
    def interrupted(self) -> bool:
        return bool(self.where)


def place(frame: FrameType, n: int) -> Hashable:
    """The bytecode itself: each is tried once, in whichever call and round of a loop comes first."""
    return id(frame.f_code), frame.f_lasti


def path(frame: FrameType, n: int) -> Hashable:
    """The bytecode and the calls that lead to it: each is tried once for every way that leads there."""
    steps = []
    above: FrameType | None = frame
    while above is not None and above.f_code is not _Run.__call__.__code__:
        steps.append((id(above.f_code), above.f_lasti))
        above = above.f_back
    return tuple(steps)


def moment(frame: FrameType, n: int) -> Hashable:
    """Every bytecode that is executed, in every round of a loop."""
    return n


def at_every_bytecode(
    setup: Callable[[], Any],
    operation: Callable[[Any], Any],
    check: Callable[[Any, Outcome], None],
    *,
    within: ModuleType = vtensor,
    each: Callable[[FrameType, int], Hashable] = path,
    stride: int = 1,
    most: int = 20_000,
    seen: set[Hashable] | None = None,
) -> int:
    """Interrupts ``operation(state)`` before one bytecode after another, until it comes to its end.

    Args:
        setup: makes the state that the operation begins with, anew for every try.
        operation: is interrupted, by :class:`Interrupt`.
        check: looks at the state after each try, the last and undisturbed one included.
        within: the package or module whose frames are interrupted. Its calls into others end undisturbed: an
            exception is then raised before the call, or behind it, where its result is not stored yet.
        each: of a frame and the number of the bytecode in its try, which bytecodes count as the same, and are
            tried once: :func:`path`, :func:`place` (fewer) or :func:`moment` (all). The first two leave out
            bytecodes behind one that only loads: an exception does the same there as before it.
        stride: tries every n-th of them only.
        most: a bound for the tries.
        seen: what was tried before, of other operations; it grows.

    Returns the places that were tried.

    Raises:
        AssertionError: of ``check``; the exception did not come out of the operation; there are more places
            than ``most``. A note says where the operation was interrupted.
    """
    seen = set() if seen is None else seen
    handled = sys.exception()
    for tried in range(most):
        state = setup()
        run = _Run(_files(within), each, stride, seen)
        try:
            outcome = run(operation, state)
            assert sys.exception() is handled, "the harness left an exception as handled"
            check(state, outcome)
        except BaseException as error:
            error.add_note(f"interrupted {run.where}" if run.where else "not interrupted")
            raise
        if not outcome.interrupted:
            return tried
    raise AssertionError(f"more than {most} places: give a stride, or a smaller operation")


def at_bytecode(n: int, operation: Callable[[], Any], *, within: ModuleType = vtensor) -> Outcome:
    """Interrupts ``operation`` before its n-th bytecode, counted from 1, if it has so many."""
    return _Run(_files(within), moment, 1, set(range(n)))(lambda _: operation(), None)


class _Run:
    """One try."""

    def __init__(
        self, files: str, each: Callable[[FrameType, int], Hashable], stride: int, seen: set[Hashable]
    ) -> None:
        self.files, self.each, self.stride, self.seen = files, each, stride, seen
        self.left_out = _never if each is moment else _never_or_alike
        self.n = 0
        self.where = ""

    def __call__(self, operation: Callable[[Any], Any], state: Any) -> Outcome:
        tracing, collecting = sys.gettrace(), gc.isenabled()
        gc.disable()  # finalizers run where they would run undisturbed
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for this when tracing begins
        sys.settrace(self.trace)
        try:
            result = operation(state)
        except Interrupt:
            return Outcome(self.where)
        finally:
            sys.settrace(tracing)
            if collecting:
                gc.enable()
        assert not self.where, "the exception did not come out of the operation"
        return Outcome("", result)

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.startswith(self.files):
                return None
            frame.f_trace, frame.f_trace_lines = self.trace, False  # Python 3.13 wants it before the next
            frame.f_trace_opcodes = True
        elif event == "opcode" and frame.f_lasti not in self.left_out(frame.f_code):
            self.n += 1
            key = self.each(frame, self.n)
            if key not in self.seen:
                self.seen.add(key)
                if len(self.seen) % self.stride == 0:
                    self.where = _name(frame)
                    raise Interrupt(self.where)  # which ends the tracing, too
        return self.trace


def _files(module: ModuleType) -> str:
    file = Path(module.__file__ or "")
    return f"{file.parent}/" if hasattr(module, "__path__") else str(file)


def _name(frame: FrameType) -> str:
    code = frame.f_code
    here = (f"{i.opname} {i.argrepr}" for i in dis.get_instructions(code) if i.offset == frame.f_lasti)
    bytecode = next(here, f"offset {frame.f_lasti}").strip()
    return f"before {bytecode} in {code.co_qualname}, {Path(code.co_filename).name}:{frame.f_lineno}"


# Bytecodes that load something and do nothing else.
_LOADS = {
    *("RESUME", "NOP", "COPY", "SWAP", "PUSH_NULL", "KW_NAMES", "PRECALL", "MAKE_CELL", "COPY_FREE_VARS"),
    *("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLOSURE"),
    *("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"),
}


@cache
def _never_or_alike(code: CodeType) -> frozenset[int]:
    """Also those behind a bytecode that only loads: an exception there does what one before it does."""
    blocks = {edge for block in dis.Bytecode(code).exception_entries for edge in (block.start, block.end)}
    alike = {
        one.offset
        for above, one in pairwise(dis.get_instructions(code))
        if above.opname in _LOADS and not one.is_jump_target and one.offset not in blocks
    }
    return _never(code) | alike


@cache
def _never(code: CodeType) -> frozenset[int]:
    """The offsets at which nothing comes from outside, and where code relies on that.

    CPython looks for signals and asynchronous exceptions in calls and jumps back. There is neither between
    the end of a ``with`` block and the call of its ``__exit__``, which no exception handler covers (an
    ``__exit__`` in Python is interrupted in its own frame); nor in ``return name``, which hands over what may
    be stored nowhere else any more; nor where an ``except`` begins and ends: what is handled there would stay
    the thread's ``sys.exception()``.
    """
    found: set[int] = set()
    code_of = [one for one in dis.get_instructions(code) if one.opname != "PRECALL"]  # Python 3.11's
    for i, one in enumerate(code_of):
        if one.opname == "WITH_EXCEPT_START":
            found.update(range(code_of[i - 1].offset, one.offset + 1))
        elif one.opname == "CALL" and i > 3 and all(_is_none(a) for a in code_of[i - 3 : i]):
            begin = i - 4 if code_of[i - 4].opname == "SWAP" else i - 3  # below it, what the block returns
            found.update(range(code_of[begin].offset, one.offset + 1))
        elif one.opname == "RETURN_VALUE":
            begin = i - 1 if code_of[i - 1].opname.startswith(("LOAD_FAST", "LOAD_CONST")) else i
            found.update(range(code_of[begin].offset, one.offset + 1))
        elif one.opname in ("RETURN_CONST", "PUSH_EXC_INFO"):
            found.add(one.offset)
        elif one.opname == "POP_EXCEPT":
            begin = i - 1 if code_of[i - 1].opname == "COPY" else i
            found.update(range(code_of[begin].offset, one.offset + 1))
    return frozenset(found)


def _is_none(one: dis.Instruction) -> bool:
    return one.opname == "LOAD_CONST" and one.argval is None

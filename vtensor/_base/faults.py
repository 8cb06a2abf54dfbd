"""Reports of faults: which of vtensor's addresses a SIGSEGV hit, and what is there."""

from __future__ import annotations

import fcntl
import operator
import os
from typing import Protocol

from vtensor import _core
from vtensor.errors import InvalidArgument

_STDERR = 2


class _File(Protocol):
    def fileno(self) -> int: ...


_file: _File | int | None = None  # kept open as long as reports go there; None if there are none


def explain_faults(on: bool = True, *, file: _File | int | None = None) -> None:
    """Explains a SIGSEGV or SIGBUS of the host at one of vtensor's addresses before it ends the process.

    Two lines say what was touched (layer, slot and token of a :class:`~vtensor.KVCache`, position of a
    :class:`~vtensor.VTensor`, byte of an :class:`~vtensor.Arena`), what there is, and what to do. Then the
    signal goes on to the handler that was there before, such as faulthandler's, or ends the process. The exit
    status and the core dump are the same as without it. It says nothing of faults at other addresses. If a
    handler returns, as those of Python's ``signal`` do, the same fault happens again, and is not explained
    again.

    It is off by default. Importing ``vtensor.testing`` turns it on if it is off, and a fork does so in the
    child, where all of vtensor's addresses fault (I13). It may be called again.

    Args:
        on: False turns it off. If another handler was installed since, that handler stays, and so does this
            one behind it, which then only hands signals on.
        file: a file, or its descriptor, that stays open; standard error unless given. If it is a pipe, socket
            or terminal whose reader takes nothing for a second, the rest of a report is lost.

    Raises:
        InvalidArgument: ``file`` has no descriptor, or one that is not open for writing. Nothing was changed.
    """
    global _file
    if not on:
        _core.explain_no_faults()
        _file = None
        return
    _core.explain_faults(_STDERR if file is None else _descriptor(file))
    _file = _STDERR if file is None else file


def reports_go_to() -> _File | int | None:
    """The file of :func:`explain_faults`; None if it is off."""
    return _file


def _descriptor(file: _File | int) -> int:
    try:
        number = operator.index(file) if not hasattr(file, "fileno") else file.fileno()
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            return number
        why: object = "open for reading only"
    except (OSError, OverflowError, TypeError, ValueError) as error:
        why = error
    raise InvalidArgument(
        f"[explain_faults] file is {file!r} ({why}): give a file that is open for writing, or its descriptor"
    )

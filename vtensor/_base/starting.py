"""The package's first import: ends ``python -m vtensor`` without a traceback on Ctrl-C during the import of
torch, which takes seconds, or at the interpreter's end, and refuses a torch that is too old.

Python imports the package before it runs ``__main__``. If another program imports it, Ctrl-C stays as it was.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

_OLDEST_TORCH = "2.10"
INTERRUPTED = 130  # as shells report SIGINT: 128 + the number of the signal


def _stop(signum: int, frame: FrameType | None) -> None:
    # Not by an exception: half-imported code may swallow it, or print it as the cause of another.
    with suppress(OSError):
        os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)


def stop_at_once() -> None:
    """Makes Ctrl-C end the process where it is, unless it is ignored or handled: a shell that starts the
    command in the background may have it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def over() -> None:
    """Makes Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    # Until Python has found the module of `python -m`, argv has "-m" in its place.
    arguments = getattr(sys, "argv", [])
    return arguments[:1] == ["-m"] and sys.orig_argv[-len(arguments)] == "vtensor"


if _is_command():
    stop_at_once()


def _numbers(version: str) -> list[int]:
    """Its major and minor numbers."""
    return [int(part) for part in version.split(".")[:2]]


def _require_torch() -> None:
    """Refuses a torch older than pyproject.toml allows: the tests do not pass with it."""
    import torch

    if _numbers(torch.__version__) < _numbers(_OLDEST_TORCH):
        raise ImportError(
            f"[import vtensor] torch {torch.__version__} is installed, vtensor needs {_OLDEST_TORCH} or "
            f'newer: pip install "torch>={_OLDEST_TORCH}"'
        )


_require_torch()

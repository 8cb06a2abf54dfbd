"""A quiet end for Ctrl-C while ``python -m vtensor`` is still importing torch, which takes seconds.

The package is imported before a line of its ``__main__`` runs, so this is its first import. Where it is
imported by anything else nothing happens.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130  # 128 and the number of the signal, as shells tell it: SIGINT


def _stop(signum: int, frame: FrameType | None) -> None:
    # Not by an exception: what is half imported may swallow it, or print it as another one's cause.
    with suppress(OSError):
        os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)


def over() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    # Until the module of `python -m` is found, argv says "-m" in its place.
    arguments = getattr(sys, "argv", [])
    return arguments[:1] == ["-m"] and sys.orig_argv[-len(arguments)] == "vtensor"


# Who started it in the background may have SIGINT ignored.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)

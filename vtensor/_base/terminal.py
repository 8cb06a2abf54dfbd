"""What reports are made of: quantiles, tables, and the progress of long work on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress


class Progress:
    """Prints progress to stderr: every second on one line of a terminal, every ten seconds elsewhere.
    ``shown`` is whether to print at all; None: on a terminal alone."""

    def __init__(self, shown: bool | None = True) -> None:
        self._terminal = False
        with suppress(AttributeError, ValueError):  # as in tell()
            self._terminal = sys.stderr.isatty()
        self._wanted = self._terminal if shown is None else shown
        self._next = time.monotonic() + 1.0
        self._shown = False

    def __enter__(self) -> Callable[[str], None]:
        return self._show

    def _show(self, line: str) -> None:
        now = time.monotonic()
        if self._wanted and now >= self._next:
            self._next = now + (1.0 if self._terminal else 10.0)
            self._shown = True
            tell(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")

    def __exit__(self, *exception: object) -> None:
        if self._shown and self._terminal:
            tell("\r\x1b[K")


def drawable(name: str) -> str:
    """The name for a picture: no font has the bytes of a file's name that are no text."""
    return name.encode(errors="backslashreplace").decode()


def tell(text: str) -> None:
    """Writes to stderr, if there is one that takes it."""
    with suppress(AttributeError, OSError, ValueError):  # it is None, its reader has gone, or it is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table, with all but the first ``left`` columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])] for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted values, linear between neighbours: type 7 of Hyndman and Fan; 0 of none."""
    if not ordered:
        return 0.0
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])

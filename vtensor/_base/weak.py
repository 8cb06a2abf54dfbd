"""Weak sets that change while they are read."""

from __future__ import annotations

import weakref
from typing import TypeVar

T = TypeVar("T")


def members(weak: weakref.WeakSet[T]) -> list[T]:
    """What is in a set at one moment. A finalizer, a signal handler or another thread may add to it
    meanwhile: then Python refuses to go on, and it is read again."""
    while True:
        try:
            return list(weak)
        except RecursionError:  # a RuntimeError that would come again, for ever
            raise
        except RuntimeError:
            pass

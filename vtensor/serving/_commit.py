"""Changes that no exception from outside can split."""

from __future__ import annotations

from collections import abc, deque
from itertools import starmap
from operator import call
from typing import Any

Change = tuple[Any, ...]
"""A callable and its arguments."""


def commit(changes: abc.Iterable[Change]) -> None:
    """Makes changes one after the other: all of them or, before the first, none (I17).

    CPython raises exceptions from outside (Ctrl-C, asynchronous exceptions) between bytecodes, and there are
    none in here: each change calls a function in C that cannot fail, such as ``setattr`` or a list's method.
    Only the first may run Python code, as a dict does for keys with their own ``__hash__``.
    """
    deque(starmap(call, changes), maxlen=0)


def sets(target: object, **values: object) -> list[Change]:
    """Changes that set attributes."""
    return [(setattr, target, name, value) for name, value in values.items()]


def each(function: abc.Callable[..., object], *arguments: abc.Iterable[object]) -> Change:
    """A change that calls ``function`` as often as ``map`` does."""
    return deque(maxlen=0).extend, map(function, *arguments)

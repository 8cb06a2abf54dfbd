"""Checks and conversions of arguments. An error names the operation and the argument.

The core checks the arguments that it receives itself (csrc/bind/arguments.h).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch

from vtensor import _core
from vtensor._base.torch_modes import without_modes
from vtensor._base.units import byte_text, parse_bytes
from vtensor.errors import CapacityExceeded, InvalidArgument

T = TypeVar("T")

MOST = 2**62  # more than any address space has bytes
_MOST_SECONDS = 10**9


def type_text(kind: type) -> str:
    """In messages: a str, an int."""
    name = kind.__name__
    return f"an {name}" if name.startswith(tuple("AEIOaeio")) else f"a {name}"


def of_type(operation: str, name: str, value: object, wanted: type[T]) -> T:
    if not isinstance(value, wanted):
        raise _refusal(operation, name, value, type_text(wanted))
    return value


def text(operation: str, name: str, value: object) -> str:
    """`value`, after a check that it is a str that the core can take: without surrogates, in UTF-8."""
    value = of_type(operation, name, value, str)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"[{operation}] {name} is {value!r}, which cannot be encoded: give text without surrogates"
        ) from None
    return value


def integer(operation: str, name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> int:
    """`value` as an int, after a check that it is neither below `least` nor above `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise _refusal(operation, name, value, "an integer") from None
    if least <= number <= most:
        return number
    bound = f"at least {least}" if number < least else f"at most {most:,}"
    raise InvalidArgument(f"[{operation}] {name} is {number}: it must be {bound}")


def items(operation: str, name: str, value: Any, wanted: str) -> list[Any]:
    """The items of `value`: an iterable, or a tensor of at least one dimension."""
    if isinstance(value, torch.Tensor):
        if not has_memory(value):
            raise InvalidArgument(
                f"[{operation}] {name} is {type_text(type(value))} without memory: give {wanted}"
            )
        with without_modes():  # FakeTensorMode and vmap read no tensor
            value = value.tolist()
    unordered = isinstance(value, (str, bytes, Mapping, Set))
    try:
        if not unordered:
            return list(value)
    except TypeError:  # no iterable, or an array of no dimension
        pass
    raise InvalidArgument(f"[{operation}] {name} is {value!r}: give {wanted}")


def has_memory(t: torch.Tensor) -> bool:
    """Whether its elements lie somewhere: those of a fake tensor, or on the meta device, do not."""
    try:
        return t.numel() == 0 or t.data_ptr() != 0
    except RuntimeError:
        return False


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def bytes_spanned(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the begin of a tensor's first element to the end of its last; 0 without elements."""
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return 0 if 0 in sizes else (last + 1) * itemsize


def require_tables(operation: str, what: str, nbytes: int) -> None:
    """Refuses tables of so many bytes if the machine has less memory free, before any is made."""
    free = _core.free_host_memory()
    if nbytes > free:
        raise CapacityExceeded(
            f"[{operation}] {what} needs {byte_text(nbytes)} of host memory for its tables, the machine has "
            f"{byte_text(free)} free: ask for less"
        )


def byte_count(operation: str, name: str, value: Any, least: int = 0) -> int:
    """`value`, a whole number or text such as ``"40GiB"``, in bytes, after a check that it is not below
    `least`."""
    size = parse_bytes(value) if isinstance(value, str) else value
    if size is None:
        raise InvalidArgument(
            f"[{operation}] {name} is {value!r}: write it as '40GiB', '512MiB', '64KiB' or in bytes"
        )
    if isinstance(size, float) and not size.is_integer():
        raise InvalidArgument(f"[{operation}] {name} is {value!r}: give a whole number of bytes")
    try:
        nbytes = int(size) if isinstance(size, float) else operator.index(size)
    except TypeError:
        raise _refusal(operation, name, value, "a number of bytes, or text such as '40GiB'") from None
    if least <= nbytes <= MOST:
        return nbytes
    raise InvalidArgument(
        f"[{operation}] {name} is {nbytes} bytes: it must be at least {least} and fit in memory"
    )


def number(operation: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        raise _refusal(operation, name, value, "a number") from None


def seconds(operation: str, name: str, value: Any) -> float:
    """`value`, a time in seconds, as a float."""
    time = number(operation, name, value)
    if not 0 < time <= _MOST_SECONDS:
        raise InvalidArgument(
            f"[{operation}] {name} is {time}: it must be above 0 seconds and at most {_MOST_SECONDS:,}"
        )
    return time


def choice(operation: str, name: str, value: object, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(
            f"[{operation}] {name} is {value!r}: it must be one of {', '.join(map(repr, choices))}"
        )
    return value


def device_of(operation: str, value: Any) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise InvalidArgument(
            f"[{operation}] device is {value!r}: give one that torch.device() knows"
        ) from None


def tag_of(operation: str, tag: object) -> str:
    if not isinstance(tag, str) or not tag:
        raise InvalidArgument(f"[{operation}] tag is {tag!r}: give a name, such as 'weights'")
    return tag


def _refusal(operation: str, name: str, value: object, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"[{operation}] {name} is {type_text(type(value))}: give {wanted}")

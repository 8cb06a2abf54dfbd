"""Changes of caches that are made of several tensors, each in one step that no exception can come into.

For what keeps K and V of many layers in VTensors, and states of its own beside them: whatever is refused, and
wherever Ctrl-C arrives, all of it is as before or all of it as after (I8, I17).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vtensor import _core
from vtensor.tensor import VTensor

__all__ = ["reindex", "reserve"]


def reindex(
    tensors: Sequence[VTensor],
    indices: Sequence[Sequence[int]],
    states: Iterable[tuple[dict[str, Any], dict[str, Any]]] = (),
) -> None:
    """:meth:`VTensor.reindex` of each tensor by the index in its place: of all of them or of none.

    Args:
        tensors: VTensors, each named once.
        indices: for each tensor, integers in ``[-size(0), size(0))``.
        states: dicts, each with what is to be updated in it in the same step.

    Raises:
        InvalidArgument, OutOfPages, DriverError: as ``VTensor.reindex``; nothing was changed.
    """
    _core.reindex([tensor._core for tensor in tensors], list(tensors), list(indices), list(states))


def reserve(tensor: VTensor, capacity: int) -> None:
    """Moves a tensor's pages to a fresh range of ``capacity`` positions: :meth:`VTensor.reallocate` in place,
    for who cannot lose the tensor between the end of that and the assignment of its result.

    Raises:
        CapacityExceeded: ``capacity`` is below the length, or passes the address space.
        OutOfPages, DriverError: nothing was changed.
    """
    tensor._core.reserve(tensor, capacity)

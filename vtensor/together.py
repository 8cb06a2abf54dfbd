"""Changes of several tensors in one step that no exception can interrupt.

For caches that keep K and V of many layers in VTensors, and other state next to them. After an error, or a
Ctrl-C at any point, everything is as before the change or everything as after it (I8, I17).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vtensor import _core
from vtensor._base.arguments import items, type_text
from vtensor.errors import InvalidArgument
from vtensor.tensor import TensorCore, VTensor

__all__ = ["reindex", "reserve"]


def reindex(
    tensors: Sequence[VTensor],
    indices: Sequence[Sequence[int]],
    states: Iterable[tuple[dict[str, Any], dict[str, Any]]] = (),
) -> None:
    """Calls :meth:`VTensor.reindex` on each tensor with its own index: on all of them or on none.

    Args:
        tensors: VTensors, each named once.
        indices: for each tensor, integers in ``[-size(0), size(0))``.
        states: pairs of a dict and the entries to update it with in the same step.

    Raises:
        InvalidArgument, OutOfPages, DriverError: as for ``VTensor.reindex``. Nothing was changed.
    """
    tensors = items("together.reindex", "tensors", tensors, "a sequence of VTensors")
    indices = items("together.reindex", "indices", indices, "an index for each tensor")
    if len(tensors) != len(indices):
        raise InvalidArgument(
            f"[together.reindex] {len(tensors)} tensors and {len(indices)} indices: give one for each"
        )
    cores = [_core_of("together.reindex", tensor) for tensor in tensors]
    if len(set(map(id, cores))) < len(cores):
        raise InvalidArgument("[together.reindex] a tensor is named twice: give each once")
    _core.reindex(cores, tensors, indices, list(states))


def reserve(tensor: VTensor, capacity: int) -> None:
    """Moves a tensor's pages to a new range of ``capacity`` positions and keeps the tensor object.

    :meth:`VTensor.reallocate` returns a new tensor, which an exception before the assignment would lose. This
    function has no such moment.

    Raises:
        CapacityExceeded: if ``capacity`` is below the length, or exceeds the address space.
        OutOfPages, DriverError: as for ``VTensor.reallocate``. Nothing was changed.
    """
    _core_of("together.reserve", tensor).reserve(tensor, capacity)


def _core_of(operation: str, tensor: VTensor) -> TensorCore:
    core = getattr(tensor, "_core", None)
    if not isinstance(core, TensorCore):  # a reader is a VTensor too, of a core that moves nothing
        raise InvalidArgument(f"[{operation}] a tensor is {type_text(type(tensor))}: give a VTensor")
    return core

"""The whole reservation of a VTensor as one plain tensor whose address and shape never change.

What is compiled or captured once for a fixed shape (FlexAttention, CUDA graphs, kernels told their lengths in
a tensor) takes it while the VTensor behind it grows. DESIGN's I3 names it as an exception: a full extent is
only partly mapped. On the host holes read as zeros; on CUDA they fault, so what a kernel reads is to be
covered first."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from vtensor import Closed, InvalidArgument, VTensor

__all__ = ["FullExtent"]

_TILE = 128


class FullExtent:
    """All ``capacity`` positions of a VTensor, mapped or not.

    Args:
        owner: made with ``when_full="raise"`` and not shrunk at the front: its address must stay. The pages
            it has by now stay mapped as long as ``tensor`` lives, so best make it while the owner is short.

    Attributes:
        owner: grows as always; what it appends shows here.
        tensor: plain, of ``owner``'s shape and strides with ``capacity`` positions along ``grow_dim``.
            Reading or writing beyond what :meth:`cover` promised faults on CUDA. It keeps the addresses
            reserved, so no other tensor's data ever shows in it, and shows nothing once ``owner`` is closed.
    """

    def __init__(self, owner: VTensor) -> None:
        if not isinstance(owner, VTensor):
            raise InvalidArgument(
                f"[FullExtent] a {type(owner).__name__}: give the VTensor itself, not a view"
            )
        self.owner = owner
        self._covered = self._length = -1
        self._address = owner.address
        self.cover(min(1, owner.capacity))  # a storage that is alive keeps the range reserved
        self.tensor = _over(owner, self._held)

    def cover(self, length: int, tail: int = 0) -> FullExtent:
        """Makes whole tiles of 128 positions readable, up to ``length + tail`` or the capacity; returns
        itself.

        What lies behind ``owner.length`` in them is set to zeros where a tile is new or the owner became
        shorter since the last call, because kernels multiply it by a weight of zero, and zero times NaN is
        NaN. (What was both written and truncated since the last call is as finite as it was written.) The
        tiles stay mapped until the next call; the owner's length stays as it is.

        Raises:
            CapacityExceeded: ``length`` is above the capacity.
            OutOfPages, DriverError: nothing was changed.
            InvalidArgument: the owner moved to other addresses.
            Closed: the owner was closed.
        """
        owner = self.owner
        if owner.closed:
            raise Closed(
                "[FullExtent.cover] the VTensor is closed: make a new one, and a new FullExtent of it"
            )
        if owner.address != self._address:
            raise InvalidArgument(
                "[FullExtent.cover] the VTensor has moved to other addresses by a front shrink, reindex or "
                "when_full='move': make a new FullExtent of it"
            )
        stop = -(-(length + tail) // _TILE) * _TILE
        if stop > owner.capacity:
            stop = max(length, owner.capacity)
        before = owner.length
        if (
            stop == self._covered and before >= self._length
        ):  # shorter: what was truncated is behind the length
            self._length = before
            return self
        try:
            self._held = owner.extend(max(0, stop - before)).alias()
            self._held.narrow(owner.grow_dim, before, owner.length - before).zero_()
        finally:
            owner.truncate(before)
        self._covered, self._length = stop, before
        return self


class _Bytes:
    """Device memory as ``__cuda_array_interface__`` describes it (numba's documentation, version 3)."""

    def __init__(self, address: int, nbytes: int, keeps: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self._keeps = keeps


def _over(owner: VTensor, keeps: torch.Tensor) -> torch.Tensor:
    """``owner``'s positions 0 to ``capacity`` as a plain tensor that keeps ``keeps`` alive."""
    sizes = [owner.capacity if d == owner.grow_dim else n for d, n in enumerate(owner.shape)]
    elements = 1 + sum((n - 1) * s for n, s in zip(sizes, owner.stride(), strict=True)) if all(sizes) else 0
    nbytes = elements * owner.element_size()
    if owner.device.type == "cuda":
        memory = _Bytes(owner.address, nbytes, keeps)
        flat = torch.as_tensor(memory, device=owner.device)
    else:
        array: Any = (ctypes.c_uint8 * nbytes).from_address(owner.address)
        array.keeps = keeps
        flat = torch.frombuffer(array, dtype=torch.uint8)
    return flat.view(owner.dtype).as_strided(sizes, owner.stride())

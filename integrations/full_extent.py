"""The whole reservation of a VTensor as one plain tensor whose address and shape never change.

Use it for code that is compiled or captured once for a fixed shape, while the VTensor grows: FlexAttention,
CUDA graphs, kernels that take their lengths in a tensor. It is an exception to I3, because a full extent is
only partly mapped. On the host, holes read as zeros. On CUDA they fault, so cover what a kernel reads before
the launch.
"""

from __future__ import annotations

from typing import Any

import torch

from vtensor import Closed, InvalidArgument, VTensor

__all__ = ["FullExtent"]

_TILE = 128


class FullExtent:
    """All ``capacity`` positions of a VTensor, mapped or not.

    Args:
        owner: a VTensor whose address stays: made with ``when_full="raise"``, and never shrunk at the front.
            The pages that it has now stay mapped as long as ``tensor`` lives, so make it while the owner is
            short.

    Attributes:
        owner: the VTensor. What it appends shows in ``tensor``.
        tensor: a plain tensor of ``owner``'s shape and strides, with ``capacity`` positions along
            ``grow_dim``. On CUDA, a read or write outside the tiles that :meth:`cover` has mapped faults.
            ``tensor`` keeps the addresses reserved, so that it never shows another tensor's data, also after
            ``owner`` is closed.
    """

    def __init__(self, owner: VTensor) -> None:
        if not isinstance(owner, VTensor):
            raise InvalidArgument(
                f"[FullExtent] a {type(owner).__name__}: give the VTensor itself, not a view"
            )
        if owner.capacity == 0:
            raise InvalidArgument("[FullExtent] the capacity is 0: make the VTensor with a larger capacity=")
        self.owner = owner
        self._covered = self._length = -1
        self._address = owner.address
        self.cover(1)  # because a live storage keeps the range reserved
        sizes = [owner.capacity if d == owner.grow_dim else n for d, n in enumerate(owner.shape)]
        elements = 1 + sum((n - 1) * s for n, s in zip(sizes, owner.stride(), strict=True))
        nbytes = elements * owner.element_size()
        with torch.inference_mode(False):  # code outside that mode could not write to it
            storage: Any = torch._C._construct_storage_from_data_pointer(owner.address, owner.device, nbytes)
            storage.keeps = self._held
            self.tensor = torch.empty(0, dtype=owner.dtype, device=owner.device)
            self.tensor.set_(storage, 0, sizes, owner.stride())

    def cover(self, length: int, tail: int = 0) -> FullExtent:
        """Maps whole tiles of 128 positions up to ``length + tail``, or the capacity. Returns the FullExtent.

        If tiles are new, or the owner has become shorter since the last call, sets the positions past
        ``owner.length`` in them to zeros: kernels multiply them by a weight of zero, and zero times NaN is
        NaN. Positions that were both written and truncated since the last call keep what was written. The
        tiles stay mapped until the next call. The owner's length does not change.

        Args:
            length: positions to cover.
            tail: further positions to cover, as far as the capacity reaches.

        Raises:
            CapacityExceeded: if ``length`` is above the capacity.
            OutOfPages, DriverError: as for ``VTensor.extend``. Nothing was changed.
            InvalidArgument: if the owner has moved to other addresses.
            Closed: if the owner is closed.
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
        stop = min(-(-(length + tail) // _TILE) * _TILE, max(length, owner.capacity))
        before = owner.length
        # If it is shorter, truncated positions lie past the length.
        if stop != self._covered or before < self._length:
            try:
                self._held = owner.extend(max(0, stop - before)).alias()
                self._held.narrow(owner.grow_dim, before, owner.length - before).zero_()
                owner.truncate(before)
            except BaseException:
                owner.truncate(before)
                raise
        self._covered, self._length = stop, before
        return self

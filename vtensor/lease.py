"""What kernels still need, and what tensors will need soon."""

from __future__ import annotations

from collections.abc import Iterable

from vtensor import _core
from vtensor._streams import Stream, stream_handle
from vtensor.tensor import VTensor


class lease(_core.Lease):
    """A context manager around kernel launches: their work still needs these tensors.

    Pages that the tensors give back meanwhile, from whatever thread, stay mapped until the work launched in
    the stream up to the end of the ``with`` has passed. Without a lease the stream that is current at
    ``shrink``, ``close`` or ``fork`` is the one waited for, so a lease is for work in other streams.

    Inside the capture of a CUDA graph the lease lasts for the graph's life: as long as it can be replayed.
    So a replay needs none for its pages to stay; but nobody knows of the streams it is launched in, so that
    ``fork``, ``unshare``, ``reallocate`` and the first growth after a ``fork``, which remap pages in place,
    wait for replays in other streams than the current one only where those are launched in a lease too.

    A lease that names its stream waits for what was launched there by the end of the ``with``, so the stream
    may be destroyed after it. Work in it is waited for by ``fork`` and ``unshare`` from the beginning on.

    Args:
        tensors: VTensors.
        stream: in which the work is launched: a ``torch.cuda.Stream``, a ``cuda.core`` stream or an integer;
            torch's current stream at the end of the ``with`` unless given. On the CPU it means nothing.

    Raises:
        Closed: one of the tensors is closed.
        InvalidArgument: something that is no VTensor, or no stream.
        VTensorError: the lease has begun already.
        DriverError: at the end, where no fence can be made: the pages then stay held for good.
    """

    def __init__(self, *tensors: VTensor, stream: Stream | None = None) -> None:
        super().__init__(tensors, stream_handle("lease", stream))


def prepare(tensors: Iterable[VTensor], n: int) -> None:
    """:meth:`VTensor.prepare` for many tensors, with one wake-up of the mapper.

    Raises:
        CapacityExceeded: one of them has less room; those before it are prepared.
        InvalidArgument: ``n`` is negative, or something is no VTensor.
        Closed: one of them is closed.
    """
    _core.prepare(tensors, n)

"""Leases, which keep pages mapped for running kernels."""

from __future__ import annotations

from collections.abc import Sequence

from vtensor import _core
from vtensor._streams import Stream, stream_handle
from vtensor.tensor import VTensor


class lease(_core.Lease):
    """A context manager around kernel launches: keeps the tensors' pages mapped for the work launched in it.

    Pages that the tensors give back in the meantime, from any thread, stay mapped until the work launched in
    the stream up to the end of the ``with`` has passed. Without a lease, ``shrink``, ``close`` and ``fork``
    consider only the stream that is current at the call. So a lease is for work in other streams.

    Inside the capture of a CUDA graph the lease lasts as long as the graph can be replayed, so a replay needs
    no lease for its pages to stay mapped. CUDA does not report the streams in which a graph is replayed. So
    ``fork``, ``unshare``, ``reallocate`` and the first growth after a ``fork``, which remap pages in place,
    wait for a replay in another stream than the current one only if it is launched in a lease too.

    A lease that names its stream covers the work launched there before the end of the ``with``, so the stream
    may be destroyed after that. ``fork`` and ``unshare`` wait for work in that stream as soon as the lease
    begins.

    Args:
        tensors: VTensors, or one list of them.
        stream: the stream in which the work is launched: a ``torch.cuda.Stream``, a ``cuda.core`` stream or
            an integer. Defaults to torch's current stream at the end of the ``with``. Ignored on the CPU.

    Raises:
        Closed: if one of the tensors is closed.
        InvalidArgument: if one of ``tensors`` is no VTensor, or ``stream`` no stream.
        VTensorError: if the lease has begun already.
        DriverError: at the end of the ``with``, if no fence can be made. The pages then stay pinned for good.
    """

    def __init__(self, *tensors: VTensor | Sequence[VTensor], stream: Stream | None = None) -> None:
        if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
            tensors = tuple(tensors[0])
        super().__init__(tensors, stream_handle("lease", stream))

"""The exceptions of vtensor.

::

    VTensorError (RuntimeError)
     ├─ InvalidArgument (ValueError)    a size, dtype, device or index that is not valid
     ├─ CapacityExceeded (ValueError)   more positions than the reserved address range holds
     ├─ OutOfPages (MemoryError, torch.OutOfMemoryError)
     │                                  the pool's budget, or the device, has no page left
     ├─ NoFreeSlot                      every slot of a KV cache is taken
     ├─ DriverError                     the operating system or CUDA refused a call; the operation was undone
     ├─ TimedOut (TimeoutError)         work on the device, or another thread, did not end within the bound
     ├─ Asleep                          its memory is away until Pool.wake
     └─ Closed                          the tensor or pool is closed

Messages have the form ``[operation] what was asked, what there is: what to do``.
"""

from __future__ import annotations

import torch

__all__ = [
    "Asleep",
    "CapacityExceeded",
    "Closed",
    "DriverError",
    "InvalidArgument",
    "NoFreeSlot",
    "OutOfPages",
    "TimedOut",
    "VTensorError",
]


class VTensorError(RuntimeError):
    """The base class of vtensor's exceptions."""


class InvalidArgument(VTensorError, ValueError):
    """An argument is not valid. Nothing was changed."""


class CapacityExceeded(VTensorError, ValueError):
    """An operation needs more positions than the tensor's reserved address range holds."""


class OutOfPages(VTensorError, torch.OutOfMemoryError, MemoryError):
    """The budget of the pool, or the memory of its device, has too few pages. Nothing was changed.

    Code that catches ``torch.cuda.OutOfMemoryError`` catches it too.
    """


class NoFreeSlot(VTensorError):
    """Every slot of a KV cache is taken: it holds ``max_batch`` requests."""


class TimedOut(VTensorError, TimeoutError):
    """A wait reached its bound (I12). Nothing was given up: a later operation waits again."""


class Asleep(VTensorError):
    """An operation needs memory that :meth:`vtensor.Pool.sleep` has given back. Nothing was changed."""


class Closed(VTensorError):
    """The tensor or the pool is closed."""


class DriverError(VTensorError):
    """The operating system or CUDA refused a call. The operation was undone.

    Attributes:
        call: the call, such as ``"mmap"`` or ``"cuMemMap"``.
        code: its errno or CUresult.
        name: the code's name, such as ``"ENOMEM"``.
    """

    def __init__(self, message: str, call: str = "", code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name

    def __reduce__(self) -> tuple[type[DriverError], tuple[str, str, int, str]]:
        return type(self), (str(self), self.call, self.code, self.name)

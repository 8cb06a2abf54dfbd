"""What vtensor raises.

::

    VTensorError (RuntimeError)
     ├─ InvalidArgument (ValueError)    a size, dtype, device or index that cannot be meant
     ├─ CapacityExceeded (ValueError)   more positions than the reserved address range holds
     ├─ OutOfPages (MemoryError, torch.OutOfMemoryError)
 │                                  the pool's budget, or the device, has no page left
     ├─ NoFreeSlot                      every slot of a KV cache is taken
     ├─ DriverError                     the operating system or CUDA refused a call; what it did was undone
     ├─ TimedOut (TimeoutError)         work on the device, or another thread, did not end within the bound
     └─ Closed                          the tensor or pool was closed before

Messages read ``[operation] what was asked, what there is: what to do``.
"""

from __future__ import annotations

import torch

__all__ = [
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
    """Any error of vtensor."""


class InvalidArgument(VTensorError, ValueError):
    """An argument that cannot be meant: nothing was changed."""


class CapacityExceeded(VTensorError, ValueError):
    """More positions were asked for than the tensor's reserved address range holds."""


class OutOfPages(VTensorError, torch.OutOfMemoryError, MemoryError):
    """The budget of the pool, or the memory of its device, has too few pages. Nothing was changed.

    What handles ``torch.cuda.OutOfMemoryError`` handles it too.
    """


class NoFreeSlot(VTensorError):
    """Every slot of a KV cache is taken: ``max_batch`` requests are in it."""


class TimedOut(VTensorError, TimeoutError):
    """A wait reached its bound (I12). What was waited for stays as it is, and is looked at again."""


class Closed(VTensorError):
    """The tensor or the pool was closed before."""


class DriverError(VTensorError):
    """A call to the operating system or to CUDA was refused; what the operation had done was undone.

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

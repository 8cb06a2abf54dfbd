"""Keeps torch.multiprocessing from sharing vtensor's memory with other processes in torch's own way.

Torch shares a tensor in two steps: it copies the whole storage to shared memory, then replaces the storage's
memory with the copy. Every tensor over that storage would leave the addresses that vtensor maps (I1), and its
writes would go where vtensor never reads. So vtensor's storages refuse, by methods set on each. Reducers for
its classes hand tensors of a shareable pool over, and refuse others (vtensor/sharing.py). Nothing of torch is
patched.

A tensor that another library made over our memory, through DLPack for example, has a storage of its own.
Torch shares a copy of that one, and vtensor's storages stay in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn, Self

from vtensor.errors import VTensorError


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise VTensorError(
        "[torch.multiprocessing] torch cannot share this tensor's memory, which a vtensor.Pool maps: send a "
        "copy, x.clone(), or from a shareable pool a whole VTensor, Arena, KVCache or vtensor.share(module)"
    )


STORAGE_METHODS = dict.fromkeys(("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_"), _refuse)
"""The methods that torch calls on a storage before it copies a byte. csrc/bind/torch_bridge.cpp sets them on
each storage of vtensor's, and an attribute of the object wins over the method of its class."""


class StaysHere:
    """An object that is neither pickled nor copied: its memory is mapped in this process, at one place."""

    _instead = "make another one, and send or save tensors with x.clone()"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"[{type(self).__name__}] it can be neither pickled nor copied, its memory is mapped in this "
            f"process: {self._instead}"
        )


class Closes(StaysHere, ABC):
    """Such an object that the end of a ``with`` closes."""

    @abstractmethod
    def close(self) -> None:
        """Gives its memory back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

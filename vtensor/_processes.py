"""Other processes: what torch.multiprocessing may do with our memory, which is nothing yet.

Torch shares a tensor by copying the whole of its storage, however little of it the tensor shows, into shared
memory that it then puts in the storage's place. Every tensor over it would leave the addresses that vtensor
maps (I1), and write where vtensor never reads. So our storages and our tensors refuse, each by what is set on
it or registered for its class; nothing of torch is patched. Sharing for real, of page handles by file
descriptor, would begin here.

A tensor that another library, or DLPack, made over our memory has a storage that we never see: torch shares a
copy of it, and ours stay where they are.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch

from vtensor.errors import VTensorError


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise VTensorError(
        "[torch.multiprocessing] this tensor's memory is a VTensor's or a KVCache's, which is mapped in this "
        "process alone: share or send a copy, x.clone()"
    )


STORAGE_METHODS = dict.fromkeys(("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_"), _refuse)
"""What torch asks of a storage before it copies a byte; csrc/bind/torch_face.cpp sets it on each storage of
ours, where it comes before the method of the class."""


def keep_private(tensor_class: type[torch.Tensor]) -> None:
    """Has multiprocessing's queues, pipes and process arguments refuse tensors of a class of ours."""
    ForkingPickler.register(tensor_class, _refuse)

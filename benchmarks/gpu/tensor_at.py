"""A torch tensor over given addresses, mapped or not: torch must neither look behind them nor own them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p

import torch

_CPU, _CUDA, _UINT = 1, 2, 1


class _Tensor(ctypes.Structure):
    """DLTensor of DLPack 0.x, which torch takes in every release."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", c_void_p), ("deleter", c_void_p)]


_kept: list[object] = []  # torch reads them for as long as a storage lives; a run makes a few hundred

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = (c_void_p, ctypes.c_char_p, c_void_p)
_new_capsule.restype = ctypes.py_object


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor over `address`. The caller keeps what is behind it alive."""
    nbytes = math.prod(shape) * dtype.itemsize
    length, step = c_int64(nbytes), c_int64(1)
    managed = _Managed(
        _Tensor(
            data=address,
            device_type=_CUDA if device.type == "cuda" else _CPU,
            device_id=device.index or 0,
            ndim=1,
            code=_UINT,
            bits=8,
            lanes=1,
            shape=ctypes.pointer(length),
            strides=ctypes.pointer(step),
        )
    )
    _kept.append((managed, length, step))
    capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    flat: torch.Tensor = torch.from_dlpack(capsule)
    return flat.view(dtype).view(*shape)

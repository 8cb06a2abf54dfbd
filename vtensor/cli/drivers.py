"""The drivers that work on this machine, and the attention libraries that are installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch

import vtensor


@dataclass(frozen=True)
class Driver:
    """A driver on one device. Sizes are bytes; None if the driver was not found."""

    device: str
    found: bool
    detail: str
    """Its description, or why it is missing and what to do."""
    granularity: int | None = None
    """The smallest page size. Page sizes are multiples of it; on the host, powers of two."""
    page_size: int | None = None
    """A pool's default page size."""
    budget: int | None = None
    """A pool's default budget."""
    sharing: str | None = None
    """How a shareable pool's pages go to other processes: see :class:`vtensor.PoolStats`."""


def drivers() -> list[Driver]:
    """The host's driver, and one for each GPU. Without a GPU, one whose ``detail`` says why."""
    found = [_driver(device) for device in ("cpu", *map("cuda:{}".format, range(torch.cuda.device_count())))]
    missing = [] if torch.cuda.is_available() else [Driver("cuda", False, _why_no_cuda())]
    return found + missing


def _driver(device: str) -> Driver:
    try:
        with _pool(device) as pool:
            detail = "memfd and mmap" if device == "cpu" else torch.cuda.get_device_name(pool.device)
            smallest, sharing = pool._open_core("info").granularity, pool.stats().sharing
            return Driver(device, True, detail, smallest, pool.page_size, pool.budget, sharing)
    except vtensor.VTensorError as error:
        return Driver(device, False, str(error))


def _pool(device: str) -> vtensor.Pool:
    try:
        return vtensor.Pool(device, prefetch=0, shareable=True)
    except vtensor.InvalidArgument:  # other processes cannot read what is there
        return vtensor.Pool(device, prefetch=0)


def _why_no_cuda() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no libcuda.so.1: if there is a GPU, install NVIDIA's driver"
    if torch.version.cuda is None:
        return "libcuda.so.1 is there, this torch is built without CUDA: install a CUDA build of torch"
    return "libcuda.so.1 is there, torch finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Library:
    """A library with attention kernels, or with models that use them."""

    name: str
    version: str | None
    """None if it is not installed."""
    install: str


_LIBRARIES = (
    # name, module, distribution, how to install
    ("torch SDPA and FlexAttention", "torch.nn.attention", "torch", "pip install torch"),
    ("torch varlen_attn", "torch.nn.attention.varlen", "torch", "pip install -U torch"),
    ("FlashAttention 2", "flash_attn", "flash-attn", "pip install flash-attn --no-build-isolation"),
    ("FlashAttention 3", "flash_attn_interface", "flash-attn-3", "see docs/integrations/flash-attention.md"),
    ("FlashAttention 4", "flash_attn.cute", "flash-attn-4", "pip install flash-attn-4"),
    ("transformers", "transformers", "transformers", "pip install 'transformers>=5.17'"),
)


def libraries() -> list[Library]:
    """The attention libraries and whether each is installed. Imports none of them."""
    return [
        Library(name, _version(module, package), install) for name, module, package, install in _LIBRARIES
    ]


def _version(module: str, package: str) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:  # the parent package is not installed
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"

"""Pools for tests: of the host with holes that fault, and of CUDA without a GPU, over a simulated libcuda."""

from __future__ import annotations

import os
from typing import Any

import torch

from vtensor import _core
from vtensor._base.arguments import integer, type_text
from vtensor._base.units import Bytes
from vtensor.errors import InvalidArgument, VTensorError
from vtensor.pool import Pool, ZeroPolicy, checked_page_size, pool_options


def simulated_cuda_pool(
    library: str | os.PathLike[str] | None = None,
    page_size: int | None = None,
    budget: int | None = None,
    zero: ZeroPolicy = "new_owner",
    device: int = 0,
    shareable: bool = False,
    rdma: bool = False,
    **options: Any,
) -> Pool:
    """Makes a pool whose CUDA driver calls a simulated libcuda over host memory.

    This is a test double. Its tensors are CPU tensors.

    Args:
        library: path of the simulated libcuda. Defaults to ``$VTENSOR_SIMCUDA``.
        page_size, budget, zero, device, shareable, rdma: as for :class:`~vtensor.Pool`.
        options: as for :func:`vtensor.testing.host_pool`.

    Raises:
        VTensorError: if no library was named.
        InvalidArgument, DriverError: as for :class:`~vtensor.Pool`.
    """
    library = library or os.environ.get("VTENSOR_SIMCUDA")
    if not library:
        raise VTensorError(
            "[simulated_cuda_pool] no library= and no $VTENSOR_SIMCUDA: the package has no simulated "
            "libcuda; run scripts/build.sh in a checkout of vtensor and name its build/tests/libsimcuda.so"
        )
    if not isinstance(library, (str, os.PathLike)):
        raise InvalidArgument(f"[simulated_cuda_pool] library is {type_text(type(library))}: give a path")
    device = integer("simulated_cuda_pool", "device", device, 0, 2**31 - 1)
    core = _core.cuda_pool(
        device,
        page_size=checked_page_size(page_size),
        library=os.fspath(library),
        memory_is_host_memory=True,
        shareable=bool(shareable),
        rdma=bool(rdma),
        options=pool_options(budget, zero, **options),
    )
    return Pool._over(core, torch.device("cuda", device))


def host_pool(
    page_size: Bytes | None = None,
    budget: Bytes | None = None,
    zero: ZeroPolicy = "new_owner",
    strict_holes: bool = True,
    shareable: bool = False,
    **options: Any,
) -> Pool:
    """Makes a host pool whose unmapped addresses also fault on reads, which reveals over-reads.

    Args:
        page_size, budget, zero, shareable: as for :class:`~vtensor.Pool`.
        strict_holes: whether a read of an unmapped address faults.
        options: as for :class:`~vtensor.Pool`, except that ``prefetch`` defaults to 0; and ``patience``, the
            seconds after which the pool's waits time out.

    Raises:
        InvalidArgument, DriverError: as for :class:`~vtensor.Pool`.
    """
    core = _core.host_pool(
        page_size=checked_page_size(page_size),
        strict_holes=bool(strict_holes),
        shareable=bool(shareable),
        options=pool_options(budget, zero, **options),
    )
    return Pool._over(core, torch.device("cpu"))

"""Pools for tests, with holes that fault."""

from __future__ import annotations

from typing import Any

import torch

from vtensor import _core
from vtensor._base.units import Bytes
from vtensor.pool import Pool, ZeroPolicy, checked_page_size, pool_options


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

"""The memory managers that a replay compares, each with the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from vtensor._simulated import simulated_cuda_pool
from vtensor.errors import InvalidArgument
from vtensor.kv import KVCache
from vtensor.pool import Pool
from vtensor.replay.baselines import StaticCache
from vtensor.replay.paged import PagedCache
from vtensor.replay.radix import RadixCache
from vtensor.replay.shapes import ModelShape
from vtensor.replay.simulate import ReplayCache

__all__ = ["POLICIES", "Driver", "Server", "default_layer_group", "open_cache", "scale"]

Driver = Literal["host", "simulated"]

_HOST_PAGE = 4096
_LEAST_TOKENS = 16


@dataclass(frozen=True)
class Server:
    """What is served with which memory.

    Args:
        shape: the model's.
        memory: bytes for K and V.
        max_batch: requests at a time, at most.
        max_len: tokens of a request, at most.
        page_size: bytes of the driver's page; ours alone.
        layer_group: layers in a page; ours alone.
        lookahead: tokens that the mapper keeps ready; ours alone.
        driver: ``"host"`` maps pages with mmap, ``"simulated"`` with the simulated libcuda; ours alone.
    """

    shape: ModelShape
    memory: int
    max_batch: int
    max_len: int
    page_size: int
    layer_group: int
    lookahead: int = 0
    driver: Driver = "host"

    @property
    def tokens(self) -> int:
        """Whose K and V the memory holds at most."""
        return self.memory // self.shape.token_bytes


def default_layer_group(shape: ModelShape, page_size: int) -> int:
    """The most layers that can share a page so that it holds a whole number of tokens; where no number does,
    the most with which it holds 16."""
    divisors = [n for n in range(shape.layers, 0, -1) if shape.layers % n == 0]
    whole = [n for n in divisors if page_size % (n * shape.layer_bytes) == 0]
    enough = [n for n in divisors if n * shape.layer_bytes * _LEAST_TOKENS <= page_size]
    return [*whole, *enough, 1][0]


def scale(shape: ModelShape, page_size: int) -> int:
    """By how much a token's bytes and a page's are divided here: as far as pages of 4 KiB and whole elements
    allow. Counts of pages are then those of the real sizes."""
    factor = 1
    while page_size % (factor * 2 * _HOST_PAGE) == 0 and shape.kv_heads * shape.head_dim % (factor * 2) == 0:
        factor *= 2
    return factor


@contextmanager
def _vtensor(server: Server) -> Iterator[ReplayCache]:
    shape, factor = server.shape, scale(server.shape, server.page_size)
    page_size, budget = server.page_size // factor, server.memory // factor
    if server.driver == "host":
        pool = Pool("cpu", page_size=page_size, budget=budget)
    else:
        pool = simulated_cuda_pool(page_size=page_size, budget=budget)
    try:
        with KVCache(
            shape.layers,
            1,
            shape.kv_heads * shape.head_dim // factor,
            server.max_batch,
            server.max_len,
            torch.bfloat16,
            pool.device,
            layer_group=server.layer_group,
            lookahead=server.lookahead,
            tile=1,
            pool=pool,
        ) as cache:
            yield cache
    finally:
        pool.close()


@contextmanager
def _paged(server: Server) -> Iterator[ReplayCache]:
    yield PagedCache(server.tokens // 16, server.max_batch, server.max_len, frame_tokens=16)


@contextmanager
def _static(server: Server) -> Iterator[ReplayCache]:
    yield StaticCache(server.tokens, server.max_batch, server.max_len)


@contextmanager
def _ideal(server: Server) -> Iterator[ReplayCache]:
    yield RadixCache(server.tokens, server.max_batch, server.max_len)


POLICIES = {"vtensor": _vtensor, "paged": _paged, "static": _static, "ideal": _ideal}
"""``vtensor``: :class:`vtensor.KVCache`. ``paged``: tables of 16-token frames with prefix reuse. ``static``:
a slot of the largest length for each request. ``ideal``: no waste, and a radix cache over 16 tokens."""


def open_cache(policy: str, server: Server) -> AbstractContextManager[ReplayCache]:
    """A manager for the time of a ``with``. Raises InvalidArgument for an unknown policy, and for memory that
    does not hold the least that it needs."""
    if policy not in POLICIES:
        raise InvalidArgument(f"[replay] policy {policy!r}: pass one of {', '.join(POLICIES)}")
    return POLICIES[policy](server)

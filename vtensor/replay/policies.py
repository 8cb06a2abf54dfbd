"""The memory managers that a replay compares, each with the same amount of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from vtensor._base.units import byte_text
from vtensor._test_pools import simulated_cuda_pool
from vtensor.errors import InvalidArgument
from vtensor.kv import KVCache
from vtensor.pool import Pool
from vtensor.replay.managers import PagedCache, RadixCache, ReplayCache, StaticCache
from vtensor.replay.shapes import ModelShape

Driver = Literal["host", "simulated"]

_HOST_PAGE = 4096
_LEAST_TOKENS = 16


@dataclass(frozen=True)
class Server:
    """A model and the memory to serve it with. The last four apply to vtensor only.

    Args:
        shape: the shape of the model's K and V.
        memory: bytes for K and V.
        max_batch: the most requests at a time.
        max_len: the most tokens of a request.
        page_size: bytes of the driver's page.
        layer_group: layers in a page.
        lookahead: tokens that the mapper keeps ready.
        driver: ``"host"`` maps pages with mmap, ``"simulated"`` with the simulated libcuda.
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
        """The number of tokens whose K and V fit into the memory."""
        return self.memory // self.shape.token_bytes


def default_layer_group(shape: ModelShape, page_size: int) -> int:
    """The most layers that can share a page of a whole number of tokens.

    If there is no such number, the most with which a page has at least 16 tokens.
    """
    divisors = [n for n in range(shape.layers, 0, -1) if shape.layers % n == 0]
    whole = [n for n in divisors if page_size % (n * shape.layer_bytes) == 0]
    enough = [n for n in divisors if n * shape.layer_bytes * _LEAST_TOKENS <= page_size]
    return [*whole, *enough, 1][0]


def scale(shape: ModelShape, page_size: int) -> int:
    """The factor by which a replay divides the bytes of a token and of a page.

    It is as large as pages of 4 KiB and whole elements allow. Counts of pages stay those of the real sizes.
    """
    factor = 1
    while page_size % (factor * 2 * _HOST_PAGE) == 0 and shape.kv_heads * shape.head_dim % (factor * 2) == 0:
        factor *= 2
    return factor


@contextmanager
def _vtensor(server: Server) -> Iterator[ReplayCache]:
    shape, factor = server.shape, scale(server.shape, server.page_size)
    page_size, budget = server.page_size // factor, server.memory // factor
    if budget < page_size:  # before a pool says it of the scaled sizes
        raise InvalidArgument(
            f"[replay] {byte_text(server.memory)} of memory hold no page of {byte_text(server.page_size)}: "
            "give it more, or smaller pages"
        )
    if server.driver == "host":
        pool = Pool("cpu", page_size=page_size, budget=budget)
    else:
        pool = simulated_cuda_pool(page_size=page_size, budget=budget)
    with (
        pool,
        KVCache(
            shape.layers,
            1,
            shape.kv_heads * shape.head_dim // factor,
            server.max_batch,
            server.max_len,
            torch.bfloat16,
            layer_group=server.layer_group,
            lookahead=server.lookahead,
            tile=1,
            pool=pool,
        ) as cache,
    ):
        yield cache


@dataclass(frozen=True)
class Policy:
    """A memory manager, and how requests are scheduled in it: first come, first served, with prompts in
    pieces beside the decoding requests.

    Args:
        open: opens the manager.
        whole_prompts: whether the token budget has room for the longest prompt beside a token of every slot.
        keeps_promises: whether requests with long answers may leave for prompts that find no room.
        opt_in: whether a replay leaves it out unless it is named.
    """

    open: Callable[[Server], AbstractContextManager[ReplayCache]]
    whole_prompts: bool = False
    keeps_promises: bool = False
    opt_in: bool = False


POLICIES = {
    "vtensor": Policy(_vtensor),
    "paged": Policy(lambda s: nullcontext(PagedCache(s.tokens // 16, s.max_batch, s.max_len))),
    "static": Policy(lambda s: nullcontext(StaticCache(s.tokens, s.max_batch, s.max_len))),
    "ideal": Policy(lambda s: nullcontext(RadixCache(s.tokens, s.max_batch, s.max_len))),
    "whole": Policy(_vtensor, whole_prompts=True, opt_in=True),
    "layerkv": Policy(_vtensor, keeps_promises=True, opt_in=True),
}
"""``vtensor``: :class:`vtensor.KVCache`. ``paged``: tables of 16-token frames with prefix reuse. ``static``:
a slot of the largest length for each request. ``ideal``: no waste, and a radix cache of 16-token units.
``whole``: as ``vtensor``, with each prompt computed in one iteration; only a prompt that begins in one
iteration with others may be cut. ``layerkv``: as ``vtensor``, but long answers may
wait in host memory while prompts have their room, by promises."""


def open_cache(policy: str, server: Server) -> AbstractContextManager[ReplayCache]:
    """A context manager that opens the memory manager of ``policy``.

    Raises:
        InvalidArgument: if the policy is unknown, or the memory is too small for it.
    """
    if policy not in POLICIES:
        raise InvalidArgument(f"[replay] policy {policy!r}: pass one of {', '.join(POLICIES)}")
    return POLICIES[policy].open(server)

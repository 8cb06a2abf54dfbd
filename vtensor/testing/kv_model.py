"""A model of the requests in a KV cache, in which each token's K and V identify the token.

A token has a value. Tokens of a prompt have a value that depends on the prompt up to them, so requests with a
common prefix have equal values there. Other tokens have a value of their own. `marks` turns a value into a
number for each layer's K and V, which fills all heads. So a check recognises tokens of another request,
position or layer, and K in place of V (I2, I6, I7).

The numbers are exact in float32 for values below 2**20 and at most `MOST_LAYERS` layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

import vtensor

MOST_LAYERS = 8
_OWN = 1 << 19  # values of prompts are below this


def value_of(salt: str, tokens: Sequence[int]) -> int:
    """The value of the last of these tokens. Equal for all prompts that begin with them."""
    return zlib.crc32(repr((salt, list(tokens))).encode()) % _OWN


def own_values() -> Iterator[int]:
    """Values that no prompt has. They repeat after half a million."""
    number = 0
    while True:
        yield _OWN + number % _OWN
        number += 1


@dataclass(eq=False)
class Request:
    """A request in a slot, and the values of its tokens."""

    salt: str = ""
    prompt: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    """One value for each of its tokens."""
    known: int = 0
    """The number of leading tokens that have the values of the prompt."""
    swapped: bool = False

    def extended(self, n: int, own: Iterator[int]) -> list[int]:
        """Values of the next ``n`` tokens: those of the prompt, then values from ``own``."""
        begin = len(self.values)
        computed = max(0, min(len(self.prompt) - begin, n)) if self.known == begin else 0
        values = [value_of(self.salt, self.prompt[: begin + i + 1]) for i in range(computed)]
        return values + [next(own) for _ in range(n - computed)]

    def append(self, values: list[int]) -> None:
        """Adds tokens with values from :meth:`extended`."""
        if self.known == len(self.values):
            self.known = min(len(self.prompt), len(self.values) + len(values))
        self.values = self.values + values

    def truncate(self, length: int) -> None:
        """Keeps the first ``length`` tokens."""
        self.values = self.values[:length]
        self.known = min(self.known, length)

    def copy(self) -> Request:
        """A fork of the request."""
        return Request(self.salt, self.prompt, list(self.values), self.known)


def marks(values: Sequence[int], layer: int, of_v: bool) -> torch.Tensor:
    """The numbers in a layer's K or V for tokens of these values: float32, ``[len(values)]``."""
    return _marks(tuple(values), layer, of_v).clone()


@lru_cache(1024)  # what was written is checked, in many tests many times
def _marks(values: tuple[int, ...], layer: int, of_v: bool) -> torch.Tensor:
    here = torch.tensor(values, dtype=torch.float64, device="cpu") * (2 * MOST_LAYERS) + 2 * layer + of_v
    return here.to(torch.float32)


def _shown(
    cache: vtensor.KVCache, layer: int, values: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A layer's K and V, as far as the cache has them, each with what it has for tokens of these values:
    expanded to ``[len(values), heads, head_dim]``."""
    for of_v, tensor in enumerate(cache[layer]):
        if tensor is not None:
            heads, dim = rows_of(cache, tensor, 0).shape[1:]
            here = _marks(values, layer, bool(of_v)).to(tensor.device)
            yield tensor, here[:, None, None].expand(-1, heads, dim)


def rows_of(cache: vtensor.KVCache, tensor: torch.Tensor, slot: int) -> torch.Tensor:
    """One slot of a layer's K or V as ``[max_len, heads, head_dim]``, in either layout."""
    return tensor[slot].transpose(0, 1) if cache._layout.per_head else tensor[slot]


def expected(
    cache: vtensor.KVCache, layer: int, values: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V of a layer for tokens of these values: plain tensors ``[len(values), heads, head_dim]``.

    V is None in a cache without V.
    """

    shown = [
        wanted.clone(memory_format=torch.contiguous_format)
        for _, wanted in _shown(cache, layer, tuple(values))
    ]
    return shown[0], shown[1] if len(shown) > 1 else None


def write(
    cache: vtensor.KVCache,
    slot: int,
    start: int,
    values: Sequence[int],
    layers: Iterable[int] | None = None,
) -> None:
    """Writes K and V of tokens from position ``start`` on, in every layer or in these."""
    for layer in range(len(cache)) if layers is None else layers:
        for tensor, wanted in _shown(cache, layer, tuple(values)):
            rows_of(cache, tensor, slot)[start : start + len(values)].copy_(wanted)


def check_contents(
    cache: vtensor.KVCache,
    slot: int,
    values: Sequence[int],
    windows: Sequence[int | None] | None = None,
    layers: Iterable[int] | None = None,
) -> None:
    """Checks that each token has its marks in every layer, or in these.

    Args:
        cache: the cache.
        slot: the slot to check.
        values: the values of all tokens of the slot.
        windows: as for :class:`~vtensor.KVCache`. In a layer with a window, only the tokens that the next
            token attends to are checked.
        layers: all of them unless given.

    Raises:
        AssertionError: if a token differs. The message names the slot, the layer and the first such tokens.
    """
    for layer in range(len(cache)) if layers is None else layers:
        window = windows[layer] if windows else None
        first = 0 if window is None else max(0, len(values) + 1 - window)
        for name, (tensor, wanted) in zip("KV", _shown(cache, layer, tuple(values[first:])), strict=False):
            seen = rows_of(cache, tensor, slot)[first : len(values)]
            if not torch.equal(seen, wanted):
                wrong = torch.ne(seen, wanted).flatten(1).any(1).nonzero().flatten() + first
                raise AssertionError(
                    f"{name} of layer {layer} in slot {slot} is not what was written: {len(wrong)} of "
                    f"{len(values)} tokens, the first {wrong[:4].tolist()}"
                )

"""What callers write to a cache, K and V and token ids: checks it, and finds its places."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch

from vtensor._base.arguments import MOST, has_memory, items, type_text
from vtensor._base.torch_modes import without_modes
from vtensor.errors import InvalidArgument


class Runs(NamedTuple):
    """Runs of tokens: of each its slot, its first token and the number of its tokens."""

    slots: list[int]
    starts: list[int]
    counts: list[int]

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot and the position of each token, ``[tokens]`` both."""
        slots: list[int] = []
        positions: list[int] = []
        for slot, start, count in zip(*self, strict=True):
            slots += [slot] * count
            positions += range(start, start + count)
        with without_modes():
            return (
                torch.tensor(slots, dtype=torch.long, device=device),
                torch.tensor(positions, dtype=torch.long, device=device),
            )


def runs_of(slots: Any, starts: Any, counts: Any, tokens: int) -> Runs:
    """The runs of one slot or of several. Without ``counts`` all slots get the same number of tokens."""
    of_slots, of_starts = _numbers("slots", slots), _numbers("starts", starts)
    if len(of_starts) != len(of_slots):
        raise InvalidArgument(
            f"[KVCache.write] {len(of_slots)} slots and {len(of_starts)} starts: give one for each slot"
        )
    if counts is not None:
        of_counts = _numbers("counts", counts)
    elif of_slots and tokens % len(of_slots) == 0:
        of_counts = [tokens // len(of_slots)] * len(of_slots)
    else:
        raise InvalidArgument(
            f"[KVCache.write] {tokens} tokens for {len(of_slots)} slots: give counts=, the tokens of each"
        )
    if len(of_counts) != len(of_slots) or sum(of_counts) != tokens:
        raise InvalidArgument(
            f"[KVCache.write] counts has {len(of_counts)} entries, {sum(of_counts)} in all, for "
            f"{len(of_slots)} slots and {tokens} tokens: give how many of them each slot gets"
        )
    return Runs(of_slots, of_starts, of_counts)


def check_batch(name: str, states: torch.Tensor, runs: Runs) -> None:
    """Refuses states ``[n, tokens, heads, head_dim]`` unless they are ``tokens`` of each of the runs."""
    if states.dim() == 4 and runs.counts != [states.shape[1]] * states.shape[0]:
        raise InvalidArgument(
            f"[KVCache.write] {name} is {list(states.shape)}, {states.shape[1]} tokens of {states.shape[0]} "
            f"slots, for {len(runs.slots)} slots that get {runs.counts}: give [slots, tokens, heads, "
            "head_dim], or [tokens, heads, head_dim]"
        )


def one_or_several(operation: str, name: str, given: Any, wanted: str) -> list[Any]:
    """The items of `given`, or `given` as the only one."""
    several = isinstance(given, Iterable) and getattr(given, "ndim", 1) != 0
    return items(operation, name, given, wanted) if several else [given]


def _numbers(name: str, given: Any) -> list[int]:
    many = one_or_several("KVCache.write", name, given, "an integer, or one for each slot")
    try:
        numbers = [index(one) for one in many]
    except TypeError:
        raise InvalidArgument(
            f"[KVCache.write] {name} is {given!r}: give an integer, or one for each slot"
        ) from None
    if any(not 0 <= number < MOST for number in numbers):
        raise InvalidArgument(f"[KVCache.write] {name} is {given!r}: none may be negative, or pass 2**62")
    return numbers


def checked_states(name: str, states: Any, whole: torch.Tensor, heads_dim: int, layer: int) -> torch.Tensor:
    """K or V as it is stored, ``[tokens, heads, head_dim]``; ``whole`` is the layer's tensor, with its heads
    in dimension ``heads_dim``."""
    heads, dim = whole.shape[heads_dim], whole.shape[3]
    if not isinstance(states, torch.Tensor):
        raise InvalidArgument(f"[KVCache.write] {name} is {type_text(type(states))}: give a tensor")
    if (
        states.dim() not in (3, 4)
        or tuple(states.shape[-2:]) != (heads, dim)
        or states.dtype != whole.dtype
        or states.device != whole.device
    ):
        raise InvalidArgument(
            f"[KVCache.write] {name} is {list(states.shape)}, {states.dtype} on {states.device}: layer "
            f"{layer} takes [tokens, {heads}, {dim}] or [slots, tokens, {heads}, {dim}], {whole.dtype} on "
            f"{whole.device}"
        )
    if not has_memory(states):
        raise InvalidArgument(
            f"[KVCache.write] {name} is {type_text(type(states))} without memory: give one with contents"
        )
    if states.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"[KVCache.write] {name} requires grad, and a cache keeps no graph: detach() it, or work under "
            "torch.no_grad()"
        )
    return states.flatten(0, 1) if states.dim() == 4 else states


def store(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    heads_dim: int,
    runs: Runs,
    places: tuple[torch.Tensor, torch.Tensor] | None,
    own: range,
) -> None:
    """Copies checked states, K and V, to their places in the tensors that they come with; ``places`` has
    these, unless there is one run. ``own``: addresses of the cache."""
    # Of FakeTensorMode, which copies nothing, and of torch.func, which writes only to tensors of its own.
    with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
        # Tokens of the cache itself are copied first: otherwise some are written to before they are read.
        read = [t.clone() if t.data_ptr() in own else t for t, _ in pairs]
        for states, (_, whole) in zip(read, pairs, strict=True):
            if places is not None:
                slots, positions = places
                if whole.element_size() == 1:  # torch writes bytes to several places, not every type of one
                    states, whole = states.view(torch.uint8), whole.view(torch.uint8)
                whole[(slots, slice(None), positions) if heads_dim == 1 else (slots, positions)] = states
            else:
                room = whole[runs.slots[0]].narrow(2 - heads_dim, runs.starts[0], runs.counts[0])
                room.copy_(states.transpose(0, 1) if heads_dim == 1 else states)


def token_ids(operation: str, tokens: Sequence[int] | torch.Tensor) -> bytes:
    """Token ids as the bytes of 64-bit integers."""
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise InvalidArgument(
                f"[{operation}] tokens is a {tokens.dtype} tensor of shape {tuple(tokens.shape)}: give the "
                "ids of one request, [n]"
            )
    if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(tokens, Iterable):
        raise InvalidArgument(f"[{operation}] tokens is {type_text(type(tokens))}: give the ids, [n]")
    try:
        return array("q", items(operation, "tokens", tokens, "the ids, [n]")).tobytes()
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(
            f"[{operation}] a token is no integer of 64 bits ({error}): give the ids, [n]"
        ) from None

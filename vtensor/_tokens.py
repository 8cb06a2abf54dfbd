"""Token ids and salts in the form that the prefix index compares."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from vtensor._arguments import items
from vtensor.errors import InvalidArgument

__all__ = ["checked_salt", "token_ids"]


def token_ids(operation: str, tokens: Sequence[int] | torch.Tensor) -> bytes:
    """Token ids as the bytes of 64-bit integers.

    Raises:
        InvalidArgument: if an id is not an integer of 64 bits, or a tensor is not of shape ``[n]``.
    """
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise InvalidArgument(
                f"[{operation}] tokens is a {tokens.dtype} tensor of shape {tuple(tokens.shape)}: give the "
                "ids of one request, [n]"
            )
    if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(tokens, Iterable):
        raise InvalidArgument(f"[{operation}] tokens is a {type(tokens).__name__}: give the ids, [n]")
    try:
        return array("q", items(operation, "tokens", tokens, "the ids, [n]")).tobytes()
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(
            f"[{operation}] a token is no integer of 64 bits ({error}): give the ids, [n]"
        ) from None


def checked_salt(operation: str, salt: str) -> str:
    if isinstance(salt, str):
        return salt
    raise InvalidArgument(f"[{operation}] salt is a {type(salt).__name__}: give a string")

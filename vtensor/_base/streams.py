"""CUDA streams in the forms in which users give them."""

from __future__ import annotations

from operator import index
from typing import Any

from vtensor.errors import InvalidArgument

Stream = Any
"""A ``torch.cuda.Stream``, a ``cuda.core`` stream (any object with ``__cuda_stream__``), or the integer value
of a ``cudaStream_t``."""

_PER_THREAD = 2  # cudaStreamPerThread


def stream_handle(operation: str, stream: Stream | None) -> int | None:
    """The integer value of a stream. None means torch's current stream and stays None."""
    if stream is None:
        return None
    value = _value_of(stream)
    if value is None or not 0 <= value < 2**64:
        raise InvalidArgument(
            f"[{operation}] stream is {stream!r}: give a torch.cuda.Stream, a cuda.core stream, or the "
            "integer value of a cudaStream_t"
        )
    if value == _PER_THREAD:
        raise InvalidArgument(
            f"[{operation}] stream is the per-thread default stream, which is another one in the thread that "
            "waits for it: launch in a stream of your own and give that"
        )
    return value


def _value_of(stream: Stream) -> int | None:
    try:
        if hasattr(stream, "cuda_stream"):  # torch
            return int(stream.cuda_stream)
        if hasattr(stream, "__cuda_stream__"):  # the protocol of cuda.core: (version, handle)
            return int(stream.__cuda_stream__()[1])
        if hasattr(stream, "handle"):
            return int(stream.handle)
        return None if isinstance(stream, bool) else index(stream)
    except (TypeError, ValueError):
        return None

"""The allocators that a replay compares, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from vtensor.allocations.device import PAGE, Allocator
from vtensor.allocations.expandable import ExpandableAllocator
from vtensor.allocations.native import NativeAllocator
from vtensor.allocations.replay import Opened
from vtensor.allocations.stitched import StitchedAllocator

__all__ = ["MODELS"]


def _model(make: Callable[[int], Allocator]) -> Opened:
    return lambda capacity: nullcontext(make(capacity))


MODELS: dict[str, Opened] = {
    "native": _model(NativeAllocator),
    "expandable-20MiB": _model(ExpandableAllocator),
    "expandable-2MiB": _model(partial(ExpandableAllocator, page=PAGE)),
    "stitched-whole": _model(partial(StitchedAllocator, most_loss=1.0)),
    "stitched": _model(StitchedAllocator),
}
"""torch's allocators; one that stitches every allocation of a page and more; and vtensor's."""

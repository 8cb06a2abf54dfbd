"""The allocators that a replay compares, by name."""

from __future__ import annotations

from contextlib import nullcontext

from vtensor.allocations.device import PAGE
from vtensor.allocations.expandable import ExpandableAllocator
from vtensor.allocations.native import NativeAllocator
from vtensor.allocations.replay import Opened
from vtensor.allocations.stitched import StitchedAllocator

MODELS: dict[str, Opened] = {
    "native": lambda capacity: nullcontext(NativeAllocator(capacity)),
    "expandable-20MiB": lambda capacity: nullcontext(ExpandableAllocator(capacity)),
    "expandable-2MiB": lambda capacity: nullcontext(ExpandableAllocator(capacity, page=PAGE)),
    "stitched-whole": lambda capacity: nullcontext(StitchedAllocator(capacity, most_loss=1.0)),
    "stitched": lambda capacity: nullcontext(StitchedAllocator(capacity)),
}
"""torch's allocators; one that stitches every allocation of a page and more; and vtensor's."""

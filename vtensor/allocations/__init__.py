"""Replays of recorded allocations with models of allocators: ``python -m vtensor replay-allocations``."""

from __future__ import annotations

from vtensor.allocations.device import Allocator
from vtensor.allocations.events import AllocationTrace, Event
from vtensor.allocations.expandable import ExpandableAllocator
from vtensor.allocations.formats import read_allocations
from vtensor.allocations.models import MODELS
from vtensor.allocations.native import NativeAllocator
from vtensor.allocations.plain import write_plain
from vtensor.allocations.real import real
from vtensor.allocations.replay import Need, Opened, Run, device_needed, replay_allocations
from vtensor.allocations.report import Comparison, picture, table, to_json
from vtensor.allocations.stitched import StitchedAllocator

__all__ = [
    "MODELS",
    "AllocationTrace",
    "Allocator",
    "Comparison",
    "Event",
    "ExpandableAllocator",
    "NativeAllocator",
    "Need",
    "Opened",
    "Run",
    "StitchedAllocator",
    "device_needed",
    "picture",
    "read_allocations",
    "real",
    "replay_allocations",
    "table",
    "to_json",
    "write_plain",
]

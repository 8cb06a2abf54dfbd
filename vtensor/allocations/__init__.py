"""Replays of recorded allocations by models of allocators: ``python -m vtensor replay-allocations``."""

from __future__ import annotations

from vtensor.allocations.events import AllocationTrace, Event
from vtensor.allocations.formats import read_allocations
from vtensor.allocations.plain import write_plain

__all__ = ["AllocationTrace", "Event", "read_allocations", "write_plain"]

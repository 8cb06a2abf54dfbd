"""Replays of recorded allocations with models of allocators: ``python -m vtensor replay-allocations``."""

from __future__ import annotations

from vtensor.allocations.formats import read_allocations
from vtensor.allocations.models import MODELS
from vtensor.allocations.replay import device_needed

__all__ = ["MODELS", "device_needed", "read_allocations"]

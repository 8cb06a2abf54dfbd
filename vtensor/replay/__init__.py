"""Replays of real traces with several memory managers to compare: ``python -m vtensor replay``."""

from __future__ import annotations

from vtensor.replay.policies import Server, default_layer_group, open_cache
from vtensor.replay.report import picture, table
from vtensor.replay.shapes import model_shape
from vtensor.replay.simulate import ServiceModel, replay
from vtensor.replay.traces import Row, read_trace

__all__ = [
    "Row",
    "Server",
    "ServiceModel",
    "default_layer_group",
    "model_shape",
    "open_cache",
    "picture",
    "read_trace",
    "replay",
    "table",
]

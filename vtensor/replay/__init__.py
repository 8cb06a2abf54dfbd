"""Replays of real traces with several memory managers to compare: ``python -m vtensor replay``."""

from __future__ import annotations

from vtensor.replay.baselines import StaticCache
from vtensor.replay.paged import PagedCache
from vtensor.replay.policies import POLICIES, Policy, Server, default_layer_group, open_cache, scale
from vtensor.replay.radix import RadixCache
from vtensor.replay.report import picture, table, to_json
from vtensor.replay.shapes import MODELS, ModelShape, model_shape, parse_bytes
from vtensor.replay.simulate import Result, Sample, ServiceModel, replay
from vtensor.replay.traces import Row, read_trace

__all__ = [
    "MODELS",
    "POLICIES",
    "ModelShape",
    "PagedCache",
    "Policy",
    "RadixCache",
    "Result",
    "Row",
    "Sample",
    "Server",
    "ServiceModel",
    "StaticCache",
    "default_layer_group",
    "model_shape",
    "open_cache",
    "parse_bytes",
    "picture",
    "read_trace",
    "replay",
    "scale",
    "table",
    "to_json",
]

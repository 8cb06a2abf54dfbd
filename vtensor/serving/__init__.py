"""Continuous batching over a :class:`vtensor.KVCache`: what each iteration computes, and what makes room.

:class:`Scheduler` plans iterations, owns the cache's slots and knows no model. :class:`Engine` runs its plans
with a model's forward; that of a Hugging Face model is in ``vtensor.integrations.transformers.serving``.
"""

from __future__ import annotations

from vtensor.serving.engine import Completion, Engine, greedy
from vtensor.serving.plans import Plan, SchedulerStats, Work
from vtensor.serving.promises import LengthHistogram, Pace, Promises
from vtensor.serving.requests import Request, SampleGroup, Status, TokenSequence
from vtensor.serving.scheduler import Scheduler
from vtensor.serving.slots import KVCacheManager, SlotStats

__all__ = [
    "Completion",
    "Engine",
    "KVCacheManager",
    "LengthHistogram",
    "Pace",
    "Plan",
    "Promises",
    "Request",
    "SampleGroup",
    "Scheduler",
    "SchedulerStats",
    "SlotStats",
    "Status",
    "TokenSequence",
    "Work",
    "greedy",
]

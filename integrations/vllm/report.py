"""The lines of the plug-in in vLLM's log: that it is on, and at most once a minute that memory is short."""

from __future__ import annotations

import logging
import os

from .memory import TableMemory
from .workers import WorkersMemory

LOG = logging.getLogger("vllm.vtensor")  # has the handlers and the level of vLLM's own
INTERVAL = 60.0  # seconds between two lines on shortages


def say_on(memory: TableMemory | WorkersMemory) -> None:
    """Logs the memory of an engine, at its start."""
    name = os.environ.get("VTENSOR_VLLM_SHARED")
    LOG.info(
        "[vtensor.vllm] on: a budget of %s bytes a worker%s, in pages of %s bytes, for %s of %s blocks",
        f"{memory.share:,}",
        f", shared as {name!r}" if name else "",
        f"{memory.page_size:,}",
        f"{min(memory.most, memory.count):,}",
        f"{memory.count:,}",
    )


class Shortages:
    """What shortages of memory have cost an engine so far."""

    def __init__(self) -> None:
        self.preempted = 0  # requests
        self.evicted = 0  # blocks of the prefix cache
        self.waits = 0  # steps without work, while others have the memory
        self._said = (0, 0, 0)
        self._next = 0.0

    def say(self, now: float) -> None:
        """Logs the counts if they have changed: at once the first time, then each ``INTERVAL``. ``now`` is in
        seconds."""
        counts = (self.preempted, self.evicted, self.waits)
        if counts == self._said or now < self._next:
            return
        self._said, self._next = counts, now + INTERVAL
        LOG.info(
            "[vtensor.vllm] memory is short: so far %d requests preempted, %d cached blocks evicted, "
            "%d steps without memory for any request; VTENSOR_VLLM_BUDGET sets the budget",
            *counts,
        )

"""Measures one cache, token by token: time, bytes copied for growth, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import Cache
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Sample:
    """The memory of K and V after a step, in bytes."""

    tokens: int  # in the cache
    mapped: int  # memory of K and V
    peak: int  # the same during a copy, with the old and the new K or V


@dataclass
class Meter(BaseStreamer):
    """Measures one cache while generate() runs. As the streamer it is called at every token. It stops the
    clock while it measures."""

    cache: Cache
    mapped: Callable[[], int]
    on_token: Callable[[], object] = lambda: None
    copied: int = 0
    samples: list[Sample] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step that decodes one token
    _extents: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)  # address, bytes
    _clock: float | None = None

    def look(self) -> None:
        """Records the memory at the end of a step."""
        largest = 0
        for index, layer in enumerate(self.cache.layers):
            for name in ("keys", "values"):
                states: torch.Tensor = getattr(layer, name)
                address, old = self._extents.get((index, name), (states.data_ptr(), 0))
                if states.data_ptr() != address:  # this step copied what was stored before
                    self.copied += old
                    largest = max(largest, old)
                self._extents[index, name] = states.data_ptr(), states.nbytes
        tokens, mapped = int(self.cache.get_seq_length()), self.mapped()
        if not self.samples or self.samples[-1].tokens != tokens:
            self.samples.append(Sample(tokens, mapped, mapped + largest))

    def put(self, value: torch.Tensor) -> None:
        """Called by generate() with the prompt, then with each token."""
        now = time.perf_counter()
        if value.dim() > 1:
            return
        if self._clock is not None:  # the first token of a call includes generate()'s setup
            self.seconds.append(now - self._clock)
        self.look()
        self.on_token()
        self._clock = time.perf_counter()

    def end(self) -> None:
        """Called when generate() returns."""
        self._clock = None

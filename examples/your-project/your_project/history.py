"""The last states of a stream, as one contiguous tensor."""

from __future__ import annotations

import torch

import vtensor


class History:
    """Keeps the newest ``window`` states of ``width`` numbers, without copying those that stay."""

    def __init__(self, width: int, window: int, pool: vtensor.Pool | None = None) -> None:
        self.window = window
        self.states = vtensor.empty(
            0, width, grow_dim=0, capacity=4 * window, when_full="move", pool=pool, dtype=torch.float32
        )

    def add(self, states: torch.Tensor) -> None:
        """Adds states ``[new, width]``, and forgets what is older than the window. Whole or not at all."""
        self.states.append(states)
        if self.states.length > self.window:
            self.states.shrink(self.states.length - self.window, front=True)

    def mean(self) -> torch.Tensor:
        """The mean of the states, ``[width]``."""
        return self.states.mean(dim=0)

    def close(self) -> None:
        self.states.close()

"""State machines as tests: how many examples, and the driver that each needs."""

from __future__ import annotations

import pytest
from hypothesis import settings

from cuda_support import needs_simcuda
from support import draws


def case(machine, examples: int | None = None, steps: int | None = None, *marks, seconds: int = 120):
    """The test of a machine that has a ``kind``; the examples are those of `make check`."""
    usual, found = settings.default, machine.TestCase
    found.settings = settings(
        max_examples=draws(examples or usual.max_examples),
        stateful_step_count=steps or usual.stateful_step_count,
    )
    found.pytestmark = [pytest.mark.seconds(seconds), pytest.mark.thorough, *marks]
    return needs_simcuda(found) if machine.kind == "simcuda" else found

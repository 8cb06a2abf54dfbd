"""Costs that do not grow with what else there is: the death of a view beside thousands of others, the steps
of the mapper beside thousands of cached tensors. Figures are ratios within one run, the best of several: four
times as many take four times as long, and sixteen times where each looks at all others."""

from __future__ import annotations

import random
import time

import pytest
import torch

import vtensor

pytestmark = pytest.mark.alone

PAGE = 4096
FEW, MOST = 4000, 8.0


def grows_with_its_number(seconds_of) -> bool:
    """Whether four times as many take far more than four times as long, however often one looks."""
    for _ in range(5):
        few, many = seconds_of(FEW), seconds_of(4 * FEW)
        if many < MOST * few:
            return False
    return True


@pytest.mark.parametrize("order", ["oldest first", "newest first", "mixed"])
@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_the_death_of_views_of_as_many_generations(order, ahead):
    def seconds_of(n):
        with vtensor.Pool("cpu", page_size=PAGE, budget=PAGE * (n + 64), prefetch=ahead) as pool:
            t = vtensor.empty(0, grow_dim=0, capacity=PAGE * n, dtype=torch.uint8, pool=pool)
            views = [t.extend(PAGE).alias() for _ in range(n)]
            t.truncate(PAGE)
            pool.wait_idle(timeout=60)
            if order == "oldest first":
                views.reverse()
            elif order == "mixed":
                random.Random(1).shuffle(views)
            began = time.thread_time()
            while views:
                views.pop()
            return time.thread_time() - began

    assert not grows_with_its_number(seconds_of)


def test_a_truncate_beside_views_of_as_many_generations():
    def seconds_of(n):
        with vtensor.Pool("cpu", page_size=PAGE, budget=PAGE * (n + 64), prefetch=0) as pool:
            t = vtensor.empty(0, grow_dim=0, capacity=PAGE * n, dtype=torch.uint8, pool=pool)
            views = [t.extend(PAGE).alias() for _ in range(n)]
            began = time.thread_time()
            for length in range(n - 1, n - 257, -1):
                t.truncate(length * PAGE)
            seconds = time.thread_time() - began
            del views
            return seconds * n  # of as many truncates

    assert not grows_with_its_number(seconds_of)


def test_readying_what_tensors_of_as_many_shapes_left():
    """Each stays cached, and is zeroed, for another of its shape, of which there is none."""

    def seconds_of(n):
        with vtensor.Pool("cpu", page_size=PAGE, budget=PAGE * 8 * n) as pool:
            for i in range(n):
                t = vtensor.empty(0, grow_dim=0, capacity=PAGE + i, dtype=torch.uint8, pool=pool)
                t.extend(1).close()
            began = time.perf_counter()
            pool.wait_idle(timeout=100)
            return time.perf_counter() - began + n * 1e-6  # nothing, where the mapper kept up

    assert not grows_with_its_number(seconds_of)

"""Every operator of torch, on torch's own samples, over forks on the simulated device: it gives what it gives
over plain tensors, and the parents keep what they had (I6).

Shared pages are mapped read-only there, so a write that torch's schema does not name ends the process.
"""

from __future__ import annotations

import warnings
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import vtensor

PARTS = 8
SAMPLES = 2
# What memory happened to hold; and a sample that is refused of plain tensors, but lies within our capacity.
UNSUITED = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided as_strided".split()
# Torch resizes it, and back; and leaves it as it was below any mode of dispatch.
WITHOUT_OUT = ("lu", "matmul", "linalg.matrix_rank")
RESHAPES = "nn.functional.dropout3d"  # its input, in place


def operators() -> list[Any]:
    pytest.importorskip("expecttest", reason="torch's database of operators needs expecttest")
    from torch.testing._internal import common_methods_invocations as database

    foreach = [
        getattr(database, f"foreach_{kind}_op_db") for kind in ("unary", "binary", "pointwise", "other")
    ]
    return [op for ops in (database.op_db, *foreach) for op in ops if op.dtypes and op.name not in UNSUITED]


class Forks:
    """Forks of VTensors in place of plain tensors, and their parents."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.made: list[tuple[Any, Any, torch.Tensor]] = []

    def of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.ndim:
            return value
        if not value.numel() or value.is_conj() or value.is_neg():
            return value
        capacity = len(value) + 1
        parent = vtensor.empty(*value.shape, dtype=value.dtype, grow_dim=0, capacity=capacity, pool=self.pool)
        parent.copy_(value)
        self.made.append((parent, parent.fork(), value.clone()))
        return self.made[-1][1]

    def close(self) -> None:
        for parent, fork, before in self.made:
            torch.testing.assert_close(parent.alias(), before, rtol=0, atol=0, equal_nan=True)
            fork.close()
            parent.close()
        self.made.clear()


def plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor) and want.layout is torch.strided:
        assert got.dtype == want.dtype
        torch.testing.assert_close(torch.Tensor.as_subclass(got, torch.Tensor), want, equal_nan=True)
    elif isinstance(want, (list, tuple)):
        for one, other in zip(got, want, strict=True):
            same(one, other)


def variants(op: Any, want: Any) -> Any:
    """The operator's ways to be called: each with the arguments that it takes beside its inputs."""
    yield op.op, {}
    if op.inplace_variant is not None and op.name != RESHAPES:
        yield op.inplace_variant, {}
    if op.supports_out and isinstance(want, torch.Tensor) and op.name not in WITHOUT_OUT:
        yield op.op, {"out": torch.zeros_like(want)}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator(pool_factory: Any, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    every, compared = operators(), 0
    # Formats the stack for each operator, in search of a TestCase.
    monkeypatch.setattr("torch.testing._internal.opinfo.core.extract_test_fn", lambda: None)
    forks = Forks(pool_factory("simcuda", 20_000))
    warnings.simplefilter("ignore")
    for op in every[part::PARTS]:
        print(op.name, flush=True)  # shown if the process ends
        dtypes = sorted(op.dtypes, key=lambda dtype: (dtype is not torch.float32, str(dtype)))
        for sample in islice(op.sample_inputs("cpu", dtypes[0], requires_grad=False), SAMPLES):
            inputs = (sample.input, sample.args, sample.kwargs)

            def call(function: Any, of: Any, more: Any, inputs: Any = inputs) -> Any:
                first, others, named = tree_map(of, tree_map(plain, inputs))
                torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats the stack three times
                return function(first, *others, **named, **tree_map(of, more)), first

            try:
                want = call(op.op, plain, {})[0]
            except (RuntimeError, AssertionError):
                continue  # the sample is not for the CPU
            for function, more in variants(op, want):
                try:
                    want = call(function, plain, more)
                except (RuntimeError, TypeError):
                    continue  # it cannot be in place, or written to a tensor
                same(call(function, forks.of, more), want)
                compared += bool(forks.made)
                forks.close()
    assert compared > 150

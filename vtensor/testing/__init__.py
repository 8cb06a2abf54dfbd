"""Tools for tests of code that uses vtensor.

- :func:`assert_no_leaks`: a ``with`` that fails if memory is left. ``vtensor.testing.plugin`` is the same for
  pytest.
- :func:`host_pool`: a pool whose holes also fault on reads ("strict holes"), which reveals kernels that read
  past the end.
- :func:`fail_after`: failure injection by driver call.
- :func:`simulated_cuda_pool`: the CUDA path without a GPU.
- :func:`check_invariants`: compares a pool's tables with one another.
- ``vtensor.testing.strategies``, ``vtensor.testing.machine`` and ``vtensor.testing.cache_machine``:
  Hypothesis strategies, and state machines of random programs over tensors and over a cache, to which you can
  add rules. They need hypothesis, and are imported by name.
"""

from __future__ import annotations

from vtensor._base.faults import explain_faults, reports_go_to
from vtensor._test_pools import host_pool, simulated_cuda_pool
from vtensor.testing._checks import Refusals, check_invariants, fail_after
from vtensor.testing._leaks import assert_no_leaks

__all__ = [
    "Refusals",
    "assert_no_leaks",
    "check_invariants",
    "fail_after",
    "host_pool",
    "simulated_cuda_pool",
]

if reports_go_to() is None:
    explain_faults()

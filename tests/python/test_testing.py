"""vtensor.testing: what it finds in code that is wrong, and that it is quiet where code is right."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import vtensor
from support import PER_PAGE, filled, open_pool, quarter, received, run_snippet
from vtensor import testing
from vtensor.testing import kv_model, strategies
from vtensor.testing.cache_machine import CacheMachine
from vtensor.testing.cache_machine import which as which_request
from vtensor.testing.machine import TensorMachine, which

QUICK = settings(
    max_examples=15, stateful_step_count=15, derandomize=True, suppress_health_check=list(HealthCheck)
)


# --- assert_no_leaks


def test_no_leak(pool) -> None:
    kept = filled(pool, 5)
    with testing.assert_no_leaks():
        t = filled(pool, 9)
        t.fork().append(t[:1])
        t.shrink(3)
        view = t[:2]
        t.close()
        del view
    assert kept.length == 5


@pytest.mark.parametrize("looks_at_all", [True, False])
def test_a_tensor_that_stays_open_leaks(pool, looks_at_all: bool) -> None:
    with pytest.raises(AssertionError) as told:
        with testing.assert_no_leaks(*[] if looks_at_all else [pool]):
            t = filled(pool, 2 * PER_PAGE)
    message = str(told.value)
    assert "1 tensors" in message and "2 pages_active" in message, message
    assert f"VTensor (8, 1024) at {t.address:#x}" in message and "close()" in message
    t.close()


def test_a_leak_is_named_with_the_line_that_made_it(pool) -> None:
    kept, still, module = filled(pool, 1), filled(pool, 1), torch.nn.Linear(4, 4)
    with pytest.raises(AssertionError) as told:
        with testing.assert_no_leaks(pool):
            line = inspect.currentframe().f_lineno
            t = vtensor.zeros(3, 7, grow_dim=0, capacity=9, pool=pool)
            arena = vtensor.Arena(4096, pool=pool)
            cache = vtensor.KVCache(1, 1, 8, 2, 16, torch.float32, pool=pool)
            vtensor.adopt(module, pool, tag="mine")
            kept.extend(2 * PER_PAGE)
    message = str(told.value)
    for number, name in enumerate(
        ("VTensor (3, 7)", repr(arena), repr(cache), "2 allocations with tag 'mine'")
    ):
        (found,) = [text for text in message.splitlines() if name in text]
        assert found.endswith(f"made at {__file__}:{line + 1 + number}"), message
    grown = f"VTensor {tuple(kept.shape)} at {kept.address:#x}"
    assert grown in message and f"{still.address:#x}" not in message
    del module
    pool.close()
    assert t.closed


def test_a_view_that_leaks_is_named(pool) -> None:
    """Beside tensors without a storage, such as vmap() and sparse ones leave."""
    others = [torch.eye(2).to_sparse()]
    torch.vmap(lambda x: others.append(x) or x)(torch.ones(2, 3))
    with pytest.raises(AssertionError) as told:
        with testing.assert_no_leaks(pool):
            t = filled(pool, 2 * PER_PAGE)
            view = t[1:3]
            t.close()
    assert f"a view {tuple(view.shape)} of {view.dtype} at {view.data_ptr():#x}" in str(told.value)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_has_memory_is_neither_pickled_nor_copied(host, copied) -> None:
    arena = vtensor.Arena(8192, pool=host)
    cache = vtensor.KVCache(1, 1, 8, 2, 16, torch.float32, pool=host)
    for thing in (host, arena, cache, vtensor.Blocks(arena, 2, [(0, 4096, 4096)])):
        name = type(thing).__name__
        with pytest.raises(TypeError, match=rf"^\[{name}\] it can be neither pickled .*: make"):
            copied(thing)
    arena.close()
    cache.close()


def test_a_view_of_a_closed_pool_leaks(pool_factory) -> None:
    pool = pool_factory("host")
    with testing.assert_no_leaks():
        t = filled(pool, PER_PAGE)
        t.close()
    with pytest.raises(AssertionError, match="1 pages_pinned"):
        with testing.assert_no_leaks():
            view = filled(pool, PER_PAGE)[:]
            pool.close()
    assert view.eq(1).all()


def test_other_pools_are_let_be_where_some_are_named(pool_factory) -> None:
    ours, others = pool_factory("host"), pool_factory("host")
    with testing.assert_no_leaks(ours):
        t = filled(others, 5)
    t.close()


def test_what_is_cached_or_ahead_is_no_leak(pool_factory) -> None:
    pool = pool_factory("host", prefetch=8 * 4096, cache=16 * 4096)
    kept = quarter(pool, 1)
    with testing.assert_no_leaks():
        t = quarter(pool, 4 * PER_PAGE)
        t.prepare(PER_PAGE)
        kept.prepare(4 * PER_PAGE)
        t.close()
    kept.close()


def test_a_reference_cycle_is_no_leak(host) -> None:
    with testing.assert_no_leaks():
        ring = [filled(host, 2)]
        ring.append(ring)
        del ring


def test_what_readers_have_is_no_leak(pool_factory) -> None:
    """Neither in the process that writes nor in the one that reads: here they are one."""
    t = filled(pool_factory("host", shareable=True), 2)
    with testing.assert_no_leaks():
        reader = received(t)
    assert torch.equal(reader, t)
    reader.close()


def test_the_codes_own_error_comes_through(host) -> None:
    kept = []
    with pytest.raises(ZeroDivisionError):
        with testing.assert_no_leaks():
            kept.append(filled(host, 2))
            raise ZeroDivisionError
    kept[0].close()


# --- the pytest plugin

LEAKING = """
import pytest, torch, vtensor
kept = []

@pytest.fixture
def t():
    return vtensor.zeros(4, 64, grow_dim=0, capacity=8)

def test_right(t):
    t.extend(1)

def test_leaks(t):
    kept.append(t)

def test_fails(t):
    kept.append(vtensor.zeros(4, 64, grow_dim=0, capacity=8))
    assert False

@pytest.mark.skip
def test_skipped(t):
    pass
"""


def run_with_plugin(folder: Path, tests: str) -> subprocess.CompletedProcess:
    (folder / "conftest.py").write_text('pytest_plugins = ["vtensor.testing.plugin"]\n')
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_the_plugin_fails_a_test_that_leaks(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nusefixtures = no_leaked_pages\n")
    result = run_with_plugin(tmp_path, LEAKING)
    out = result.stdout
    assert result.returncode == 1, out
    assert "ERROR test_it.py::test_leaks" in out and "[no_leaked_pages]" in out and "1 tensors" in out
    assert "FAILED test_it.py::test_fails" in out
    assert "2 passed, 1 skipped" in out.replace("1 failed, ", "") and "1 error" in out, out


@pytest.mark.slow
def test_the_plugin_ignores_a_test_that_is_expected_to_fail(tmp_path: Path) -> None:
    """Its traceback keeps its variables, as that of any test that fails. One that passes all the same, and
    leaks, is an error."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nusefixtures = no_leaked_pages\n")
    result = run_with_plugin(
        tmp_path,
        "import pytest, vtensor\n"
        "kept = []\n"
        "@pytest.mark.xfail(raises=AssertionError)\n"
        "def test_passes():\n"
        "    kept.append(vtensor.zeros(4, 64, grow_dim=0, capacity=8))\n"
        "@pytest.mark.xfail(raises=AssertionError)\n"
        "def test_fails():\n"
        "    t = vtensor.zeros(4, 64, grow_dim=0, capacity=8)\n"
        "    assert False\n",
    )
    out = result.stdout
    assert "ERROR test_it.py::test_fails" not in out and "ERROR test_it.py::test_passes" in out, out
    assert "1 xfailed, 1 xpassed, 1 error" in out, out


@pytest.mark.slow
def test_the_plugin_shows_why_a_fault_ended_the_run(tmp_path: Path) -> None:
    """Though pytest holds standard error back, and loses it with the process."""
    result = run_with_plugin(
        tmp_path,
        "import vtensor\n"
        "def test_faults():\n"
        "    cache = vtensor.KVCache(1, 1, 8, 1, 1024)\n"
        "    cache[0][0][cache.alloc(), :] = 1\n",
    )
    assert result.returncode == -11
    assert "the slot has 0 tokens: call step() first" in result.stderr
    assert "in test_faults" in result.stderr  # faulthandler's, which pytest turns on


def test_plugin_is_not_loaded_by_being_installed() -> None:
    """An entry point would import torch in every run of pytest."""
    from importlib.metadata import distribution

    assert not [entry for entry in distribution("vtensor").entry_points if entry.group == "pytest11"]


# --- strict holes, failure injection, invariants


def test_a_failure_says_what_it_refused(pool) -> None:
    """Also where nothing is raised: an unmap that is refused is tried again, and the recipe goes on."""
    skipped, raised, silent = 0, 0, 0
    while True:
        t = filled(pool, 8 * PER_PAGE)
        with testing.fail_after(pool, skipped) as refusals:
            assert not refusals and refusals.calls == {}
            try:
                t.extend(PER_PAGE)
                t.shrink(9 * PER_PAGE)
            except vtensor.DriverError as error:
                raised += 1
                assert refusals.calls == {error.call: 1}
            else:
                silent += bool(refusals)
        t.close()
        if not refusals:
            break
        assert sum(refusals.calls.values()) == 1 and next(iter(refusals.calls)) in repr(refusals)
        skipped += 1
    assert raised > 0 and silent > 0
    assert "none" in repr(refusals)


# --- strategies


@QUICK
@given(st.data())
def test_tensors_are_as_programs_leave_them(data) -> None:
    with open_pool("host", prefetch=0) as pool, testing.assert_no_leaks(pool):
        t = data.draw(strategies.tensors(pool))
        plain = t.clone()
        assert type(t) is vtensor.VTensor and t.pool is pool and t.length <= t.capacity
        assert not plain.to(torch.float64).isnan().any() if plain.dtype.is_floating_point else True
        assert torch.equal(plain, t.alias())
        testing.check_invariants(pool)
        t.close()


def test_tensors_take_many_forms() -> None:
    seen = set()

    @settings(max_examples=60, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def look(data) -> None:
        with open_pool("host", prefetch=0) as pool:
            t = data.draw(strategies.tensors(pool))
            seen.add(("dtype", t.dtype))
            seen.add(("rows", t.grow_dim))
            seen.add(("empty", t.length == 0))
            seen.add(("shrunk at the front", t.address % 4096 != 0))
            t.close()

    look()
    kinds = {what for what, _ in seen}
    assert kinds == {"dtype", "rows", "empty", "shrunk at the front"}
    assert len({value for what, value in seen if what == "dtype"}) >= 5
    for what in ("empty", "shrunk at the front"):
        assert {value for name, value in seen if name == what} == {True, False}, what


@QUICK
@given(st.data())
def test_forks_share_their_pages(data) -> None:
    with open_pool("host", prefetch=0) as pool:
        first, *others = data.draw(strategies.forks(pool))
        before = first.clone()
        for t in others:
            assert torch.equal(t, before) and t.address != first.address
            assert all(record.shared > len(others) for record in t.pages())
        others[0].zero_()
        assert torch.equal(first, before)
        for t in (first, *others):
            t.close()


@pytest.mark.parametrize("machine", [TensorMachine, CacheMachine])
def test_another_default_device_changes_nothing(host, machine) -> None:
    layout = strategies.Layout(torch.uint8, (), (100,))

    @QUICK
    @given(strategies.forks(host, layout))
    def look(forks) -> None:
        for t in forks:
            t.close()

    with torch.device("meta"):
        look()
        run_state_machine_as_test(machine, settings=QUICK)


def test_a_tensor_of_a_layout_of_your_own(host) -> None:
    layout = strategies.Layout(torch.float32, (2,), (8, 4))

    @QUICK
    @given(t=strategies.tensors(host, layout))
    def look(t) -> None:
        assert t.shape[0] == 2 and t.shape[2:] == (8, 4) and t.dtype is torch.float32
        t.close()

    look()


# --- the state machine, with rules of a user's own


class WithKernel(TensorMachine):
    """A kernel that is right: it reads what the tensor shows."""

    def kernel(self, t: torch.Tensor) -> torch.Tensor:
        return t.sum(t.dim() - 1) if t.dim() > 1 else t.clone()

    @precondition(lambda self: any(t.dtype in (torch.float32, torch.int64) for t in self.tensors))
    @rule(index=which)
    def my_kernel(self, index: int) -> None:
        t = self.tensor(index)
        if t.dtype in (torch.float32, torch.int64):
            assert torch.equal(self.kernel(t.actual), self.kernel(t.expected()))


class WithCarelessKernel(WithKernel):
    """One whose result is right, and that then scribbles over what it read."""

    def kernel(self, t: torch.Tensor) -> torch.Tensor:
        result = super().kernel(t)
        if isinstance(t, vtensor.VTensor) and t.length:
            t[...] = 3
        return result


@pytest.mark.slow
def test_a_rule_of_a_users_own() -> None:
    run_state_machine_as_test(WithKernel, settings=QUICK)


def close_what_failed() -> None:
    """A machine that failed keeps what its frames name."""
    for pool in list(vtensor.pool._pools):
        if pool is not vtensor.default_pool("cpu"):
            pool.close()


# --- the one for caches


class WithAttention(CacheMachine):
    """A kernel that is right: it reads what the slot holds. How often it ran is counted."""

    ran = 0

    def kernel(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return k.double().sum(0) - v.double().sum(0)

    @precondition(lambda self: self.in_use())
    @rule(index=which_request)
    def attend(self, index: int) -> None:
        slot = self.slot(index)
        n = self.cache.length(slot)
        for layer in range(len(self.cache)):
            k, v = (part[slot, :n] for part in self.cache[layer])
            assert torch.equal(self.kernel(k, v), self.kernel(*self.expected(slot, layer)))
        WithAttention.ran += n > 0


class WithCarelessAttention(WithAttention):
    """One whose result is right, and that then scribbles over what it read."""

    def kernel(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result = super().kernel(k, v)
        k[-1:] = 3
        return result


class WithWriteOffByOne(CacheMachine):
    """K and V of what a request grows by after its prompt are written a position too early."""

    def write(self, slot: int, start: int, values: list[int]) -> None:
        super().write(slot, max(0, start - 1), values)


class WithKInTheWrongSlot(CacheMachine):
    """K of a request goes to another one, where that is as long."""

    def write(self, slot: int, start: int, values: list[int]) -> None:
        super().write(slot, start, values)
        other = self.in_use()[0]
        if other != slot and values and self.cache.length(other) >= start + len(values):
            k = self.cache[1][0]
            k[other, start : start + len(values)] = k[slot, start : start + len(values)]


class WithKForV(CacheMachine):
    def write(self, slot: int, start: int, values: list[int]) -> None:
        super().write(slot, start, values)
        k, v = self.cache[1]
        v[slot, start : start + len(values)] = k[slot, start : start + len(values)]


class WithForgottenSalt(CacheMachine):
    """Requests of different salts share prefixes."""

    def open_cache(self, pool: vtensor.Pool) -> vtensor.KVCache:
        class Unsalted(vtensor.KVCache):
            def alloc(self, tokens=None, *, salt="", expect=0, deferred=False) -> int:
                return super().alloc(tokens, expect=expect, deferred=deferred)

            def publish(self, slot: int, tokens, *, salt="") -> int:
                return super().publish(slot, tokens)

        return Unsalted(**self.options, dtype=torch.float32, pool=pool)


@pytest.mark.slow
def test_a_rule_over_a_cache() -> None:
    with testing.assert_no_leaks():
        run_state_machine_as_test(
            WithAttention, settings=settings(QUICK, max_examples=30, stateful_step_count=30)
        )
    assert WithAttention.ran > 10


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        pytest.param(WithCarelessKernel, "contents changed", marks=pytest.mark.slow),
        (WithCarelessAttention, "K of layer . in slot . is not what was written: 1 of"),
        (WithWriteOffByOne, "K of layer 0 in slot . is not what was written"),
        (WithKInTheWrongSlot, "K of layer 1 in slot . is not what was written"),
        (WithKForV, "V of layer 1 in slot . is not what was written"),
        (WithForgottenSalt, "K of layer 0 in slot . is not what was written"),
    ],
)
def test_the_machine_finds(machine: type[RuleBasedStateMachine], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=200, stateful_step_count=30))
    close_what_failed()


def test_a_cache_whose_marks_would_not_be_exact() -> None:
    class TooManyLayers(CacheMachine):
        options = CacheMachine.options | {"num_layers": 9}

    with pytest.raises(vtensor.InvalidArgument, match="9 layers.*at most 8 of torch.float32"):
        run_state_machine_as_test(TooManyLayers, settings=QUICK)
    close_what_failed()


def test_marks_tell_all_apart() -> None:
    """Of every value that the model has, layer, and K from V."""
    values = [0, 1, (1 << 19) - 1, 1 << 19, (1 << 20) - 1]
    seen = [kv_model.marks(values, layer, of_v) for layer in range(kv_model.MOST_LAYERS) for of_v in (0, 1)]
    assert len(torch.cat(seen).unique()) == len(values) * 2 * kv_model.MOST_LAYERS


def test_a_request_goes_on_with_its_prompt() -> None:
    own = kv_model.own_values()
    request = kv_model.Request("salt", [7, 8, 9, 10])
    request.append(request.extended(2, own))
    fork = request.copy()
    request.append(request.extended(3, own))
    assert request.values[:4] == [kv_model.value_of("salt", [7, 8, 9, 10][: n + 1]) for n in range(4)]
    assert request.known == 4 and request.values[4] >= 1 << 19
    fork.truncate(1)
    fork.append(fork.extended(1, own))
    assert fork.values == request.values[:2] and fork.known == 2
    fork.values[1], fork.known = next(own), 1  # overwritten: what follows is not the prompt's
    fork.append(fork.extended(1, own))
    assert fork.known == 1 and fork.values[2] not in request.values


# --- what is imported, and what is missing


def test_no_optional_import_by_vtensor_testing() -> None:
    run_snippet("assert 'hypothesis' not in sys.modules and 'pytest' not in sys.modules, 'imported'").check()


def test_without_hypothesis() -> None:
    result = run_snippet(
        """
        sys.modules["hypothesis"] = None
        for module in ("strategies", "machine", "cache_machine"):
            try:
                __import__(f"vtensor.testing.{module}")
            except ModuleNotFoundError as error:
                print(error)
        """
    ).check()
    assert result.out.count("pip install hypothesis") == 3

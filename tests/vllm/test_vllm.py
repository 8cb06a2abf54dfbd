"""The plug-in in the real vLLM: what stock vLLM says in every scenario, in the memory of blocks in use."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make vllm", allow_module_level=True)

SCRIPT = Path(__file__).with_name("scenarios.py")
NAMES = [line.split()[1].split("(")[0] for line in SCRIPT.read_text().split("@scenario\n")[1:]]
MODES = ("stock", "vtensor")
MIB = 1 << 20


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def results(folder):
    """Of both modes, run side by side, by scenario. None if the scenario failed."""

    def run(mode):
        command = [sys.executable, "-W", "ignore", SCRIPT, mode, folder]
        print(mode, "ended with", subprocess.run(command, timeout=1800).returncode)

    with ThreadPoolExecutor() as threads:
        list(threads.map(run, MODES))
    files = {(mode, name): folder / f"{mode}-{name}.json" for mode in MODES for name in NAMES}
    return {key: json.loads(file.read_text()) if file.exists() else None for key, file in files.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_stock_vllm(results, name):
    stock, ours = results["stock", name], results["vtensor", name]
    assert stock is not None and ours is not None, "the scenario failed: see what it printed"
    assert ours["tokens"] == stock["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_that_of_the_blocks_in_use(results, name):
    memory = results["vtensor", name]["memory"]
    assert memory["worst"] <= 0.03  # under load, at every step
    assert memory["mapped"] <= memory["cached"] + MIB  # idle
    assert memory["mapped"] <= memory["budget"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("small_budget", "on: a budget of 6,291,456 bytes a worker, in pages of 65,536 bytes, for 48 of 512"),
        ("two_workers", "on: a budget of 3,145,728 bytes a worker, "),
    ],
)
def test_the_log_says_that_it_is_on_and_that_memory_is_short(results, name, says):
    assert results["stock", name]["said"] == []
    on, *shortages = results["vtensor", name]["said"]
    assert says in on and shortages
    for line in shortages:
        counts = re.fullmatch(
            r".* short: so far (\d+) requests preempted, (\d+) cached blocks evicted, .*", line
        )
        assert any(map(int, counts.groups()))


def test_the_log_says_no_more_where_memory_suffices(results):
    assert len(results["vtensor", "no_prefix_caching"]["said"]) == 1


def test_the_prefix_cache_keeps_what_was_allowed(results):
    memory = results["vtensor", "bounded_cache"]["memory"]
    assert MIB <= memory["cached"] <= 2 * MIB


@pytest.mark.parametrize("name", ["two_engines", "two_engines_with_workers"])
def test_two_engines_reach_the_whole_in_turn(results, name):
    """But for what the other's block that stands for none takes: two blocks' worth of pages."""
    for held in results["vtensor", name]["held"]:
        assert min(held) >= 48 - 2


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_worker_ends_the_engine(results, mode):
    """By vLLM's own error, and soon."""
    killed = results[mode, "a_worker_is_killed"]
    assert killed["tokens"] == "EngineDeadError" and killed["seconds"] < 60


@pytest.mark.parametrize("name", ["sleep", "engine_in_a_process_of_its_own"])
def test_an_engine_asleep_keeps_the_block_that_stands_for_none(results, name):
    assert results["vtensor", name]["asleep"]["mapped"] <= MIB // 4


def test_the_memory_of_an_engine_that_is_killed_goes_to_the_other(results):
    killed = results["vtensor", "killed_engine"]
    assert killed["taken"] >= 40 * (128 << 10)  # of 48 blocks
    assert killed["seconds"] < 10  # of milliseconds, on a quiet machine
    assert killed["held"] >= 48 - 1


def test_what_is_mapped_ahead_is_what_the_next_step_takes(results):
    """Here at most 2048 tokens' prompts, and a block of 32 tokens for each request that decodes."""
    ahead = results["vtensor", "no_prefix_caching"]["memory"]["ahead"]
    assert 0 < ahead <= (2048 // 32 + 24) * (128 << 10)


def test_without_a_prefix_cache_an_idle_engine_keeps_nothing(results):
    memory = results["vtensor", "no_prefix_caching"]["memory"]
    assert memory["mapped"] <= MIB and memory["cached"] == 0


SHARED = f"test-{os.getpid()}-start"
TAKEN = f"VTENSOR_VLLM_BUDGET=16MiB,VTENSOR_VLLM_SHARED={SHARED}"  # another process has all of it
REFUSED = {
    "VTENSOR_VLLM_BUDGET=64KiB": "holds 0 blocks of",
    "VTENSOR_VLLM_BUDGET=1MiB": "raise VTENSOR_VLLM_BUDGET, or lower max_model_len",
    "VTENSOR_VLLM_PAGE_SIZE=5000": "VTENSOR_VLLM_PAGE_SIZE=5000: [host driver] a page size of",
    "VTENSOR_VLLM_BUDGET=much": "budget is 'much'",
    "VTENSOR_VLLM_BUDGT=8MiB": "VTENSOR_VLLM_BUDGT in the environment is no setting",
    TAKEN: "no memory for the first block: other engines of VTENSOR_VLLM_SHARED",
}
HOLDER = """
import sys, torch, vtensor
pool = vtensor.Pool("cpu", budget="16MiB", shared_budget=sys.argv[1])
taken = vtensor.empty(0, grow_dim=0, capacity=16 << 20, dtype=torch.uint8, pool=pool).extend(16 << 20)
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def refused(results, folder):
    """The sentence of each engine that does not start, before it takes a request."""
    holder = [sys.executable, "-P", "-c", HOLDER, SHARED]
    names = [f"prefix_caching,{settings}" for settings in REFUSED]
    command = [sys.executable, "-W", "ignore", SCRIPT, "vtensor", folder, *names]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "taken\n"
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
    said = run.stdout.decode()
    assert f"failed: {', '.join(names)}" in said
    *parts, _ = re.split(r"^prefix_caching,.*: \d+ s$", said, flags=re.MULTILINE)
    sentences = ([line for line in part.splitlines() if "[vtensor.vllm]" in line][-1] for part in parts)
    return dict(zip(REFUSED, sentences, strict=True))


@pytest.mark.parametrize("settings", REFUSED)
def test_an_engine_that_cannot_start_says_why(refused, settings):
    assert REFUSED[settings] in refused[settings]

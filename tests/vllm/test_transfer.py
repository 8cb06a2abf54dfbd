"""Prefill in one vLLM, decode in another: the tokens of one stock engine, and blocks that stay while they are
read or written."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

for package in ("vllm", "nixl"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make vllm", allow_module_level=True)

SCRIPT = Path(__file__).with_name("transfer.py")
MIB = 1 << 20
ALONE = {"hybrid": "hybrid_alone"}
WHOLE = ("by_default", "over_tcp", "over_what_is_named", "hybrid")
CUT = ("killed_in_the_middle", "killed_and_computed", "killed_before")
LATE = ("nobody_reads", "nobody_reads_over_tcp")


def run(mode, folder, *names):
    command = [sys.executable, "-W", "ignore", SCRIPT, mode, folder, *names]
    # Set before the script imports torch: a forked process lacks OpenMP's threads, and would wait for them.
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=alone, timeout=1500, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return ended.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By scenario, of both modes, run side by side; None if it failed. another_connector, which is
    to fail, has what was said."""
    folder = tmp_path_factory.mktemp("transfer")
    modes = {
        "stock": ["alone", "hybrid_alone"],
        "vtensor": [*WHOLE, "aborted", *CUT, *LATE, "another_connector"],
    }
    with ThreadPoolExecutor() as threads:
        said = dict(zip(modes, threads.map(lambda mode: run(mode, folder, *modes[mode]), modes), strict=True))
    found = {"another_connector": said["vtensor"]}
    for mode, names in modes.items():
        for name in names:
            file = folder / f"{mode}-transfer-{name}.json"
            found.setdefault(name, json.loads(file.read_text()) if file.exists() else None)
        if not all(found[name] for name in names):
            print(said[mode], file=sys.__stderr__)
    return found


def alone(results, name="alone"):
    tokens = results[name]["tokens"]
    return [tokens[str(i)] for i in range(len(tokens))]


def require_idle(result, *sides):
    """Nothing but the prefix cache keeps memory, and no block waits."""
    for side in sides:
        assert result[f"{side}used"] == 0
        memory = result[f"{side}memory"]
        assert memory["worst"] <= 0.03  # at every step
        assert memory["mapped"] <= memory["cached"] + MIB


@pytest.mark.parametrize("name", WHOLE)
def test_the_tokens_are_those_of_one_stock_engine(results, name):
    """Twice; the second time from the prefix cache of the decode side, but for the last block of each."""
    result = results[name]
    assert result is not None, "the scenario failed: see what it printed"
    expected = alone(results, ALONE.get(name, "alone"))
    assert result["tokens"] == [expected, expected]
    first, both = result["received"]
    assert first > 12 * 32 and both - first <= 12 * 32
    require_idle(result, "", "prefill ")


def test_blocks_stay_while_they_are_received_into(results):
    """Also those of an aborted request, and while others want all memory."""
    result = results["aborted"]
    assert result is not None, "the scenario failed: see what it printed"
    before, after = result["in the middle"]
    assert before == after > 0 and result["still"]
    expected = alone(results)
    assert result["tokens"] == [expected[0], *expected[2:]]
    require_idle(result, "", "prefill ")


@pytest.mark.parametrize("name", CUT)
def test_the_engine_goes_on_when_the_other_is_killed(results, name):
    result = results[name]
    assert result is not None, "the scenario failed: see what it printed"
    expected = alone(results)
    assert result["tokens"] == expected[:1]
    if name == "killed_in_the_middle":
        assert (result["cut"], result["reason"]) == ([], "error")
    else:
        assert (result["cut"], result["reason"]) == (expected[1], "length")
    assert result["after"] == expected[2]
    require_idle(result, "")


@pytest.mark.parametrize("name", LATE)
def test_blocks_stay_until_they_were_read_or_the_lease_is_over(results, name):
    """A later read gives zeros, and harms no request."""
    result = results[name]
    assert result is not None, "the scenario failed: see what it printed"
    leased, after = result["leased"]
    assert leased > 0 and after == 0
    assert result["gone"]["mapped"] <= MIB // 4
    expected = alone(results)
    assert result["tokens"] == expected[:2]
    assert result["late"] != expected[1]  # so the tokens show what was read
    require_idle(result, "", "prefill ")


def test_another_connector_is_refused(results):
    said = results["another_connector"]
    assert "[vtensor.vllm] the KV connector is ExampleConnector" in said
    assert "another_connector ended with 1" in said

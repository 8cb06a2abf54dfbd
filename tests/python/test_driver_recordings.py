"""What the real driver answered, played again through the simulated libcuda: it must answer the same.

``make gpu`` records them; its files are kept in benchmarks/results. Where one differs, the simulation errs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from cuda_support import device, load_simulated_libcuda, needs_simcuda
from support import simcuda_control

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from benchmarks import gpu  # noqa: E402

pytestmark = needs_simcuda
RECORDINGS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
GRANULARITY = 2 << 20


@pytest.fixture
def driver() -> Iterator[None]:
    load_simulated_libcuda()
    with device(granularity=GRANULARITY):
        for cached in (gpu.retain_context, gpu.properties, gpu.has_rdma):
            cached.cache_clear()
        gpu.retain_context()
        yield
        gpu.must(gpu.cuda.cuCtxSetCurrent(gpu.cuda.CUcontext(0)))
        gpu.must(gpu.cuda.cuDevicePrimaryCtxRelease(0))
    simcuda_control().simcuda_reset()  # what cases leave is given back by their process's end on a GPU


def differences(lines: list[gpu.Line]) -> list[str]:
    """Plays recorded lines; the first call of each case that is answered otherwise than it was there."""
    found = []
    for case, calls in groupby(lines, key=itemgetter("case")):
        calls = list(calls)
        for line, answer in zip(calls, gpu.play(calls), strict=False):
            if answer != line["answer"]:
                shown = ", ".join(f"{name}={line[name]}" for name in gpu.ARGUMENTS[line["call"]])
                found.append(f"{case}: {line['call']}({shown}) answered {line['answer']}, {answer} here")
                break
    return found


def recorded() -> list[gpu.Line]:
    """A recording made from the simulated libcuda itself."""
    return list(gpu.answered(gpu.CASES))


@pytest.mark.skipif(not RECORDINGS, reason="no recording of a real driver is in benchmarks/results yet")
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_simulation_answers_as_the_real_driver_did(path, driver):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    facts = {one["name"]: one["value"] for one in found if one["kind"] == "fact"}
    assert facts["granularity"] == GRANULARITY
    assert not any("simulated" in one["gpu"] for one in found if one["kind"] == "run")
    assert not differences([one for one in found if one["kind"] == "call"])


def test_a_recording_plays_again_the_same(driver):
    lines = recorded()
    assert {line["case"] for line in lines} == set(gpu.CASES)
    assert {line["call"] for line in lines} == set(gpu.ARGUMENTS)
    assert json.loads(json.dumps(lines)) == lines
    assert not differences(lines)


@pytest.mark.parametrize(
    ("case", "call", "code"),
    [
        ("unmap twice", "cuMemUnmap", "CUDA_ERROR_INVALID_VALUE"),
        ("unmap of part of a page", "cuMemUnmap", "CUDA_ERROR_INVALID_VALUE"),
        ("set-access where nothing is mapped", "cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE"),
        ("map over what is mapped", "cuMemMap", "CUDA_ERROR_INVALID_VALUE"),
        ("free with the wrong size", "cuMemAddressFree", "CUDA_ERROR_INVALID_VALUE"),
        ("a page's life", "cuMemMap", "CUDA_SUCCESS"),
    ],
)
def test_another_answer_is_noticed(driver, case, call, code):
    lines = recorded()
    changed = next(
        line for line in lines if (line["case"], line["call"], line["answer"]) == (case, call, code)
    )
    changed["answer"] = "CUDA_ERROR_UNKNOWN"
    (difference,) = differences(lines)
    assert difference.startswith(f"{case}: {call}(") and f"{code} here" in difference


def test_a_driver_with_other_rules_is_noticed(driver):
    lines = recorded()
    with device(read_only=0):
        differing = differences(lines)
    assert any("from read-write to read-only" in difference for difference in differing)
    assert all("cuMemSetAccess" in difference for difference in differing)

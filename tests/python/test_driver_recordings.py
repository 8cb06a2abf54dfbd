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
# What a driver lets pass and the simulation refuses, so that tests see who does it.
STRICTER = {
    "unmap twice",
    "unmap where nothing was mapped",
    "unmap over a hole",
    "unmap of a page and addresses behind it",
    "map of a handle that was released and is mapped elsewhere",
}


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
    differing = dict(
        one.split(": ", 1) for one in differences([one for one in found if one["kind"] == "call"])
    )
    assert differing.keys() == STRICTER
    for case, difference in differing.items():
        assert "answered CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE here" in difference, case


def test_a_recording_plays_again_the_same(driver):
    lines = recorded()
    assert {line["case"] for line in lines} == set(gpu.CASES)
    assert {line["call"] for line in lines} == set(gpu.ARGUMENTS)
    assert json.loads(json.dumps(lines)) == lines
    assert not differences(lines)


# Of each case, the calls that the reference refuses, counted from 0; the others succeed.
REFUSED = {
    "set-access where nothing is mapped": [1],
    "set-access over mapped and unmapped": [3],
    "set-access on part of a page": [3, 4],
    "set-access from the middle of one page to the middle of the next": [5],
    "set-access of size 0": [4],
    "unmap twice": [5],
    "unmap where nothing was mapped": [1],
    "unmap of part of a page": [3, 4],
    "unmap of a page and part of the next": [5],
    "unmap over a hole": [5],
    "unmap of a page and addresses behind it": [4],
    "unmap of size 0": [4],
    "map over what is mapped": [5],
    "map half over what is mapped": [4],
    "write access after the first mapping went": [6],
    "write access to two after the first mapping went": [7, 8],
    "a fork is written to after its parent went, and forked": [9],
    "map of part of a handle": [2],
    "map at an offset into the handle": [2],
    "map of more than the handle": [2],
    "map of size 0": [2],
    "map at no multiple of the granularity": [2],
    "map past the end of the range": [2],
    "free with the wrong size": [1, 2],
    "free from the middle": [1],
    "free twice": [2],
    "create of size 0": [0],
    "create of half a granule": [0],
    "reserve of size 0": [0],
    "reserve of half a granule": [0],
    "reserve with an alignment of three granules": [0],
    "free while mapped": [4],
    "map of a handle that was released and is mapped elsewhere": [5],
    "copy from behind what is mapped": [4],
    "fill over the end of what is mapped": [4],
    "fill of what is read-only": [4],
}

OTHER_CODES = {
    "write access after the first mapping went": "CUDA_ERROR_UNKNOWN",
    "write access to two after the first mapping went": "CUDA_ERROR_UNKNOWN",
    "a fork is written to after its parent went, and forked": "CUDA_ERROR_UNKNOWN",
    "map of part of a handle": "CUDA_ERROR_NOT_SUPPORTED",
    "map at an offset into the handle": "CUDA_ERROR_NOT_SUPPORTED",
    "map of more than the handle": "CUDA_ERROR_NOT_SUPPORTED",
}


def test_the_simulation_keeps_the_rules_of_the_reference(driver):
    answers = {case: [] for case in gpu.CASES}
    for line in recorded():
        answers[line["case"]].append(line["answer"])
    assert REFUSED.keys() < answers.keys()
    for case, given in answers.items():
        code = OTHER_CODES.get(case, "CUDA_ERROR_INVALID_VALUE")
        assert set(given) <= {"CUDA_SUCCESS", code}, case
        refused = [i for i, answer in enumerate(given) if answer != "CUDA_SUCCESS"]
        assert refused == REFUSED.get(case, []), case


def test_another_answer_is_noticed(driver):
    lines = recorded()
    changed = next(line for line in lines if line["case"] == "unmap twice" and line["call"] == "cuMemUnmap")
    changed["answer"] = "CUDA_ERROR_UNKNOWN"
    (difference,) = differences(lines)
    assert difference.startswith("unmap twice: cuMemUnmap(") and "CUDA_SUCCESS here" in difference


def test_a_driver_with_other_rules_is_noticed(driver):
    lines = recorded()
    with device(read_only=0):
        differing = differences(lines)
    assert any("from read-write to read-only" in difference for difference in differing)
    assert all("cuMemSetAccess" in difference for difference in differing)

"""What the real driver answered, played again through the simulated libcuda: it must answer the same.

``make gpu`` records them; its files are kept in benchmarks/results. Where one differs, the simulation errs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

import pytest

from cuda_support import device, load_simulated_libcuda, needs_simcuda
from support import ROOT, simcuda_control

sys.path.append(str(ROOT))

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from benchmarks import gpu  # noqa: E402

pytestmark = needs_simcuda
RECORDINGS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
GRANULARITY = 2 << 20
# What a driver lets pass and the simulation refuses, so that tests see the call that does it.
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
    """Plays recorded lines; the calls that are answered otherwise than they were there."""
    found = []
    for case, calls in groupby(lines, key=itemgetter("case")):
        calls = list(calls)
        for line, answer in zip(calls, gpu.play(calls), strict=True):
            if answer != line["answer"]:
                shown = ", ".join(f"{name}={line[name]}" for name in gpu.ARGUMENTS[line["call"]])
                found.append(f"{case}: {line['call']}({shown}) answered {line['answer']}, {answer} here")
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
    lines = [one for one in found if one["kind"] == "call"]
    assert {line["case"] for line in lines} == set(gpu.CASES)
    differing = differences(lines)
    assert len(differing) == len(STRICTER)  # one call of each
    assert {difference.partition(": ")[0] for difference in differing} == STRICTER
    for difference in differing:
        assert "answered CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE here" in difference


def test_a_recording_plays_again_the_same(driver):
    lines = recorded()
    assert {line["case"] for line in lines} == set(gpu.CASES)
    assert {line["call"] for line in lines} == set(gpu.ARGUMENTS)
    assert json.loads(json.dumps(lines)) == lines
    assert not differences(lines)

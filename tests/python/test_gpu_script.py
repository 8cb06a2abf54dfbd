"""scripts/gpu.sh with a Python that only says what it was asked for: what runs, in which order, and what is
kept where something fails."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from support import ROOT, run_process

SCRIPT = ROOT / "scripts" / "gpu.sh"
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"pip install"*) said="build" ;;
  *"-m pytest"*) said="test ${*: -1}" ;;
  *"-m benchmarks.gpu --only first"*) said="first questions" ;;
  *"-m benchmarks.gpu --only rest"*) said="other questions" ;;
  *"-m benchmarks.gpu"*) said="questions" ;;
  *"-m benchmarks"*) said="benchmarks" ;;
  *is_available*) exit "$GPU" ;;
  *) exit 0 ;;
esac
echo "$said" | tee -a "$SAID"
if [[ -n $FAILS && $said = *$FAILS* ]]; then exit 1; fi
"""
FILES = ("cuda_mapping", "cuda_tensor", "serving", "shared_memory", "beside_cuda_core")
FILES += ("torch_memory", "generate", "attention")
TESTS = [f"test tests/gpu/test_{name}.py" for name in FILES]
SETUP = ["build", "first questions"]  # side by side


@pytest.fixture
def gpu_script(tmp_path):
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*arguments: str, gpu: bool = True, fails: str = ""):
        out, said = tmp_path / "out", tmp_path / "said"
        own = {"PYTHON3": str(python), "OUT": str(out), "SAID": str(said)}
        own |= {"GPU": "0" if gpu else "1", "FAILS": fails}
        done = run_process(SCRIPT, *arguments, env=os.environ | own)
        files = {path.name: path.read_text().splitlines() for path in out.iterdir()}
        return SimpleNamespace(said=said.read_text().splitlines(), files=files, code=done.code, err=done.err)

    return run


def test_a_gpu_is_tested_asked_and_measured(gpu_script):
    done = gpu_script()
    assert (sorted(done.said[:2]), done.code) == (SETUP, 0)
    assert done.said[2:] == [*TESTS[:-1], "other questions", TESTS[-1], "benchmarks"]
    assert done.files == {"build.txt": ["build"], "gpu-tests.txt": TESTS}


def test_a_second_call_asks_only(gpu_script):
    assert gpu_script("--only", "4,6").said == ["build", "questions"]


def test_without_a_gpu_nothing_is_asked(gpu_script):
    assert gpu_script(gpu=False).said == ["build", *TESTS]


@pytest.mark.parametrize("arguments", [(), ("--only", "1")])
def test_without_a_build_the_questions_are_asked_all_the_same(gpu_script, arguments):
    done = gpu_script(*arguments, fails="build")
    asked = ["questions"] if arguments else ["first questions", "other questions"]
    assert sorted(done.said) == sorted(["build", *asked])
    assert (done.files, done.code) == ({"build.txt": ["build"]}, 1)
    assert "error: failed: Offline build" in done.err


@pytest.mark.parametrize("what", ["mapping", "first", "other", "benchmarks"])
def test_what_fails_stops_nothing_after_it(gpu_script, what):
    done = gpu_script(fails=what)
    assert (sorted(done.said[:2]), done.code) == (SETUP, 1)
    assert done.said[2:] == [*TESTS[:-1], "other questions", TESTS[-1], "benchmarks"]
    assert "error: failed: " in done.err

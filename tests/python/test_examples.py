"""The programs in examples/: they run, are short, and the docs name them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from support import ROOT, run_process, run_snippet

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"decode_loop": ["tqdm"], "exploration": ["matplotlib", "hypothesis"], "watch": ["matplotlib"]}


@pytest.mark.slow
@pytest.mark.seconds(200)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    """As a program, in a folder of its own; its assertions are in it."""
    for module in NEEDS.get(example.stem, ()):
        pytest.importorskip(module)
    arguments = [str(example), *(["picture.png"] if example.stem == "watch" else [])]
    code = f"""
    import runpy
    os.chdir({str(tmp_path)!r})
    os.environ["MPLBACKEND"] = "Agg"
    sys.argv = {arguments!r}
    runpy.run_path({str(example)!r}, run_name="__main__")
    """
    assert run_snippet(code, timeout=180).check().out.strip()


def test_the_project_that_uses_vtensor_passes_its_own_tests(tmp_path: Path) -> None:
    """In a folder elsewhere, without what is only in this checkout: its simulated libcuda."""
    pytest.importorskip("hypothesis")
    project = tmp_path / "your-project"
    shutil.copytree(ROOT / "examples/your-project", project, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != "VTENSOR_SIMCUDA"}
    # The plug-in is on: what a test leaves behind is an error, here the only one.
    (project / "tests/test_leak.py").write_text(
        "import vtensor\nkept = []\n"
        "def test_leaks():\n    kept.append(vtensor.zeros(9, grow_dim=0, capacity=99))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rsE", "-p", "no:cacheprovider"]
    ran = run_process(*command, cwd=project, env=environment | {"PYTHONPATH": "."})
    assert ran.code == 1, ran.out + ran.err
    assert "4 passed, 1 skipped, 1 error" in ran.out and "names no simulated libcuda" in ran.out
    assert "ERROR tests/test_leak.py::test_leaks" in ran.out

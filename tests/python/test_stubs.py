"""The golden stub: vtensor/_core.pyi freezes the border between C++ and Python."""

from __future__ import annotations

import difflib
from pathlib import Path

from support import ROOT, run_program

GOLDEN = ROOT / "vtensor" / "_core.pyi"


def test_stub_describes_the_extension(tmp_path: Path) -> None:
    generated = tmp_path / "_core.pyi"
    code = "import runpy; runpy.run_module('nanobind.stubgen', run_name='__main__', alter_sys=True)"
    run_program(code, "-q", "-m", "vtensor._core", "-o", generated, cwd=tmp_path).check()

    difference = "\n".join(
        difflib.unified_diff(
            GOLDEN.read_text().splitlines(),
            generated.read_text().splitlines(),
            "vtensor/_core.pyi",
            "the extension",
            lineterm="",
        )
    )
    assert not difference, f"run `make stubs` and read what changed:\n{difference}"

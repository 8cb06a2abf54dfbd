"""The golden stub: vtensor/_core.pyi freezes the border between C++ and Python."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "vtensor" / "_core.pyi"


def test_stub_describes_the_extension(tmp_path: Path) -> None:
    generated = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "vtensor._core", "-o", str(generated)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=100)

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

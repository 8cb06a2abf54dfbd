"""The Python examples of integrations/README.md run as they stand, one after the other, in one namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_readme import python_lines

README = Path(__file__).parents[2] / "integrations" / "README.md"


@pytest.mark.seconds(300)
def test_examples_run(tmp_path: Path) -> None:
    source = python_lines(README.read_text())
    assert source.count("import ") > 5, "integrations/README.md shows no ```python examples"
    script = tmp_path / "integrations.py"
    script.write_text(source)
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"

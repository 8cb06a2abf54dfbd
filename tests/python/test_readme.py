"""The README's Python examples run as they stand, one after the other, in one namespace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def python_lines(text: str) -> str:
    """The ```python examples of a Markdown text, each line at its own line number, all else blank."""
    kept = []
    inside, indent = False, ""
    for line in text.splitlines():
        if inside and line.strip() == "```":
            inside = False
        kept.append(line.removeprefix(indent) if inside else "")
        if match := re.fullmatch(r"( *)```python\b.*", line):
            inside, indent = True, match[1]  # an example in a list is indented
    assert not inside, "a ```python example is never closed"
    return "\n".join(kept) + "\n"


@pytest.mark.slow
@pytest.mark.seconds(300)
def test_readme_examples_run(tmp_path: Path) -> None:
    source = python_lines(README.read_text())
    assert source.strip(), "README.md shows no ```python example"
    script = tmp_path / "README.py"
    script.write_text(source)

    # In an empty folder, so that neither the sources nor earlier output of an example help it along.
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"

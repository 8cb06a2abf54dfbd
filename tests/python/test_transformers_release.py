"""A release of transformers that is too old is refused in a sentence that names both."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from vtensor.integrations.transformers.release import OLDEST

ROOT = Path(__file__).parents[2]


def test_it_is_the_one_that_is_declared():
    assert re.findall('"transformers>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text()) == [OLDEST]


@pytest.mark.parametrize("installed", ["4.57.6", "5.0.0", "5.16.1"])
def test_an_older_one_is_refused(installed):
    code = f"""
import transformers
transformers.__version__ = {installed!r}
import vtensor.integrations.transformers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and said.startswith("ImportError: [vtensor.integrations.transformers]")
    assert f"transformers {installed} is installed" in said and f"'transformers>={OLDEST}'" in said

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


def test_an_older_one_is_refused():
    """Each in a fork of one process, because importing transformers takes seconds."""
    code = """
import os, sys
import transformers
for installed in sys.argv[1:]:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    transformers.__version__ = installed
    try:
        import vtensor.integrations.transformers
    except ImportError as error:
        print(error, flush=True)
    os._exit(0)
"""
    older = ["4.57.6", "5.0.0", "5.16.1"]
    done = subprocess.run([sys.executable, "-c", code, *older], capture_output=True, text=True, timeout=60)
    said = done.stdout.splitlines()
    assert len(said) == len(older), done.stderr
    for installed, sentence in zip(older, said, strict=True):
        assert sentence.startswith("[vtensor.integrations.transformers]")
        assert (
            f"transformers {installed} is installed" in sentence and f"'transformers>={OLDEST}'" in sentence
        )

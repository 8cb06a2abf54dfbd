"""``python -m vtensor bench``: the benchmarks of a checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import vtensor
from vtensor.errors import VTensorError


def checkout() -> Path | None:
    """The folder of the sources that vtensor was imported from; None if it was installed from a wheel."""
    folder = Path(vtensor.__file__).parents[1]
    return folder if (folder / "benchmarks" / "harness.py").exists() else None


def main(arguments: list[str]) -> int:
    """Runs ``python -m benchmarks`` with these arguments. Returns the exit status."""
    sources = checkout()
    if sources is None:
        raise VTensorError(
            "[bench] the benchmarks are not part of the installed package: run `make bench` in a checkout of "
            "vtensor, or this command after `pip install -e .` there"
        )
    sys.path.insert(0, str(sources))
    benchmarks = importlib.import_module("benchmarks.__main__")
    status: int = benchmarks.main(arguments, prog="python -m vtensor bench")
    return status

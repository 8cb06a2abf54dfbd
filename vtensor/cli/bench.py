"""``python -m vtensor bench``: the benchmarks of a checkout."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from pathlib import Path

import vtensor


def checkout() -> Path | None:
    """The folder of the sources that vtensor was imported from; None where it was installed from a wheel."""
    folder = Path(vtensor.__file__).parents[1]
    return folder if (folder / "benchmarks" / "harness.py").exists() else None


def main(arguments: list[str], as_json: bool) -> int:
    """Runs ``python -m benchmarks`` with these arguments; ``as_json`` prints its results as JSON instead of a
    table."""
    sources = checkout()
    if sources is None:
        print(
            "error: the benchmarks are not part of the installed package: run `make bench` in a checkout of "
            "vtensor, or this command after `pip install -e .` there",
            file=sys.stderr,
        )
        return 1
    sys.path.insert(0, str(sources))
    benchmarks = importlib.import_module("benchmarks.__main__")
    if not as_json:
        status: int = benchmarks.main(arguments)
        return status
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        with contextlib.redirect_stdout(sys.stderr):  # the table, for who watches
            status = benchmarks.main([*arguments, "--json", str(results)])
        print(results.read_text(), end="")
    return status

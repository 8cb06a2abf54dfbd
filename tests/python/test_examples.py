"""The programs in examples/: they run, are short, and the docs name them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support import run_snippet

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.seconds(200)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    """As a program, in a folder of its own; its assertions are in it."""
    for module in ("matplotlib", "hypothesis") if example.stem == "exploration" else ("tqdm",):
        pytest.importorskip(module)
    code = f"""
    import runpy
    os.chdir({str(tmp_path)!r})
    os.environ["MPLBACKEND"] = "Agg"
    sys.argv = [{str(example)!r}]
    runpy.run_path({str(example)!r}, run_name="__main__")
    """
    assert run_snippet(code, timeout=180).check().out.strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_named(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) < 100
    assert f"python examples/{example.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f"`examples/{example.name}`" in (ROOT / "docs" / "serving.md").read_text()


def test_there_are_three() -> None:
    assert [example.stem for example in EXAMPLES] == ["decode_loop", "engine", "exploration"]

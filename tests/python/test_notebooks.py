"""The notebooks run from top to bottom on the CPU, and what is stored in them is what they give."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support import ROOT

pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install 'vtensor[test]'")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel: pip install 'vtensor[test]'")

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell's outputs are: streams and MIME types, in order."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found += [output.name] * (output.name not in found)
        else:
            found.append(" ".join(sorted(output.get("data", {output.output_type: None}))))
    return found


@notebooks
@pytest.mark.slow
@pytest.mark.seconds(200)
def test_it_runs_and_gives_what_is_stored(path, tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # not the user's settings
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    stored, fresh = read(path), read(path)
    for cell in code_cells(fresh):
        cell.outputs = []
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(fresh, timeout=100, kernel_name="python3", resources=where).execute()
    for before, after in zip(code_cells(stored), code_cells(fresh), strict=True):
        assert kinds(before) == kinds(after), before.source
    # What the pages come to is the same on every machine; times and the pool's budget are not.
    if path.stem[0] in "14":
        assert texts(stored) == texts(fresh)


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What it prints and how its tensors show themselves, in words."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    # On a busy machine what one cell prints comes in several pieces.
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    shown = [output.data["text/plain"] for output in outputs if "data" in output]
    return printed.splitlines() + [line for line in shown if line.startswith("<VTensor")]


@notebooks
def test_it_is_stored_whole(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [
        output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < MOST_BYTES
    for private in (str(Path.home()) + os.sep, str(ROOT), "/tmp/"):
        assert private not in path.read_text()


@notebooks
def test_one_variable_moves_it_to_cuda(path):
    notebook = read(path)
    first = code_cells(notebook)[0].source
    assert re.findall(r"^DEVICE = (.*)$", first, flags=re.MULTILINE) == ['"cpu"']
    assert '**On CUDA**: set `DEVICE = "cuda"`' in notebook.cells[0].source
    source = "\n".join(cell.source for cell in code_cells(notebook))
    pools = re.findall(r"vtensor\.Pool\(([^,)]*)", source)
    assert pools and set(pools) == {"DEVICE"}  # where each tensor is

"""README and docs: examples run, links lead somewhere, and what is claimed is what the code has."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from support import ROOT, run_snippet
from vtensor import errors

DOCS = ROOT / "docs"
TEXTS = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "csrc" / "DESIGN.md", *ROOT.glob("integrations/**/*.md")]
)
WITH_EXAMPLES = [
    page for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))] if "```python" in page.read_text()
]

FENCE = re.compile(r"^ *(```+)(\w*)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
NOT_RUN = re.compile(r"<!-- (needs a GPU|run by (tests/python/\w+\.py)) -->")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """Without examples and inline code, which may look like links and headings."""
    kept, inside = [], ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        if fence and not inside:
            inside = fence[1]
        elif fence and fence[1] == inside:
            inside = ""
        elif not inside:
            kept.append(re.sub(r"`[^`]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), line))
    return "\n".join(kept)


# --- examples


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
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """One after the other, as they stand, in a process and a folder of their own."""
    if page.name == "transformers.md":
        pytest.importorskip("transformers")
    source = python_lines(page.read_text())
    assert source.strip()
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(source)
    code = f"""
    import runpy
    os.chdir({str(tmp_path)!r})
    os.environ.update(HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
    runpy.run_path({str(script)!r}, run_name="__main__")
    """
    run_snippet(code, timeout=280).check()


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_what_is_not_run_says_why(page: Path) -> None:
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r" *```py$", line):
            reason = NOT_RUN.fullmatch(lines[number - 1].strip())
            assert reason, f"{name(page)}:{number + 1}: a ```py example needs a reason before it"
            assert reason[2] is None or (ROOT / reason[2]).exists(), reason[0]


# --- links


def headings(page: Path) -> set[str]:
    """The anchors of a page, as MkDocs and GitHub make them."""
    found = set()
    for line in prose(page.read_text()).splitlines():
        if match := re.match(r"#+ (.+)", line):
            text = re.sub(r"[^\w\s-]", "", match[1].strip().lower())
            found.add(re.sub(r"[\s]+", "-", text))
    return found


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(prose(page.read_text())):
        if re.match(r"https?://", link):
            assert re.match(r"https://[\w.-]+\.\w+(/|$)", link), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(link)
        elif anchor and anchor not in headings(target):
            wrong.append(f"{link}: no such heading")
    assert not wrong, name(page)


def test_the_site_has_every_page() -> None:
    yaml = pytest.importorskip("yaml")
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = set(re.findall(r"[\w./-]+\.md", json.dumps(navigation)))
    generated = {"index.md", "contributing.md", "changes.md", "design.md", "security.md"}
    assert pages == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | generated


# --- pictures


def test_pictures_are_what_the_code_draws(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "support" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = pictures
    try:
        spec.loader.exec_module(pictures)
        pictures.main(tmp_path)
    finally:
        del sys.modules["pictures"]
    drawn = sorted(tmp_path.iterdir())
    assert [picture.name for picture in drawn] == sorted(p.name for p in (DOCS / "img").glob("*.svg"))
    for picture in drawn:
        assert picture.read_text() == (DOCS / "img" / picture.name).read_text(), (
            f"{picture.name}: run python docs/support/pictures.py and look at it"
        )


# --- claims


def test_every_invariant_is_explained() -> None:
    told = re.findall(r"^\| (I\d+) \|", (DOCS / "guarantees.md").read_text(), re.MULTILINE)
    held = re.findall(r"^\| (I\d+) ", (ROOT / "csrc" / "DESIGN.md").read_text(), re.MULTILINE)
    assert told == held and len(told) >= 16


def test_every_error_has_a_remedy() -> None:
    text = (DOCS / "errors.md").read_text()
    for error in set(errors.__all__) - {"VTensorError"}:
        assert f"| `{error}` |" in text


def test_every_command_is_described(capsys) -> None:
    from vtensor.cli import main

    main(["--help"])
    commands = re.search(r"\{([\w,-]+)\}", capsys.readouterr().out)[1].split(",")
    text = (DOCS / "command-line.md").read_text()
    for command in commands:
        assert f"python -m vtensor {command}" in text


def test_figures_of_the_readme_are_those_of_a_run() -> None:
    """Its table against the alternatives, and the results of `make bench` that it names."""
    readme = (ROOT / "README.md").read_text()
    named = re.search(r"\((benchmarks/results/[\w-]+)\.txt\)", readme)[1]
    results = json.loads((ROOT / f"{named}.json").read_text())
    figures = {
        (figure["name"], figure["against"]): figure
        for benchmark in results["benchmarks"]
        for figure in benchmark["figures"]
    }

    def milliseconds(figure: dict, whose: str) -> str:
        return f"{1e3 * figure[whose]['median']:.3g} ms"

    table = {
        row.split("|")[1].strip(): row.split("|")[2].strip() for row in re.findall(r"^\|.*\|$", readme, re.M)
    }
    step = "append and SDPA at 8,192 tokens"
    assert table["a `VTensor`"] == milliseconds(figures[step, "torch.cat"], "ours")
    for row, against in (
        ("concatenated (`torch.cat`, `DynamicCache`)", "torch.cat"),
        ("preallocated (`StaticCache`)", "preallocated, the limit"),
        ("paged, gathered for each call", "paged, gathered each step"),
    ):
        assert table[row] == milliseconds(figures[step, against], "baseline")
    fork = figures["fork, 1 ways", "clone()"]
    told = re.search(r"takes ([\d.]+ ms),\s+copying it ([\d.]+ ms)", readme)
    assert float(told[1].split()[0]) == round(1e3 * fork["ours"]["median"], 2)
    assert told[2] == milliseconds(fork, "baseline")

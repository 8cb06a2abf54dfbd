"""What a release rests on: what scripts/release.sh refuses, and the files for hosted services."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import vtensor
from support import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that has what release.sh looks at first."""
    for file in ("scripts/lib.sh", "scripts/release.sh", "vtensor/__init__.py", "CHANGELOG.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {vtensor.__version__} (unreleased)\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True)


def release(folder: Path, *arguments: str) -> str:
    """The error of release.sh, which must have made nothing."""
    done = subprocess.run(
        ["bash", "scripts/release.sh", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and not (folder / "build").exists()
    return done.stderr


def test_a_release_has_one_version(checkout: Path) -> None:
    assert f"vtensor/__init__.py says {vtensor.__version__}, not 9.9.9" in release(checkout, "9.9.9")


def test_a_release_is_of_a_commit(checkout: Path) -> None:
    (checkout / "vtensor/new.py").touch()
    assert "the tree has changes" in release(checkout, vtensor.__version__)


def test_a_release_is_in_the_changelog(checkout: Path) -> None:
    assert "give the date of the release" in release(checkout, vtensor.__version__, "--tag")
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 0.0.1 (2020-01-01)\n")
    git(checkout, "commit", "-qam", "old")
    assert f"begin it with '## {vtensor.__version__} (date)'" in release(checkout, vtensor.__version__)


def test_a_version_is_released_once(checkout: Path) -> None:
    git(checkout, "tag", f"v{vtensor.__version__}")
    assert "give the date of the release" in release(checkout, vtensor.__version__)
    git(checkout, "commit", "-qm", "later", "--allow-empty")
    assert "is another commit" in release(checkout, vtensor.__version__)


def test_the_version_stands_in_one_place() -> None:
    for file in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "CMakeLists.txt"):
        assert vtensor.__version__ not in (ROOT / file).read_text(), file


def test_actions_are_pinned_by_hash_and_permissions_are_each_jobs_own() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "gpu", "wheels"]
    for path in WORKFLOWS:
        text = path.read_text()
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {}, path.name
        for name, job in workflow["jobs"].items():
            assert job["permissions"] and job["timeout-minutes"] <= 120, f"{path.name}: {name}"
        for action in re.findall(r"uses: (.+)", text):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action), f"{path.name}: {action}"

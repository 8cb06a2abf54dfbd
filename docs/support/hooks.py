"""MkDocs hooks: pages that are files of the repository, with their links as the site needs them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "csrc/DESIGN.md": "design.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them, and the files that they link to."""
    for source, page in PAGES.items():
        text = _LINK.sub(_as_of_the_site, (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
        for match in _LINK.finditer(text):
            if files.get_file_from_path(match[2]) is None and (ROOT / match[2]).is_file():
                files.append(File.generated(config, match[2], abs_src_path=str(ROOT / match[2])))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Links from docs/ to those files."""
    folder = posixpath.dirname(page.file.src_uri)  # type: ignore[attr-defined]

    def resolved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        return match[0] if path.startswith("docs/") else match[1] + _target(path, folder)

    return _LINK.sub(resolved, markdown)


def _as_of_the_site(match: re.Match[str]) -> str:
    return match[1] + _target(posixpath.normpath(match[2]), "")


def _target(path: str, folder: str) -> str:
    """The link from a page in `folder` of the site to a file of the repository."""
    if path in PAGES:
        return posixpath.relpath(PAGES[path], folder or ".")
    if path.startswith("docs/"):
        return posixpath.relpath(path.removeprefix("docs/"), folder or ".")
    return path  # not in the site: MkDocs warns, and warnings are errors

"""Draws the pictures of docs/how-it-works.md from what `VTensor.pages()` says of real tensors.

    python docs/support/pictures.py [FOLDER]     docs/img unless given

A test draws them again and compares.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

import vtensor

CELL, GAP, LEFT, TOP = 34, 3, 210, 34
RESERVED = 14  # slots that a strip shows
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #263238 }
  .title { font-weight: 600 } .note { fill: #607d8b; font-size: 12px } .id { text-anchor: middle; fill: #fff }
  .free { fill: none; stroke: #b0bec5; stroke-dasharray: 3 3 }
  .mapped { fill: #00798c } .shared { fill: #e08e1b } .private { fill: #b5495b } .pinned { fill: #7a6fa5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #eceff1 } .note { fill: #90a4ae } .free { stroke: #607d8b }
  }
"""


@dataclass
class Picture:
    """Strips of page slots, one below the other."""

    title: str
    lines: list[str] = field(default_factory=list)
    strips: int = 0

    def strip(self, label: str, t: vtensor.VTensor, note: str = "") -> None:
        """One row of slots: the pages of a tensor of one row, by their place in its address range."""
        y = TOP + self.strips * (CELL + 26)
        self.strips += 1
        self.lines.append(f'<text x="12" y="{y + 22}">{label}</text>')
        records = {record.index: record for record in t.pages()}
        for slot in range(RESERVED):
            x = LEFT + slot * (CELL + GAP)
            record = records.get(slot)
            state = record.state if record else "free"
            self.lines.append(
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4" class="{state}"/>'
            )
            if record:
                told = "*" if record.page_id < 0 else record.page_id
                self.lines.append(f'<text x="{x + CELL // 2}" y="{y + 22}" class="id">{told}</text>')
        if note:
            self.lines.append(f'<text x="{LEFT}" y="{y + CELL + 16}" class="note">{note}</text>')

    def text(self) -> str:
        width = LEFT + RESERVED * (CELL + GAP) + 12
        height = TOP + self.strips * (CELL + 26) + 8
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{self.title}">'
        )
        title = f'<text x="12" y="20" class="title">{self.title}</text>'
        return "\n".join([head, f"<style>{STYLE}</style>", title, *self.lines, "</svg>"]) + "\n"


def _pool() -> vtensor.Pool:
    return vtensor.Pool("cpu", page_size=4096, budget=1 << 20, prefetch=0)


def _tensor(pool: vtensor.Pool, pages: int) -> vtensor.VTensor:
    """Half a page a position."""
    t = vtensor.empty(
        0, 2048, grow_dim=0, capacity=2 * RESERVED, dtype=torch.uint8, pool=pool, when_full="raise"
    )
    return t.append(torch.ones(2 * pages, 2048, dtype=torch.uint8))


def growth() -> Picture:
    picture = Picture(
        "A tensor grows in place: each square is a slot for one page, its number the page behind it"
    )
    with _pool() as pool:
        t = _tensor(pool, 0)
        picture.strip("empty(...)", t, "addresses for 14 pages are reserved; they cost no memory")
        t.extend(5)
        picture.strip("extend(5)", t, "three pages are mapped, the last one half used")
        t.extend(1)
        picture.strip("extend(1)", t, "inside a mapped page: no driver call")
        t.extend(8)
        picture.strip("extend(8)", t, "four more, behind the first: the address stays, nothing is copied")
        t.shrink(6, front=True)
        picture.strip(
            "shrink(6, front=True)", t, "three pages go back to the pool; what is left stays where it is"
        )
    return picture


def fork() -> Picture:
    picture = Picture("A fork shares pages; a write takes one page, for the one who writes")
    with _pool() as pool:
        t = _tensor(pool, 6)
        picture.strip("t", t)
        child = t.fork()
        picture.strip(
            "child = t.fork()", child, "other addresses, the same pages: none is taken, none is copied"
        )
        child.unshare(4, 6)
        child[4:6].fill_(7)
        picture.strip("child, written to", child, "page 2 was copied for it")
        picture.strip("t", t, "has what it had")
    return picture


def views() -> Picture:
    picture = Picture("A view keeps the pages that it could see, and no others")
    with _pool() as pool:
        t = _tensor(pool, 3)
        view = t[:]
        t.extend(8)
        picture.strip("view = t[:], extend(8)", t, "the view covers the first three pages")
        t.truncate(0)
        picture.strip(
            "t.truncate(0)", t, "three stay mapped for the view (pinned); the others went back to the pool"
        )
        del view
        picture.strip("del view", t)
    return picture


PICTURES = {"growth.svg": growth, "fork.svg": fork, "views.svg": views}


def main(folder: Path) -> None:
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw().text())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "img")

"""Hypothesis strategies for tensors that grow, and for the requests of a cache. Needs hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import vtensor
from vtensor.testing.model import family_bytes

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "[vtensor.testing.strategies] hypothesis is not installed: pip install hypothesis", name=missing.name
    ) from missing

__all__ = [
    "Amount",
    "Layout",
    "amounts",
    "failures",
    "forks",
    "growths",
    "layouts",
    "prompts",
    "tensors",
]

Amount = tuple[str, int]
"""How far to grow or shrink, by a name and a count: see :func:`amounts`."""

# (dtype, dims of a position): 512, 154, 1, 1032, 1000, 8200 and 2,000 bytes; pages are 4 KiB and more.
_ITEMS = [
    (torch.float32, (8, 16)),
    (torch.float16, (7, 11)),
    (torch.uint8, ()),
    (torch.complex64, (129,)),
    (torch.float8_e4m3fn, (1000,)),
    (torch.int64, (1025,)),
    (torch.bfloat16, (10, 100)),
]
_ROWS: list[tuple[int, ...]] = [(), (1,), (3,), (2, 2)]
_AMOUNTS = ["none", "one", "few", "fill", "over", "pages", "pages", "rest", "beyond"]
_PROMPTS = [[7] * 40, [7] * 33 + [8] * 20, [7] * 16 + [9] * 70, list(range(60))]


@dataclass(frozen=True)
class Layout:
    """What a tensor looks like apart from its length: shape ``[*rows, length, *item]``."""

    dtype: torch.dtype
    rows: tuple[int, ...]
    item: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of a position in one row."""
        return self.dtype.itemsize * torch.Size(self.item).numel()


def layouts() -> st.SearchStrategy[Layout]:
    """Dtypes of 1 to 8 bytes, up to four rows, and positions of 1 to 8,200 bytes."""
    return st.builds(
        lambda kind, rows: Layout(kind[0], rows, kind[1]), st.sampled_from(_ITEMS), st.sampled_from(_ROWS)
    )


def amounts() -> st.SearchStrategy[Amount]:
    """How far to grow: no position, one, a few, to the end of a page, one more, some pages, all the room that
    there is, and more than that. ``TensorMachine.positions`` says what it means for a tensor."""
    return st.tuples(st.sampled_from(_AMOUNTS), st.integers(1, 4))


def failures(most: int = 7) -> st.SearchStrategy[int | None]:
    """None, or how many driver calls pass before one is refused: for :func:`~vtensor.testing.fail_after`."""
    return st.one_of(st.none(), st.none(), st.integers(0, most))


def prompts() -> st.SearchStrategy[list[int]]:
    """Token ids of 40 to 86 tokens that begin alike for 16, 33 or no tokens, so that a cache finds prefixes,
    and finds them in part."""
    return st.sampled_from(_PROMPTS)


def growths() -> st.SearchStrategy[int]:
    """Tokens that a request grows by in one step: mostly one, as when it decodes; none; up to 40 of a prompt
    or of drafts."""
    return st.sampled_from([0, 1, 1, 1, 2, 5, 17, 40])


@st.composite
def tensors(
    draw: st.DrawFn,
    pool: vtensor.Pool,
    layout: Layout | None = None,
    most_pages: int = 4,
) -> vtensor.VTensor:
    """A tensor as a program may have left it: grown in steps, shrunk at either end.

    What the code under test makes of it has to be what it makes of ``t.clone()``, a plain tensor. Its bytes
    are arbitrary, not zero, and without NaN.

    Args:
        pool: where its pages come from; it needs ``most_pages`` and one of them for each row.
        layout: one of :func:`layouts` unless given.
        most_pages: in each row.

    Raises:
        OutOfPages: the pool has fewer.
    """
    layout = draw(layouts()) if layout is None else layout
    capacity = max(1, most_pages * pool.page_size // layout.item_bytes)
    t = vtensor.empty(
        *layout.rows,
        0,
        *layout.item,
        grow_dim=len(layout.rows),
        capacity=capacity,
        dtype=layout.dtype,
        pool=pool,
    )
    seed = draw(st.integers(0, 2**16))
    for step in draw(st.lists(st.floats(0, 1), max_size=4)):
        _append(t, layout, int(step * (capacity - t.length)), seed)
    front, back = draw(st.integers(0, t.length)), draw(st.integers(0, 4))
    t.shrink(front // 2, front=True).shrink(min(back, t.length))
    return t


@st.composite
def forks(
    draw: st.DrawFn, pool: vtensor.Pool, layout: Layout | None = None, most_pages: int = 4
) -> list[vtensor.VTensor]:
    """Two to four tensors of the same content that share all their pages: one of :func:`tensors`, and its
    forks.

    What the code under test writes through one of them must not show in another (I6). Arguments and errors
    are those of :func:`tensors`; each page that is written to takes one more of the pool.
    """
    t = draw(tensors(pool, layout, most_pages))
    return [t, *(t.fork() for _ in range(draw(st.integers(1, 3))))]


def _append(t: vtensor.VTensor, layout: Layout, positions: int, seed: int) -> None:
    count = torch.Size(layout.rows).numel() * positions * layout.item_bytes
    data = family_bytes(1 + seed % 15, count, seed)
    t.append(data.view(layout.dtype).reshape(*layout.rows, positions, *layout.item).to(t.device))

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
"""A number of positions to grow or shrink by, as a name and a count. See :func:`amounts`."""

# (dtype, dims of a position): 512, 154, 1, 1032, 1000, 8200 and 2,000 bytes. Pages have 4 KiB or more.
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
    """The dtype and the dimensions of a tensor except its length: shape ``[*rows, length, *item]``."""

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
    """Numbers of positions to grow by: none, one, a few, up to the end of a page, one more than that, some
    pages, all the room, and more than the room. ``TensorMachine.positions`` translates them for a tensor."""
    return st.tuples(st.sampled_from(_AMOUNTS), st.integers(1, 4))


def failures(most: int = 7) -> st.SearchStrategy[int | None]:
    """None, or the number of driver calls that pass before one is refused by
    :func:`~vtensor.testing.fail_after`."""
    return st.one_of(st.none(), st.none(), st.integers(0, most))


def prompts() -> st.SearchStrategy[list[int]]:
    """Prompts of 40 to 86 token ids with common prefixes of 0, 16 or 33 tokens, so that a cache finds
    prefixes in whole and in part."""
    return st.sampled_from(_PROMPTS)


def growths() -> st.SearchStrategy[int]:
    """Tokens that a request grows by in one step: none, one as in decoding (most often), or up to 40 of a
    prompt or of drafts."""
    return st.sampled_from([0, 1, 1, 1, 2, 5, 17, 40])


@st.composite
def tensors(
    draw: st.DrawFn,
    pool: vtensor.Pool,
    layout: Layout | None = None,
    most_pages: int = 4,
) -> vtensor.VTensor:
    """A tensor in a state that a program may leave it in: grown in steps, shrunk at either end.

    The code under test must give the same result for it as for ``t.clone()``, a plain tensor. Its bytes are
    arbitrary, not zero, and make no NaN.

    Args:
        pool: the pool of the pages. It needs ``most_pages + 1`` for each row.
        layout: its dtype and dimensions. Defaults to one of :func:`layouts`.
        most_pages: the most pages of data in each row.

    Raises:
        OutOfPages: if the pool has fewer pages.
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
        positions = int(step * (capacity - t.length))
        count = torch.Size(layout.rows).numel() * positions * layout.item_bytes
        data = family_bytes(1 + seed % 15, count, seed).view(layout.dtype)
        t.append(data.reshape(*layout.rows, positions, *layout.item).to(t.device))
    front, back = draw(st.integers(0, t.length)), draw(st.integers(0, 4))
    t.shrink(front // 2, front=True).shrink(min(back, t.length))
    return t


@st.composite
def forks(
    draw: st.DrawFn, pool: vtensor.Pool, layout: Layout | None = None, most_pages: int = 4
) -> list[vtensor.VTensor]:
    """Two to four tensors that share all their pages: one of :func:`tensors`, and forks of it.

    What the code under test writes through one of them must not show in another (I6). Arguments and errors
    are those of :func:`tensors`. Each page written to takes one more from the pool.
    """
    t = draw(tensors(pool, layout, most_pages))
    return [t, *(t.fork() for _ in range(draw(st.integers(1, 3))))]

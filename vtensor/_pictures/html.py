"""Pictures of tensors, pools and caches in notebooks: inline SVG, and the same in words.

They are drawn from page tables and counts. Drawing reads no byte of a tensor and waits for no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

from vtensor._base.units import byte_text
from vtensor._pictures.pages import COLOURS, MEANINGS, PageRun, TensorPages, cells, pages_of, pages_of_arena
from vtensor.arena import Arena, ArenaStats
from vtensor.errors import Closed, VTensorError
from vtensor.kv import KVCache
from vtensor.pool import Pool, PoolStats
from vtensor.tensor import VTensor

_MOST_CELLS = 240  # in a strip
_MOST_STRIPS = 8  # rows of a tensor, slots of a cache
_WIDTH, _HEIGHT = 720, 18  # of a strip, in SVG units
_TAIL = 90  # the part of the width for reserved slots that are not drawn to scale

# Text and lines have the colour of the text around, so that they suit any theme. So do the pages' colours.
_STYLE = (
    ".vtensor{padding:2px 6px;font:13px/1.5 var(--jp-ui-font-family,system-ui,sans-serif)}"
    ".vtensor .vt-faint{opacity:0.75}"
    ".vtensor svg{display:block;width:100%;max-width:720px;height:auto;margin:3px 0}"
    ".vtensor .vt-what{margin-top:5px}"
    ".vtensor .vt-key{display:inline-block;box-sizing:border-box;width:10px;height:10px;margin:0 4px 0 0;"
    "border-radius:2px}"
    ".vtensor .vt-item{margin-right:14px;white-space:nowrap}"
)
_LINE = 'stroke="currentColor" stroke-opacity="0.3"'
_EMPTY = f'fill="currentColor" fill-opacity="0.08" {_LINE}'


def bundle(shown: VTensor | Pool | Arena | KVCache) -> dict[str, str]:
    """The ``text/plain`` and ``text/html`` of an object."""
    kind, picture = next((kind, draw) for kind, draw in _PICTURES.items() if isinstance(shown, kind))
    name = kind.__name__ if kind is VTensor else f"vtensor.{kind.__name__}"
    try:
        if shown.closed and not isinstance(shown, Pool):
            raise Closed
        return picture(shown)
    except Closed:  # another thread may have closed it
        return _bundle(f"{name}, closed", "its pages and addresses were given back")
    except VTensorError as error:
        return _bundle(name, str(error))


def _tensor(tensor: VTensor) -> dict[str, str]:
    """A VTensor: each row's pages by state."""
    pages = pages_of(tensor)
    shape = "[" + ", ".join(map(str, tensor.shape)) + "]"
    name = f"VTensor {shape} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    facts = (
        f"{tensor.length:,} of {tensor.capacity:,} positions along dim {tensor.grow_dim}, "
        f"{byte_text(tensor.numel() * tensor.element_size())} of data, "
        f"{byte_text(tensor.nbytes_mapped)} mapped in pages of {byte_text(pages.page_size)}, "
        f"{byte_text(tensor.nbytes_reserved)} of addresses"
    )
    return _bundle(name, facts, _tensor_strips(pages), _tensor_key(pages))


def _pool(pool: Pool) -> dict[str, str]:
    """A Pool: its budget, and what is mapped."""
    stats = pool.stats()
    size = stats.page_size
    state = ", closed" if pool.closed else ""
    if stats.nbytes_asleep:
        state += f", {byte_text(stats.nbytes_asleep)} asleep"
    name = f"vtensor.Pool on {pool.device}{state}"
    facts = (
        f"{byte_text(stats.pages_used * size)} of {byte_text(stats.budget)} used "
        f"in pages of {byte_text(size)}, open tensors: {stats.tensors:,}, "
        f"{byte_text(stats.nbytes_reserved)} of addresses"
    )
    kept = min(stats.pages_spare, stats.pages_free)
    budget = [("used", stats.pages_used, COLOURS["mapped"]), ("free and kept", kept, COLOURS["cached"])]
    mapped = _states("active", stats)
    drawn = _proportions("memory, of the budget", budget, stats.budget // size)
    drawn += _key([*budget, ("free", stats.pages_free - kept, None)])
    drawn += _proportions("page table entries: a page that two tensors share counts twice", mapped)
    return _bundle(name, facts, drawn, _key(mapped))


def _arena(arena: Arena) -> dict[str, str]:
    """An Arena: its range in lines, each page by state."""
    stats, pages = arena.stats(), pages_of_arena(arena, _MOST_STRIPS)
    facts = (
        f"{byte_text(stats.nbytes_mapped)} mapped of {byte_text(stats.nbytes_reserved)} of addresses, "
        f"in pages of {byte_text(stats.page_size)}"
    )
    key = _key(_states("mapped", stats))
    return _bundle("vtensor.Arena", facts, _tensor_strips(pages, "line"), key)


def _cache(cache: KVCache) -> dict[str, str]:
    """A KVCache: its memory, and each slot's tokens."""
    stats, lengths = cache.stats(), cache.lengths
    facts = (
        f"{stats.tokens:,} tokens in {stats.slots_used} of {cache.max_batch} slots, "
        f"{byte_text(stats.nbytes_mapped)} mapped for {byte_text(stats.nbytes_live)} of data "
        f"({100 * stats.waste:.1f}% more), {stats.page_tokens:,} tokens a page, "
        f"{stats.prefix_tokens:,} tokens of published prefixes"
    )
    private = max(0, stats.pages_used - stats.pages_shared - stats.pages_cached)
    parts = [
        ("of one slot", private, COLOURS["mapped"]),
        ("shared", stats.pages_shared, COLOURS["shared"]),
        ("cached", stats.pages_cached, COLOURS["cached"]),
    ]
    drawn = _proportions("pages in use", parts) + _key(parts)
    return _bundle("vtensor.KVCache", facts, drawn, _slots(lengths, max(1, stats.page_tokens)))


_PICTURES: dict[type, Callable[[Any], dict[str, str]]] = {
    VTensor: _tensor,
    Pool: _pool,
    Arena: _arena,
    KVCache: _cache,
}


# -- parts of the pictures


def _bundle(name: str, facts: str, *drawn: str) -> dict[str, str]:
    html = (
        f'<div class="vtensor"><style>{_STYLE}</style><div><b>{escape(name)}</b></div>'
        f'<div class="vt-faint">{escape(facts)}</div>{"".join(drawn)}</div>'
    )
    return {"text/plain": f"<{name}: {facts}>", "text/html": html}


def _states(active: str, stats: PoolStats | ArenaStats) -> list[tuple[str, int, str]]:
    """Mapped pages by state; those that are needed under the name ``active``."""
    return [
        (active, stats.pages_active, COLOURS["mapped"]),
        ("prefetched", stats.pages_prefetched, COLOURS["prefetched"]),
        ("cached", stats.pages_cached, COLOURS["cached"]),
        ("pinned", stats.pages_pinned, COLOURS["pinned"]),
    ]


def _tensor_strips(pages: TensorPages, row: str = "row") -> str:
    shown = pages.shown()
    alike = [
        (runs, len(list(group)))
        for runs, group in groupby(cells(row, shown, _MOST_CELLS) for row in pages.rows)
    ]
    drawn, first = [], 0
    for runs, count in alike[:_MOST_STRIPS]:
        name = f"{row} {first}" if count == 1 else f"{row}s {first} to {first + count - 1}, alike"
        if not pages.exact:
            name = "each row"
        drawn.append(_strip(name if len(pages.rows) > 1 or not pages.exact else "", runs, shown, pages.slots))
        first += count
    if first < len(pages.rows):
        drawn.append(f'<div class="vt-faint">and {len(pages.rows) - first:,} {row}s more</div>')
    return "".join(drawn)


def _strip(name: str, runs: Sequence[PageRun], shown: int, slots: int) -> str:
    """A row's pages: the first `shown` slots to scale, and a tail for the rest of `slots`."""
    scale = (_WIDTH - (_TAIL if slots > shown else 0)) / max(1, shown)
    shapes = []
    for run in runs:
        what = (
            f"page {run.start:,}" if run.stop == run.start + 1 else f"pages {run.start:,} to {run.stop - 1:,}"
        )
        colour = None if run.state == "reserved" else COLOURS[run.state]
        width = (run.stop - run.start) * scale
        shapes.append(_box(run.start * scale, width, colour, f"{what}: {run.state}"))
    if scale >= 5:  # room for lines between pages
        shapes += [
            f'<path {_LINE} stroke-width="0.7" d="M{at * scale:.1f} 1V{_HEIGHT - 1}"/>'
            for run in runs
            for at in range(run.start + 1, run.stop)
        ]
    if slots > shown:
        start = shown * scale
        shapes.append(
            f'<rect x="{start:.1f}" y="0.5" width="{_TAIL - 0.5:.1f}" height="{_HEIGHT - 1}" {_EMPTY} '
            'stroke-dasharray="3 3">'
            f"<title>pages {shown:,} to {slots - 1:,}: reserved, not to scale</title></rect>"
        )
    words = ", ".join(f"{run.state} {run.start:,} to {run.stop - 1:,}" for run in runs[:12])
    more = f" and {len(runs) - 12} runs more" if len(runs) > 12 else ""
    begin = f"{name}: " if name else ""
    return _svg(name, f"{begin}pages {words}{more}; {slots:,} reserved in all", shapes)


def _tensor_key(pages: TensorPages) -> str:
    if not pages.exact:
        return (
            '<div class="vt-faint">too many pages to look at each: drawn from lengths and counts, '
            "sharing not shown</div>"
        )
    counts = pages.counts()
    return _key([(state, n, COLOURS[state] if state != "reserved" else None) for state, n in counts.items()])


def _key(parts: Iterable[tuple[str, int, str | None]]) -> str:
    items = []
    for name, pages, colour in parts:
        style = f"background:{colour}" if colour else "border:1px solid;opacity:0.4"
        hint = f' title="{escape(MEANINGS[name])}"' if name in MEANINGS else ""
        items.append(
            f'<span class="vt-item"{hint}><span class="vt-key" style="{style}"></span>'
            f"{escape(name)} {pages:,}</span> "
        )
    return f"<div>pages: {''.join(items)}</div>"


def _proportions(what: str, parts: Sequence[tuple[str, int, str]], whole: int | None = None) -> str:
    """The parts of `whole`, side by side. `whole` defaults to their sum."""
    whole = max(1, sum(pages for _, pages, _ in parts), whole or 0)
    shapes, at = [_box(0, _WIDTH, None)], 0.0
    for name, pages, colour in parts:
        if pages > 0:
            width = max(2.0, pages / whole * _WIDTH)  # so that a small part stays visible
            shapes.append(_box(min(at, _WIDTH - width), width, colour, f"{name}: {pages:,}"))
            at += width
    words = ", ".join(f"{pages:,} {name}" for name, pages, _ in parts)
    return _svg(what, f"{what}: {words}, of {whole:,} pages", shapes)


def _slots(lengths: Sequence[int], page_tokens: int) -> str:
    used = [(slot, length) for slot, length in enumerate(lengths) if length > 0]
    longest = max((length for _, length in used), default=1)
    scale = _WIDTH / (-(-longest // page_tokens) * page_tokens)
    drawn = []
    for slot, length in used[:_MOST_STRIPS]:
        pages = -(-length // page_tokens)
        shapes = [
            _box(0, _WIDTH, None),
            _box(0, pages * page_tokens * scale, COLOURS["prefetched"], "the rest of its last page"),
            _box(0, length * scale, COLOURS["mapped"], f"{length:,} tokens"),
        ]
        words = f"slot {slot}: {length:,} tokens, {pages:,} pages deep"
        drawn.append(_svg(words, words, shapes))
    if len(used) > _MOST_STRIPS:
        drawn.append(f'<div class="vt-faint">and {len(used) - _MOST_STRIPS:,} slots more</div>')
    return "".join(drawn)


def _box(x: float, width: float, colour: str | None, hint: str = "") -> str:
    """A rectangle of full height."""
    inner = f"<title>{hint}</title>" if hint else ""
    look = f'fill="{colour}"' if colour else _EMPTY
    return f'<rect x="{x:.1f}" y="0.5" width="{width:.1f}" height="{_HEIGHT - 1}" {look}>{inner}</rect>'


def _svg(label: str, words: str, shapes: Iterable[str]) -> str:
    """Shapes below their label, and the same in words."""
    words = escape(words)
    above = f'<div class="vt-faint vt-what">{escape(label)}</div>' if label else ""
    return (
        f'{above}<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{words}"><title>{words}</title>{"".join(shapes)}</svg>'
    )

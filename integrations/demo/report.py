"""The demo's table and its picture."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from vtensor import VTensorError

from ..transformers import VTensorLayer
from .measure import LIMIT, OURS, CacheRun, Check, Row, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 1 << 20
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11, "fontweight": "bold"}
LINES = {  # color and label
    "DynamicCache": ("#d1495b", "DynamicCache, with the copy beside it"),
    "StaticCache": ("#7a7f87", "StaticCache, given the final length"),
    OURS: ("#00798c", OURS),
}

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "cache": lambda row: row["cache"],
    "prefill s": lambda row: f"{row['prefill_seconds']:.1f}",
    "decode tokens/s": lambda row: f"{row['decode_tokens_per_second']:.1f}",
    "copied for growth": lambda row: f"{row['bytes_copied_for_growth'] / MIB:,.1f} MiB",
    "KV mapped": lambda row: f"{row['kv_mapped'] / MIB:.1f} MiB",
    "KV needed": lambda row: f"{row['kv_needed'] / MIB:.1f} MiB",
    "over": lambda row: f"{row['over_percent']:.2f} %",
    "peak KV": lambda row: f"{row['kv_peak'] / MIB:.1f} MiB",
}


def table(rows: list[Row]) -> str:
    """One line for each cache."""
    cells = [list(_COLUMNS), *([show(row) for show in _COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def notes(settings: Settings, rows: list[Row], checked: Check) -> str:
    """The conclusions from the figures, and the checks behind them."""
    speed = {row["cache"]: row["decode_tokens_per_second"] for row in rows}
    over_dynamic = speed[OURS] / speed["DynamicCache"]
    to_limit = speed[OURS] / speed[LIMIT]
    difference = max(checked.largest_difference.values())
    return (
        f"{OURS} decodes {over_dynamic:.2f} times as fast as DynamicCache and at {100 * to_limit:.1f} % of "
        f"the limit.\n"
        f"'{LIMIT}' is that limit: plain tensors of exactly the final length, known in advance, and exact "
        f"views of them.\nStaticCache gets the final length too; {OURS} reserves addresses for "
        f"{settings.max_len:,} tokens.\n"
        f"All gave the same {settings.new} tokens, {checked.distinct_tokens} of them distinct; "
        f"{OURS}'s logits are DynamicCache's bit for bit.\n"
        f"The best logit led by at least {checked.smallest_margin:.1e}; "
        f"no logit of any cache differed by more than {difference:.1e}."
    )


def save_picture(path: Path, runs: list[CacheRun], rows: list[Row], settings: Settings) -> None:
    """Draws the page map and the memory over time. The file is written at the end, in one call.

    Raises:
        VTensorError: if the file cannot be written.
    """
    (ours,) = (run for run in runs if run.name == OURS)
    figure = Figure(figsize=(12, 8), layout="constrained", facecolor="white")
    axes = figure.subplot_mosaic([["pages", "pages"], ["memory", "generation"]], height_ratios=[1.25, 1])
    _draw_pages(axes["pages"], ours, settings)
    _draw_memory(axes["memory"], runs)
    token_bytes = rows[0]["kv_needed"] // settings.final_length
    _draw_memory_of_generation(axes["generation"], ours, settings, token_bytes)
    for name in ("memory", "generation"):
        axes[name].set(xlabel="tokens in the cache", ylabel="MiB", axisbelow=True)
        axes[name].grid(axis="y", color="#eceff1")
    for panel in axes.values():
        panel.spines[["top", "right"]].set_visible(False)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=110)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.getvalue())
    except OSError as error:
        raise VTensorError(f"[demo] no picture ({error}): name another file with --picture") from error


def _draw_pages(axes: Axes, ours: CacheRun, settings: Settings) -> None:
    import numpy as np

    owners = [
        (f"layer {index} {name}", owner)
        for index, layer in enumerate(ours.cache.layers)
        if isinstance(layer, VTensorLayer) and layer.owners is not None
        for name, owner in zip("KV", layer.owners, strict=True)
    ]
    heads = owners[0][1].shape[1]
    page_tokens = settings.page_size / (owners[0][1].shape[-1] * owners[0][1].element_size())
    pages = max(record.index for _, owner in owners for record in owner.pages()) + 1
    shown = pages + max(2, pages // 12)
    grid = np.full((heads * len(owners), shown), np.nan)
    for number, (_, owner) in enumerate(owners):
        for record in owner.pages():
            grid[number * heads + record.row, record.index] = record.page_id
    axes.set_facecolor("#eceff1")
    image = axes.imshow(
        grid,
        aspect="auto",
        cmap="viridis",
        interpolation="nearest",
        extent=(0, shown * page_tokens, grid.shape[0], 0),
    )
    for row in range(1, grid.shape[0]):
        axes.axhline(row, color="white", linewidth=0.4 if row % heads else 2.5)
    axes.axvline(settings.prompt, color="white", linewidth=1.2, linestyle=(0, (4, 3)))
    read = f"{settings.prompt:,} tokens read"
    axes.text(settings.prompt, -0.5, read, ha="right", va="bottom", color="#546e7a")
    axes.set_yticks([(number + 0.5) * heads for number in range(len(owners))], [name for name, _ in owners])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("tokens")
    axes.text(
        (pages + shown) / 2 * page_tokens,
        grid.shape[0] / 2,
        f"reserved up to {settings.max_len:,} tokens, no memory",
        rotation=90,
        ha="center",
        va="center",
        color="#546e7a",
        fontsize=9,
    )
    axes.set_title(
        f"Pages of {settings.page_size // 1024} KiB behind {OURS}, a row for each of {heads} heads", **TITLE
    )
    axes.figure.colorbar(image, ax=axes, pad=0.01, label="page number in the pool")


def _draw_memory(axes: Axes, runs: list[CacheRun]) -> None:
    for run in runs:
        if run.name in LINES:
            color, label = LINES[run.name]
            start = run.samples[0].mapped if run.name == "StaticCache" else 0  # takes all memory at once
            tokens = [0, *(sample.tokens for sample in run.samples)]
            mib = [start / MIB, *(sample.peak / MIB for sample in run.samples)]
            axes.plot(tokens, mib, color=color, linewidth=2, label=label)
    axes.set_title("KV memory while the text is read and continued", **TITLE)
    axes.set_ylim(0, 1.4 * axes.dataLim.y1)
    axes.legend(frameon=False, loc="upper left")


def _draw_memory_of_generation(axes: Axes, run: CacheRun, settings: Settings, token_bytes: int) -> None:
    samples = [sample for sample in run.samples if sample.tokens >= settings.prompt]
    tokens = [sample.tokens for sample in samples]
    mapped = [sample.mapped / MIB for sample in samples]
    needed = [length * token_bytes / MIB for length in tokens]
    axes.step(tokens, mapped, where="post", label=OURS, color=LINES[OURS][0], linewidth=2)
    axes.step(tokens, needed, where="post", label="what the tokens need", color="#263238", linestyle=":")
    axes.set_title("Close up: the tokens generated", **TITLE)
    axes.legend(frameon=False, loc="upper left")
    axes.margins(y=0.25)
    axes.ticklabel_format(useOffset=False)

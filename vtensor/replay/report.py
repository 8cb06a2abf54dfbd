"""Results of replays as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from vtensor.errors import VTensorError
from vtensor.replay.simulate import Result

__all__ = ["picture", "table", "to_json"]

_FIGURES: dict[str, Callable[[Result], str]] = {
    "policy": lambda r: r.policy,
    "admitted": lambda r: f"{r.admitted:,}",
    "failed": lambda r: f"{r.failed:,}",
    "batch mean": lambda r: f"{r.batch_mean:.1f}",
    "batch peak": lambda r: f"{r.batch_peak:,}",
    "waste": lambda r: f"{r.waste:.2%}",
    "prefix hits": lambda r: f"{r.hit_rate:.2%}",
    "preempted": lambda r: f"{r.recomputed + r.swapped:,}",
    "calls caller": lambda r: f"{r.calls_caller:,}",
    "calls mapper": lambda r: f"{r.calls_mapper:,}",
    "delay p50": lambda r: f"{r.delay_p50:.3f} s",
    "delay p99": lambda r: f"{r.delay_p99:.3f} s",
    "tokens/s": lambda r: f"{r.throughput:,.0f}",
}

# Lines of equal results coincide. Wide pale lines lie below thin ones, so that all stay visible.
_LINES: dict[str, dict[str, Any]] = {
    "vtensor": {"color": "#1b9aaa", "linewidth": 1.2, "zorder": 5},
    "static": {"color": "#d9647a", "linewidth": 1.5, "zorder": 4},
    "paged": {"color": "#e0a33e", "linewidth": 2.5, "zorder": 3},
    "ideal": {"color": "#c9d1d6", "linewidth": 5, "zorder": 2},
}


def table(results: Sequence[Result]) -> str:
    """A column for each policy and a line for each figure. Four policies fit in 80 characters."""
    lines = [[name, *map(show, results)] for name, show in _FIGURES.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )


def to_json(settings: dict[str, object], results: Sequence[Result]) -> str:
    """A JSON object of ``settings`` and of the results of each policy, without samples and delays."""
    rows = []
    for result in results:
        row = asdict(result)
        del row["samples"], row["delays"]
        rows.append(row | {"hit_rate": result.hit_rate, "throughput": result.throughput})
    return json.dumps({"settings": settings, "results": rows}, indent=2)


def picture(results: Sequence[Result], path: str | os.PathLike[str], title: str) -> None:
    """Draws requests at a time, tokens held, and queueing delays. The file's suffix selects the format.

    Raises:
        VTensorError: if matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        what = f"[replay] a picture needs {missing.name}: pip install 'vtensor[plot]'"
        raise VTensorError(what) from missing
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    running, held, delays = figure.subplots(1, 3)
    for result in results:
        seconds = [sample.seconds for sample in result.samples]
        look = _LINES.get(result.policy, {})
        running.plot(seconds, [sample.running for sample in result.samples], label=result.policy, **look)
        held.plot(seconds, [sample.tokens / 1000 for sample in result.samples], **look)
        shares = [(i + 1) / len(result.delays) for i in range(len(result.delays))]
        delays.plot(result.delays, shares, **look)
    running.set(title="requests at a time", xlabel="simulated seconds", ylim=(0, None))
    held.set(title="tokens held, thousands", xlabel="simulated seconds", ylim=(0, None))
    delays.set(title="share of requests begun within", xlabel="seconds after arrival", ylim=(0, 1.02))
    running.legend(frameon=False)
    for axes in (running, held, delays):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=120)

"""Results of replays as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

from vtensor.errors import VTensorError
from vtensor.replay.simulate import Result

__all__ = ["picture", "table", "to_json"]

_COLUMNS: dict[str, Callable[[Result], str]] = {
    "policy": lambda r: r.policy,
    "admitted": lambda r: f"{r.admitted:,}",
    "failed": lambda r: f"{r.failed:,}",
    "batch mean": lambda r: f"{r.batch_mean:.1f}",
    "peak": lambda r: f"{r.batch_peak:,}",
    "waste": lambda r: f"{r.waste:.2%}",
    "prefix hits": lambda r: f"{r.hit_rate:.2%}",
    "preempted": lambda r: f"{r.recomputed + r.swapped:,}",
    "calls caller": lambda r: f"{r.calls_caller:,}",
    "calls mapper": lambda r: f"{r.calls_mapper:,}",
    "delay p50": lambda r: f"{r.delay_p50:.3f} s",
    "delay p99": lambda r: f"{r.delay_p99:.3f} s",
    "tokens/s": lambda r: f"{r.throughput:,.0f}",
}


def table(results: Sequence[Result]) -> str:
    """A line a policy, for a terminal."""
    lines = [list(_COLUMNS)] + [[show(result) for show in _COLUMNS.values()] for result in results]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )


def to_json(settings: dict[str, object], results: Sequence[Result]) -> str:
    """One object: ``settings`` and, for each policy, its results without the samples."""
    rows = []
    for result in results:
        row = asdict(result)
        del row["samples"], row["delays"]
        rows.append(row | {"hit_rate": result.hit_rate, "throughput": result.throughput})
    return json.dumps({"settings": settings, "results": rows}, indent=2)


def picture(results: Sequence[Result], path: str | os.PathLike[str], title: str) -> None:
    """Draws requests at a time, tokens held, and queueing delays; the file's ending says the format.

    Raises VTensorError without matplotlib.
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
        running.plot(seconds, [sample.running for sample in result.samples], label=result.policy, linewidth=1)
        held.plot(seconds, [sample.tokens / 1000 for sample in result.samples], linewidth=1)
        shares = [(i + 1) / len(result.delays) for i in range(len(result.delays))]
        delays.plot(result.delays, shares, linewidth=1.5)
    running.set(title="requests at a time", xlabel="simulated seconds", ylim=(0, None))
    held.set(title="tokens held, thousands", xlabel="simulated seconds", ylim=(0, None))
    delays.set(title="share of requests begun within", xlabel="seconds after arrival", ylim=(0, 1.02))
    running.legend(frameon=False)
    for axes in (running, held, delays):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)

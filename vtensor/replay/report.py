"""Results of replays as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from vtensor._base.terminal import aligned, drawable
from vtensor.errors import VTensorError
from vtensor.replay.simulate import Result

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
    "ttft p50": lambda r: f"{r.ttft_p50:.3f} s",
    "ttft p99": lambda r: f"{r.ttft_p99:.3f} s",
    "tpot mean": lambda r: f"{r.tpot_mean * 1e3:,.1f} ms",
    "tpot p50": lambda r: f"{r.tpot_p50 * 1e3:,.1f} ms",
    "tpot p99": lambda r: f"{r.tpot_p99 * 1e3:,.1f} ms",
    "broken": lambda r: f"{r.broken:,}",
    "tokens/s": lambda r: f"{r.throughput:,.0f}",
}

# Lines of equal results coincide. Wide pale lines lie below thin ones, so that all stay visible.
_LINES: dict[str, dict[str, Any]] = {
    "layerkv": {"color": "#2b4c7e", "linewidth": 1.2, "zorder": 7},
    "whole": {"color": "#7a5c99", "linewidth": 1.2, "zorder": 6},
    "vtensor": {"color": "#1b9aaa", "linewidth": 1.2, "zorder": 5},
    "static": {"color": "#d9647a", "linewidth": 1.5, "zorder": 4},
    "paged": {"color": "#e0a33e", "linewidth": 2.5, "zorder": 3},
    "ideal": {"color": "#c9d1d6", "linewidth": 5, "zorder": 2},
}


def table(results: Sequence[Result]) -> str:
    """A column for each policy and a line for each figure. Four policies fit in 80 characters."""
    return "\n".join(aligned([[name, *map(show, results)] for name, show in _FIGURES.items()]))


def to_json(settings: dict[str, object], results: Sequence[Result]) -> str:
    """A JSON object of ``settings`` and of each policy's result, without its lists."""
    rows = []
    derived = [name for name, kind in vars(Result).items() if isinstance(kind, property)]
    for result in results:
        row = {name: value for name, value in vars(result).items() if not isinstance(value, list)}
        rows.append({"policy": result.policy} | row | {name: getattr(result, name) for name in derived})
    return json.dumps({"settings": settings, "results": rows}, indent=2)


def picture(results: Sequence[Result], path: str | os.PathLike[str], title: str) -> None:
    """Draws requests at a time, tokens held, times to first token and times per output token, with the
    promises of both. The file's suffix selects the format.

    Raises:
        VTensorError: if matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        what = f"[replay] a picture needs {missing.name}: pip install 'vtensor[plot]'"
        raise VTensorError(what) from missing
    figure = Figure(figsize=(16, 3.6), layout="constrained")
    running, held, first, each = figure.subplots(1, 4)
    for result in results:
        seconds = [sample.seconds for sample in result.samples]
        look = _LINES.get(result.policy, {})
        running.plot(seconds, [sample.running for sample in result.samples], label=result.policy, **look)
        held.plot(seconds, [sample.tokens / 1000 for sample in result.samples], **look)
        for axes, times, promise in (
            (first, result.ttfts, result.slo_ttft),
            (each, result.tpots, result.slo_tpot),
        ):
            axes.plot(times, [(i + 1) / len(times) for i in range(len(times))], **look)
            axes.axvline(promise, color="#8a959b", linewidth=1, linestyle=":", zorder=1)
    running.set(title="requests at a time", xlabel="simulated seconds", ylim=(0, None))
    held.set(title="tokens held, thousands", xlabel="simulated seconds", ylim=(0, None))
    first.set(title="first token within", xlabel="seconds after arrival", ylabel="share of requests")
    each.set(title="later tokens within", xlabel="seconds a token, each request's mean")
    for axes in (first, each):
        axes.set(xlim=(0, None), ylim=(0, 1.02))
    running.legend(frameon=False)
    for axes in (running, held, first, each):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.suptitle(drawable(title), fontweight="bold", parse_math=False)  # it names a file
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise VTensorError(f"[replay] {path} cannot be drawn: {error}") from error

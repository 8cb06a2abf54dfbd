"""The result format: a dictionary for JSON, and the same as a table for people."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .harness import Figure, Settings


@dataclass(frozen=True)
class Outcome:
    """What one benchmark gave: figures, or why there are none."""

    name: str
    seconds: float
    figures: Sequence[Figure] = ()
    skipped: str | None = None
    error: str | None = None


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def rewrite(path: Path, text: str) -> None:
    """Never half: whoever ends the process meanwhile leaves what was there before."""
    written = path.with_name(path.name + ".new")
    written.write_text(text)
    os.replace(written, path)


def to_dict(settings: Settings, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What ``--json`` writes. In a quick run no time is judged: `passed` of a measured figure is None."""
    benchmarks = [dataclasses.asdict(outcome) for outcome in outcomes]
    for benchmark in benchmarks:
        for figure in benchmark["figures"]:
            if settings.quick and not figure["counted"]:
                figure["passed"] = None
    return {
        "schema": 1,
        "date": today(),
        "quick": settings.quick,
        "device": settings.device,
        "machine": dict(machine),
        "benchmarks": benchmarks,
    }


def to_json(value: Any, levels: int = 4, indent: int = 0) -> str:
    """`value` as JSON, in lines down to these levels of it: with a line for each figure of a result."""
    if levels == 0 or not value or not isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    parts = [("", one) for one in value]
    if isinstance(value, dict):
        parts = [(f"{json.dumps(key)}: ", one) for key, one in value.items()]
    space = " " * indent
    lines = ",\n".join(f"{space} {name}{to_json(one, levels - 1, indent + 1)}" for name, one in parts)
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{lines}\n{space}{last}"


def table(result: Mapping[str, Any]) -> str:
    """`result`, of ``to_dict``, as text."""
    lines = [", ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    if result["quick"]:
        lines += ["Quick run: sizes are small, times are not judged.", ""]
    rows: list[tuple[str, ...]] = [
        ("", "ours", "baseline", "ours against baseline [p10, p90]", "baseline against itself", "bar", "")
    ]
    for benchmark in result["benchmarks"]:
        rows.append((f"{benchmark['name']}",))
        if reason := benchmark["skipped"] or benchmark["error"]:
            rows.append((f"  {'skipped' if benchmark['skipped'] else 'FAILED'}: {reason}",))
        rows += [_row(figure) for figure in benchmark["figures"]]
    widths = [max(len(row[i]) for row in rows if len(row) > 1) for i in range(len(rows[0]))]
    for row in rows:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    judged = [f for b in result["benchmarks"] for f in b["figures"] if f["passed"] is not None]
    missed = sum(not figure["passed"] for figure in judged)
    lines += ["", f"{len(judged)} bars, {missed} missed"]
    return "\n".join(lines) + "\n"


def _row(figure: Mapping[str, Any]) -> tuple[str, ...]:
    bar = figure["bar"]
    verdict = {True: "pass", False: "MISS", None: ""}[figure["passed"]]
    value = f"{number(figure['value']['median'])} {figure['unit']}"
    if not figure["counted"]:
        value += f" [{number(figure['value']['p10'])}, {number(figure['value']['p90'])}]"
    return (
        f"  {figure['name']} / {figure['against']}",
        seconds(figure["ours"]),
        seconds(figure["baseline"]),
        value,
        "" if figure["control"] is None else _brackets(figure["control"]),
        "" if bar is None else f"{'>=' if bar['at_least'] else '<='} {number(bar['limit'])}",
        verdict,
    )


def _brackets(spread: Mapping[str, float]) -> str:
    return f"{number(spread['median'])} [{number(spread['p10'])}, {number(spread['p90'])}]"


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def seconds(spread: Mapping[str, float] | None) -> str:
    """The median with a unit that suits it."""
    if spread is None:
        return ""
    value = spread["median"]
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1:
            return f"{number(value * factor)} {unit}"
    return f"{number(value * 1e9)} ns"

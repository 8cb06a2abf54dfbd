"""``python -m benchmarks.against OTHER``: the figures of this checkout beside those of another, run in turns.

Both are measured by their own benchmarks, as ratios to the same baselines in the same runs, so that what the
machine does meanwhile meets both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from . import BENCHMARKS, machine, report

HERE = Path(__file__).resolve().parent.parent
Runs = dict[tuple[str, str], list[tuple[float, float]]]  # figure and baseline: value and microseconds, a run


def figures(result: dict[str, Any]) -> Iterator[tuple[tuple[str, str], tuple[float, float]]]:
    for benchmark in result["benchmarks"]:
        for figure in benchmark["figures"]:
            ours = figure["ours"]["median"] * 1e6 if figure["ours"] else float("nan")
            yield (figure["name"], figure["against"]), (figure["value"]["median"], ours)


def measure(checkout: Path, name: str, into: Path) -> dict[str, Any]:
    python = checkout / ".venv/bin/python"
    subprocess.run(
        [python, "-m", "benchmarks", "--only", name, "--json", into],
        cwd=checkout,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,  # 1 where a bar is missed
    )
    result: dict[str, Any] = json.loads(into.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of another commit, built there")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the medians there")
    options = parser.parse_args()
    sides = {"other": options.other.resolve(), "here": HERE}
    runs: dict[str, dict[str, Runs]] = {side: {name: {} for name in options.only} for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for name in options.only:
                for side in sides if turn % 2 == 0 else reversed(sides):
                    print(f"round {turn + 1} of {options.rounds}: {name}, {side}", file=sys.stderr)
                    found = measure(sides[side], name, Path(folder) / "result.json")
                    for figure, value in figures(found):
                        runs[side][name].setdefault(figure, []).append(value)
    rows = []
    for name in options.only:
        for figure, here in runs["here"][name].items():
            if other := runs["other"][name].get(figure):
                medians = [median(one[i] for one in side) for i in (0, 1) for side in (other, here)]
                rows.append([name, " / ".join(figure), *medians])
    print(f"{'':95} {'against its baseline':>21} {'ours, us':>21}")
    print(f"{'':95} {'other':>10} {'here':>10} {'other':>10} {'here':>10}")
    for name, figure, *values in rows:
        print(f"{name + ': ' + figure:95.95}" + "".join(f" {value:10.4g}" for value in values))
    if options.json:
        keys = ("benchmark", "figure", "other", "here", "other_us", "here_us")
        rows = [[None if value != value else value for value in row] for row in rows]  # NaN is no JSON
        text = {
            "date": report.today(),
            "machine": machine.describe("cpu"),
            "rounds": options.rounds,
            "figures": [dict(zip(keys, row, strict=True)) for row in rows],
        }
        options.json.write_text(report.to_json(text, levels=2) + "\n")


if __name__ == "__main__":
    main()

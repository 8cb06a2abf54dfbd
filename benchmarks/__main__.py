"""``python -m benchmarks``: runs them, prints one table, and saves the results where asked."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import BENCHMARKS, machine, report
from .harness import Settings, Skipped

RESULTS = Path(__file__).parent / "results"
PRINTED = Path("-")


def run_one(name: str, settings: Settings) -> report.Outcome:
    start = time.perf_counter()
    figures, skipped, error = [], None, None
    try:
        figures = importlib.import_module(f"benchmarks.{name}").run(settings)
    except Skipped as reason:
        skipped = str(reason)
    except Exception as exception:
        traceback.print_exc()
        error = f"{type(exception).__name__}: {exception}"
    return report.Outcome(name, round(time.perf_counter() - start, 1), figures, skipped, error)


def as_json(result: dict[str, Any]) -> str:
    return report.to_json(result) + "\n"


def files_of(options: argparse.Namespace) -> dict[Path, Callable[[dict[str, Any]], str]]:
    """What is written where."""
    files: dict[Path, Callable[[dict[str, Any]], str]] = {}
    if options.json and options.json != PRINTED:
        files[options.json] = as_json
    if options.table:
        files[options.table] = report.table
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        stem = f"{'gpu' if options.device == 'cuda' else 'cpu'}-{report.today()}"
        files[RESULTS / f"{stem}.json"] = as_json
        files[RESULTS / f"{stem}.txt"] = report.table
    return files


def main(arguments: list[str] | None = None, prog: str = "python -m benchmarks") -> int:
    """1 where a benchmark failed or a count missed its bar; times are reported, not gated."""
    parser = argparse.ArgumentParser(prog=prog, description="Figures beside their baselines, in one table.")
    parser.add_argument(
        "--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS)
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; times mean nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=PRINTED,
        metavar="FILE",
        help="write the results to FILE, or print them, and the table to standard error",
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table to FILE too")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/ too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU here")
    if options.quick and options.save:
        parser.error("--save keeps figures, and those of --quick mean nothing: leave one out")

    settings = Settings(options.quick, options.device)
    names = options.only or BENCHMARKS
    files = files_of(options)
    for path in files:
        if not os.access(path.parent, os.W_OK):  # now, not after the first benchmark
            parser.error(f"{path} cannot be written: name a file in a folder that can be")
    on = machine.describe(settings.device)
    outcomes: list[report.Outcome] = []
    for at, name in enumerate(names, 1):
        print(f"[{at}/{len(names)}] {name} ...", end=" ", file=sys.stderr, flush=True)
        outcomes.append(run_one(name, settings))
        print(f"{outcomes[-1].seconds} s", file=sys.stderr)
        result = report.to_dict(settings, on, outcomes)
        for path, text_of in files.items():  # after each: a run that is ended early keeps what it has
            report.rewrite(path, text_of(result))

    if options.json == PRINTED:
        print(report.table(result), end="", file=sys.stderr)
        print(as_json(result), end="")
    else:
        print(report.table(result), end="")
    gated = [figure for outcome in outcomes for figure in outcome.figures if figure.counted]
    return int(any(outcome.error for outcome in outcomes) or any(figure.passed is False for figure in gated))


if __name__ == "__main__":
    sys.exit(main())

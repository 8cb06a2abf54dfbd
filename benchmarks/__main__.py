"""``python -m benchmarks``: runs them, prints one table, and saves the results where asked."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

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
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/ too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU here")
    if options.quick and options.save:
        parser.error("--save keeps figures, and those of --quick mean nothing: leave one out")

    settings = Settings(options.quick, options.device)
    names = options.only or BENCHMARKS
    outcomes = []
    for at, name in enumerate(names, 1):
        print(f"[{at}/{len(names)}] {name} ...", end=" ", file=sys.stderr, flush=True)
        outcomes.append(run_one(name, settings))
        print(f"{outcomes[-1].seconds} s", file=sys.stderr)

    result = report.to_dict(settings, machine.describe(settings.device), outcomes)
    text = report.table(result)
    as_json = json.dumps(result, indent=1) + "\n"
    if options.json == PRINTED:
        print(text, end="", file=sys.stderr)
        print(as_json, end="")
    else:
        print(text, end="")
        if options.json:
            options.json.write_text(as_json)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        stem = f"{'gpu' if settings.device == 'cuda' else 'cpu'}-{result['date']}"
        (RESULTS / f"{stem}.json").write_text(as_json)
        (RESULTS / f"{stem}.txt").write_text(text)
    gated = [figure for outcome in outcomes for figure in outcome.figures if figure.counted]
    return int(any(outcome.error for outcome in outcomes) or any(figure.passed is False for figure in gated))


if __name__ == "__main__":
    sys.exit(main())

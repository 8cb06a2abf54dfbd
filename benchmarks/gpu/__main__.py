"""``python -m benchmarks.gpu``: asks the questions one after the other, each in a process of its own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import today

from . import QUESTIONS, session

LEAST_SECONDS = 8  # to import torch, start CUDA and find anything
RESULTS = Path(__file__).parents[1] / "results"
WHILE_BUILDING = [number for number, question in QUESTIONS.items() if question.while_building]
CHOICES = {"first": WHILE_BUILDING, "rest": [number for number in QUESTIONS if number not in WHILE_BUILDING]}


def chosen(text: str) -> list[int]:
    numbers = CHOICES.get(text) or [int(part) for part in text.split(",")]
    if unknown := set(numbers) - set(QUESTIONS):
        raise argparse.ArgumentTypeError(f"no question has the number {', '.join(map(str, unknown))}")
    return [number for number in QUESTIONS if number in numbers]


class Result:
    """A file of JSON lines: a line for each call of this program, then a line for each finding, as it
    comes."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        gpu = re.sub(r"[^a-z0-9]+", "-", head["gpu"].lower()).strip("-")
        self.path = folder / f"{gpu}-{today()}.jsonl"
        self._file = self.path.open("a", buffering=1)
        self.add({"kind": "run", "date": today(), **head})

    def add(self, finding: dict[str, Any]) -> None:
        self._file.write(json.dumps(finding) + "\n")


def ask(number: int, seconds: float, quick: bool, result: Result) -> tuple[bool, bool]:
    """Whether the question came to its end, and whether it had time for all of it."""
    complete = True

    def found(finding: dict[str, Any]) -> None:
        nonlocal complete
        complete &= finding.get("reason") != session.OUT_OF_TIME
        result.add({"question": number, **finding})
        if line := session.line_of(finding):
            print(f"    {line}", flush=True)

    code = session.run_apart(
        f"benchmarks.gpu.{QUESTIONS[number].function}", (), seconds, quick, found, group=True
    )
    if code != 0:
        found(
            {"kind": "error", "text": f"ran past {seconds:.0f} s" if code is None else f"ended with {code}"}
        )
    return code == 0, complete


def main(arguments: list[str] | None = None) -> int:
    """1 where a question failed or was not reached; no figure is judged."""
    begun = time.time()
    numbers = ", ".join(f"{number} {question.function}" for number, question in sorted(QUESTIONS.items()))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, epilog=numbers)
    parser.add_argument(
        "--only", type=chosen, default=list(QUESTIONS), metavar="N,N",
        help="numbers of questions; or `first`, those that can be asked while vtensor is built, or `rest`",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=8, help="all of it ends within these (default 8)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS), metavar="FOLDER")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes; shows that it runs, and measures nothing"
    )
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        parser.error(
            "cuda-bindings is not installed, through which the driver is asked: pip install cuda-bindings"
        )
    if not (head := session.make_device.describe()):
        parser.error("torch finds no GPU here")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # through the `finally`s
    deadline = begun + options.minutes * 60
    result = Result(options.out, {**head, "quick": options.quick})
    failed, unanswered = False, []
    for number in options.only:
        seconds = min(session.patience * QUESTIONS[number].seconds, deadline - time.time() - 5)
        print(f"\n{number}. {QUESTIONS[number].text} (at most {seconds:.0f} s)", flush=True)
        reached = seconds >= LEAST_SECONDS
        ended, complete = ask(number, seconds, options.quick, result) if reached else (False, False)
        failed |= not ended
        if not (ended and complete):
            unanswered.append(str(number))
    print(f"\n{time.time() - begun:.0f} s; written: {result.path}")
    if unanswered:
        print(f"Not answered in full; in a second call: scripts/gpu.sh --only {','.join(unanswered)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.gpu``: asks the questions one after the other, each in a process of its own."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

from . import QUESTIONS, Question, report
from .session import OUT_OF_TIME, ROOT, first_line, read, run_worker

LEAST_SECONDS = 8  # to import torch, start CUDA and find anything


def describe(rehearsal: bool) -> dict[str, Any]:
    if rehearsal:
        return {"gpu": "none (simulated libcuda, a test double)", **machine.describe("cpu")}
    properties = torch.cuda.get_device_properties(0)
    return {
        **machine.describe("cuda"),
        "gpu_memory_gib": round(properties.total_memory / 2**30),
        "gpu_processors": properties.multi_processor_count,
        "gpu_l2_mib": getattr(properties, "L2_cache_size", 0) >> 20,
        "driver": driver_version(),
        "module_loading": os.environ.get("CUDA_MODULE_LOADING", "default"),
    }


def driver_version() -> str:
    """The release of NVIDIA's driver, which torch does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        proc = Path("/proc/driver/nvidia/version")
        return proc.read_text().splitlines()[0] if proc.exists() else "unknown"


def ask(question: Question, seconds: float, result: report.Result) -> None:
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        emit, errors = Path(folder, "findings"), Path(folder, "stderr")
        error = "ended from outside"
        try:
            with errors.open("w") as stderr:
                code = run_worker(question.module, emit, seconds, result.document["rehearsal"], stderr=stderr)
            error = "" if code == 0 else f"ran past {seconds:.0f} s" if code is None else f"ended with {code}"
        finally:
            findings, said = read(emit), errors.read_text(errors="replace").strip()
            if error:
                print(f"    {error}: {said[-2000:]}", flush=True)
                error += f": {said.splitlines()[-1][:300]}" if said else ""
            answered = any(found["kind"] == "answer" for found in findings)
            status = "answered" if answered and not error else "partial" if findings else "failed"
            result.add(question.number, question.text, status, time.time() - start, findings, error)
            result.save()


def chosen(text: str) -> set[int]:
    numbers = {int(part) for part in text.split(",")}
    if unknown := numbers - {question.number for question in QUESTIONS}:
        raise argparse.ArgumentTypeError(f"no question has the number {', '.join(map(str, unknown))}")
    return numbers


def unfinished(questions: list[dict[str, Any]]) -> list[int]:
    """The numbers of those that gave no answer, or skipped something because their time was over."""

    def lacks_time(question: dict[str, Any]) -> bool:
        return any(skipped["reason"] == OUT_OF_TIME for skipped in question["skipped"])

    return [q["number"] for q in questions if q["status"] != "answered" or lacks_time(q)]


def why_no_vtensor() -> str:
    """Why the questions that need vtensor cannot be asked; empty where they can."""
    try:
        import vtensor  # noqa: F401
    except ImportError as error:
        return f"vtensor cannot be imported: {first_line(error)}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """1 where a question failed or was not reached; no figure is judged."""
    begun = time.time()
    numbers = ", ".join(f"{question.number} {question.module[1:]}" for question in QUESTIONS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, epilog=numbers)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", type=chosen, metavar="N,N", help="the numbers of the questions to ask")
    which.add_argument("--first", action="store_true", help="those that can be asked while vtensor is built")
    which.add_argument("--rest", action="store_true", help="the others, into what --first wrote")
    parser.add_argument("--minutes", type=float, default=8, help="all of it ends within these (default 8)")
    parser.add_argument(
        "--spent", type=float, default=0, metavar="SECONDS", help="of the minutes, gone already"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: $OUT, or benchmarks/results")
    parser.add_argument("--rehearsal", action="store_true", help="no GPU: run the code, and measure nothing")
    options = parser.parse_args(arguments)

    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        parser.error(
            "cuda-bindings is not installed, through which the driver is asked: pip install cuda-bindings"
        )
    if not options.rehearsal and not torch.cuda.is_available():
        parser.error("torch finds no GPU here: --rehearsal runs the code without one")
    if options.rehearsal and not Path(os.environ.setdefault("VTENSOR_SIMCUDA", simulated())).exists():
        parser.error(
            f"no simulated libcuda at {os.environ['VTENSOR_SIMCUDA']}: build it with scripts/build.sh"
        )
    folder = options.out or Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    if options.rehearsal and folder.resolve() == ROOT / "benchmarks" / "results":
        parser.error("--rehearsal measures nothing: name another folder than the results' with --out")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # through the `finally`s
    deadline = begun + options.minutes * 60 - options.spent
    result = report.Result(folder, describe(options.rehearsal), options.rehearsal, options.only or ())
    if options.rest:
        result.go_on()
    no_vtensor = why_no_vtensor()
    mode = "; rehearsal, no figure is a GPU's" if options.rehearsal else ""
    for question in QUESTIONS:
        if options.only and question.number not in options.only:
            continue
        if (options.first and not question.while_building) or (options.rest and question.while_building):
            continue
        if question.needs_vtensor and no_vtensor:
            result.add(question.number, question.text, "not reached", 0, [], no_vtensor)
            continue
        seconds = min(question.seconds, deadline - time.time() - 5)
        if seconds < LEAST_SECONDS:
            result.add(question.number, question.text, "not reached", 0, [], OUT_OF_TIME)
            continue
        print(f"\n{question.number}. {question.text} (at most {seconds:.0f} s{mode})", flush=True)
        ask(question, seconds, result)
    result.save()
    print("\n" + report.table(result.document).partition("## Answers")[2].partition("\n## ")[0])
    written = ", ".join(str(path) for path in result.paths if path.exists())
    print(f"{time.time() - begun:.0f} s; written: {written}")
    if rest := unfinished(result.document["questions"]):
        print(f"Not answered in full; in a second call: scripts/gpu.sh --only {','.join(map(str, rest))}")
    return int(any(q["status"] in ("failed", "not reached") for q in result.document["questions"]))


def simulated() -> str:
    return str(ROOT / "build" / "tests" / "libsimcuda.so")


if __name__ == "__main__":
    sys.exit(main())

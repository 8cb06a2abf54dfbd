#!/usr/bin/env python3
"""Plants the faults of tests/planted.toml one at a time, and runs for each the test that is to see it.

Works in a copy of the last commit under build/planted. A fault is seen if its test fails, crashes or hangs.
Exits with 1 if one is not seen. Needs doctest, and what ``make test`` installs.

usage: scripts/plant.py [WORD...]     only faults in whose name, file or test one of the words is
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build/planted"
BUILD = COPY / "build/planted"
PYTHON = BUILD / "environment/bin/python"
PATIENCE = 120.0  # seconds


def run(*command: object, **options: object) -> None:
    subprocess.run([str(word) for word in command], cwd=COPY, check=True, **options)  # type: ignore[call-overload]


def prepare() -> Path:
    """A checkout of the last commit, built with its C++ tests. Returns the folder that it is installed in."""
    COPY.mkdir(parents=True, exist_ok=True)
    if not (COPY / ".git").exists():
        run("git", "clone", "-q", "--shared", ROOT, ".")
    run("git", "fetch", "-q", ROOT, "HEAD")
    run("git", "reset", "-q", "--hard", "FETCH_HEAD")
    if not (COPY / ".venv").exists():
        (COPY / ".venv").symlink_to(ROOT / ".venv")
    run("bash", "-c", f"source scripts/lib.sh; build_aside {BUILD.relative_to(COPY)} -O1")
    (packages,) = (BUILD / "environment/lib").glob("python3*/site-packages")
    return packages / "vtensor"


def build(test: str, installed: Path) -> None:
    """What the test needs of the sources as they are."""
    program = [test.removeprefix("cpp:")] if test.startswith("cpp:") else ["_core", "simcuda"]
    run("cmake", "--build", BUILD, "--target", *program, stdout=subprocess.DEVNULL)
    if program[0] == "_core":
        (module,) = BUILD.glob("_core*.so")
        run("cp", module, installed)


def sees(test: str) -> bool:
    command = [PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{test}"]
    if test.startswith("cpp:"):
        command = [BUILD / test.removeprefix("cpp:")]
    environment = {
        **os.environ,
        "VTENSOR_SIMCUDA": str(BUILD / "libsimcuda.so"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        command,
        cwd=COPY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
        return process.wait() != 0


def main(words: list[str]) -> int:
    installed = prepare()
    faults = tomllib.loads((ROOT / "tests/planted.toml").read_text())["fault"]
    text = {fault["name"]: f"{fault['name']} {fault['file']} {fault['test']}" for fault in faults}
    faults = [fault for fault in faults if not words or any(word in text[fault["name"]] for word in words)]
    tests = sorted({fault["test"] for fault in faults})
    for n, test in enumerate(tests, 1):
        print(f"{n:3} of {len(tests)}  no fault       {test}", flush=True)
        if sees(test):
            sys.exit(f"{test} fails without a fault")
    unseen = 0
    for n, fault in enumerate(faults, 1):
        file, test = COPY / fault["file"], fault["test"]
        source = file.read_text()
        if source.count(fault["old"]) != 1:
            sys.exit(
                f"the table is out of date: {fault['name']}: {fault['file']} has not one {fault['old']!r}"
            )
        file.write_text(source.replace(fault["old"], fault["new"]))
        try:
            build(test, installed)
            begun = time.monotonic()
            seen = sees(test)
            unseen += not seen
            answer = f"seen in {time.monotonic() - begun:.0f} s" if seen else "NOT SEEN"
            print(f"{n:3} of {len(faults)}  {answer:14} {test:45} {fault['name']}", flush=True)
        finally:
            file.write_text(source)
    print(f"{len(faults) - unseen} of {len(faults)} faults were seen")
    return min(unseen, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a question has in hand: the device, the driver, how much time is left, and where its findings go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.harness import quantile

from . import tensor_at as _tensor_at
from .device import Device
from .driver import Driver

T = TypeVar("T")
OUT_OF_TIME = "the time was over"  # why something was skipped
ROOT = Path(__file__).resolve().parents[2]


def summary(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    quantiles = {
        name: quantile(ordered, q) for name, q in (("median", 0.5), ("p10", 0.1), ("p90", 0.9), ("p99", 0.99))
    }
    return {**quantiles, "n": len(ordered)}


@dataclass(frozen=True)
class CaseEnd:
    """How a case in a process of its own ended, and what it had found until then."""

    code: int | None  # negative for a signal, None where it ran past its time
    findings: list[dict[str, Any]]
    error_tail: str

    @property
    def facts(self) -> dict[str, Any]:
        return {found["name"]: found["value"] for found in self.findings if found["kind"] == "fact"}

    @property
    def text(self) -> str:
        if self.code is None:
            return "hung, and was killed"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"exited with {self.code}"


class Session:
    """Findings are dicts with a `kind`: figure, fact, answer, skipped, call. Written one a line, at once."""

    def __init__(self, module: str, device: Device, emit: Path, deadline: float) -> None:
        self.module, self.device, self.deadline = module, device, deadline
        self.rehearsal = device.rehearsal
        self._emit = emit

    @cached_property
    def driver(self) -> Driver:
        return self.device.open_driver()

    def pick(self, full: T, rehearsal: T) -> T:
        return rehearsal if self.rehearsal else full

    def time_left(self) -> float:
        """Seconds until this question's time is over."""
        return self.deadline - time.time()

    def rounds(self, full: int, rehearsal: int, seconds: float) -> Iterable[int]:
        """Counts rounds, at least two, until they are done or have taken `seconds` (or all that is left)."""
        end = time.time() + min(seconds, self.time_left() - 2)
        for done in range(self.pick(full, rehearsal)):
            if done >= 2 and time.time() > end:
                return
            yield done

    def tensor_at(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _tensor_at.tensor_at(address, shape, dtype, self.device.torch_device)

    # -- findings

    def _write(self, finding: dict[str, Any]) -> None:
        with self._emit.open("a") as file:
            file.write(json.dumps(finding) + "\n")
        if finding["kind"] != "call":
            print("    " + line_of(finding), flush=True)

    def figure(self, name: str, values: Sequence[float], unit: str, method: str) -> float:
        """Writes the spread of `values`; returns their median."""
        found = summary(values)
        self._write({"kind": "figure", "name": name, "unit": unit, "method": method, **found})
        return found["median"]

    def ratio(
        self,
        name: str,
        ours: Sequence[float],
        baseline: Sequence[float],
        control: Sequence[float],
        method: str,
    ) -> float:
        """Writes ours / baseline by round, beside the same of a second copy of the baseline; the median."""
        pairs = zip(ours, baseline, control, strict=True)
        found, of_control = [], []
        for a, b, c in pairs:
            found.append(a / b)
            of_control.append(c / b)
        spread = summary(found)
        self._write(
            {
                "kind": "figure",
                "name": name,
                "unit": "x",
                "method": method,
                **spread,
                "control": summary(of_control),
            }
        )
        return spread["median"]

    def fact(self, name: str, value: Any, method: str = "") -> None:
        """A count, a yes or no, an error message."""
        self._write({"kind": "fact", "name": name, "value": value, "method": method})

    def answer(self, sentence: str) -> None:
        self._write({"kind": "answer", "text": sentence})

    def call(self, line: dict[str, Any]) -> None:
        """A line of the recording (see recording.py)."""
        self._write({"kind": "call", **line})

    def skipped(self, name: str, reason: str) -> None:
        self._write({"kind": "skipped", "name": name, "reason": reason})

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """`work()`, or None and the reason among the findings where it cannot be done here."""
        try:
            return work()
        except Exception as error:
            self.skipped(name, first_line(error))
            return None

    def forward(self, findings: Iterable[dict[str, Any]]) -> None:
        """Takes over what a case found."""
        for finding in findings:
            self._write(finding)

    # -- processes of their own

    def run_case(self, case: str, seconds: float) -> CaseEnd:
        """Runs ``CASES[case]`` of this question's module in a process that may die or hang."""
        seconds = max(1.0, min(seconds, self.time_left() - 1))
        with tempfile.TemporaryDirectory() as folder:
            emit, errors = Path(folder, "findings"), Path(folder, "stderr")
            with errors.open("w") as stderr:
                code = run_worker(self.module, emit, seconds, self.rehearsal, case, stderr)
            return CaseEnd(code, read(emit), errors.read_text(errors="replace")[-400:])


def run_worker(
    module: str, emit: Path, seconds: float, rehearsal: bool, case: str | None = None, stderr: Any = None
) -> int | None:
    """Runs a question, or a case of it, for at most `seconds`; its exit code, or None where it was killed.

    It has a process group of its own, which goes as a whole: cases are grandchildren.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.worker", module, "--emit", str(emit)]
    command += ["--seconds", f"{seconds:.1f}"]
    command += ["--rehearsal"] if rehearsal else []
    command += ["--case", case] if case else []
    worker = subprocess.Popen(
        command,
        cwd=ROOT,
        env=with_libcuda(os.environ["VTENSOR_SIMCUDA"], emit.parent) if rehearsal else None,
        stderr=stderr,
        stdout=subprocess.DEVNULL if case else None,
        start_new_session=not case,
    )
    try:
        return worker.wait(seconds + 3)  # it ends by itself where it can
    except subprocess.TimeoutExpired:
        return None
    finally:
        if worker.poll() is None:
            if case:
                worker.kill()
            else:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(worker.pid, signal.SIGKILL)
            try:
                worker.wait(10)  # one that hangs in the kernel is left behind
            except subprocess.TimeoutExpired:
                print(f"    a process of {module} does not end", flush=True)


def with_libcuda(library: str, folder: Path) -> dict[str, str]:
    """An environment in which a new process finds `library` as libcuda, through a link in that folder."""
    (folder / "libcuda.so.1").symlink_to(Path(library).resolve())
    others = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{others}" if others else str(folder)}


def read(emit: Path) -> list[dict[str, Any]]:
    """The findings so far; a line cut short by a death is left out."""
    if not emit.exists():
        return []
    found = []
    for line in emit.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def first_line(error: BaseException) -> str:
    """The kind of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def line_of(finding: dict[str, Any]) -> str:
    """A finding as a line of text."""
    kind = finding["kind"]
    if kind == "answer":
        return f"=> {finding['text']}"
    if kind == "skipped":
        return f"{finding['name']}: skipped ({finding['reason']})"
    if kind == "fact":
        return f"{finding['name']}: {finding['value']}"
    text = f"{finding['name']}: {number(finding['median'])} {finding['unit']}"
    text += f" (p10 {number(finding['p10'])}, p99 {number(finding['p99'])}, n {finding['n']})"
    if control := finding.get("control"):
        text += f", control {number(control['median'])} [{number(control['p10'])}, {number(control['p90'])}]"
    return text

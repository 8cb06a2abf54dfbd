"""What a question has in hand: the device, the driver, the time that is left, and where its findings go."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from benchmarks.harness import quantile
from benchmarks.report import number

from . import driver as drivers
from .device import Device

T = TypeVar("T")
Finding = dict[str, Any]
OUT_OF_TIME = "the time was over"  # why something was skipped
make_device: type[Device] = Device  # tests put a stand-in here
patience = 1.0  # times the seconds that a process may take; where tests run, others may need the cores
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class End:
    """How work in a process of its own ended, and what it had found until then."""

    code: int | None  # negative for a signal, None where it ran past its time
    findings: list[Finding]

    @property
    def facts(self) -> dict[str, Any]:
        return {found["name"]: found["value"] for found in self.findings if found["kind"] == "fact"}

    @property
    def text(self) -> str:
        error = "".join(f" ({found['text']})" for found in self.findings if found["kind"] == "error")
        if self.code is None:
            return "hung, and was killed" + error
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}" + error
        return f"exited with {self.code}" + error


class Session:
    """Findings are dicts with a `kind`: figure, fact, skipped, call, error. They are sent at once."""

    def __init__(self, send: Callable[[Finding], object], deadline: float, quick: bool) -> None:
        self._send, self.deadline, self.quick = send, deadline, quick
        self._sending = threading.Lock()

    @cached_property
    def device(self) -> Device:
        return make_device()

    @cached_property
    def driver(self) -> drivers.Driver:
        """The device's primary context is current from here on."""
        drivers.retain_context()
        return drivers.Driver()

    def pick(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def time_left(self) -> float:
        return self.deadline - time.time()

    def rounds(self, full: int, quick: int, seconds: float) -> Iterator[int]:
        """Counts rounds, at least two, until they are done or have taken `seconds` (or all that is left)."""
        end = time.time() + min(seconds, self.time_left() - 2)
        for done in range(self.pick(full, quick)):
            if done >= 2 and time.time() > end:
                return
            yield done

    def tensor_at(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return drivers.tensor_at(address, shape, dtype, self.device.name)

    # -- findings

    def note(self, kind: str, **finding: Any) -> None:
        with self._sending:
            self._send({"kind": kind, **finding})

    def forward(self, findings: Iterable[Finding], *kinds: str) -> None:
        """Takes over what was found elsewhere; of these kinds only, if any are named."""
        for finding in findings:
            if not kinds or finding["kind"] in kinds:
                self._send(finding)

    def figure(
        self, name: str, values: Iterable[float], unit: str = "us", method: str = "host clock"
    ) -> float:
        """Sends the spread of `values`; returns their median."""
        found = summary(values)
        self.note("figure", name=name, unit=unit, method=method, **found)
        return found["median"]

    def ratio(
        self,
        name: str,
        ours: Sequence[float],
        baseline: Sequence[float],
        control: Sequence[float],
        method: str,
    ) -> float:
        """Sends ours / baseline by round, beside the same of a second copy of the baseline; the median."""
        of = [summary(a / b for a, b in zip(side, baseline, strict=True)) for side in (ours, control)]
        self.note("figure", name=name, unit="x", method=method, **of[0], control=of[1])
        return of[0]["median"]

    def fact(self, name: str, value: Any) -> None:
        """A count, a yes or no, an error message."""
        self.note("fact", name=name, value=value)

    def skipped(self, name: str, reason: str) -> None:
        self.note("skipped", name=name, reason=reason)

    def apart(self, work: Callable[..., object], *arguments: Any, seconds: float) -> End:
        """``work(session, *arguments)``, a function of a module, in a process that may die or hang."""
        found: list[Finding] = []
        seconds = max(1.0, min(patience * seconds, self.time_left() - 1))
        function = f"{work.__module__}.{work.__name__}"
        return End(run_apart(function, arguments, seconds, self.quick, found.append), found)


def run_apart(
    function: str,
    arguments: Sequence[Any],
    seconds: float,
    quick: bool,
    send: Callable[[Finding], object],
    group: bool = False,
) -> int | None:
    """Runs ``module.function(session, *arguments)`` for at most `seconds`; its exit code, or None where it
    was killed. With `group` it has a process group of its own, which goes as a whole: cases are
    grandchildren."""
    receiver, sender = SPAWN.Pipe(duplex=False)
    deadline = time.time() + seconds
    process = SPAWN.Process(target=_in_process, args=(function, arguments, deadline, quick, sender, group))
    process.start()
    sender.close()
    try:
        with suppress(EOFError, OSError):  # the end of the process; a little later than its deadline
            while receiver.poll(max(0.0, deadline + 3 - time.time())):
                send(receiver.recv())
        process.join(max(0.0, deadline + 3 - time.time()))
        return process.exitcode
    finally:
        if process.exitcode is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL) if group else process.kill()
            process.join(10)  # one that hangs in the kernel is left behind


def _in_process(
    function: str, arguments: Sequence[Any], deadline: float, quick: bool, sender: Any, group: bool
) -> None:
    if group:
        os.setpgid(0, 0)
    faulthandler.enable()
    code = 0
    try:
        module, _, name = function.rpartition(".")
        work = getattr(importlib.import_module(module), name)
        work(Session(sender.send, deadline, quick), *arguments)
    except Exception as error:
        sender.send({"kind": "error", "text": first_line(error)})
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a device in error, or a stream that waits, would hold an orderly exit up


def summary(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    quantiles = {"median": 0.5, "p10": 0.1, "p90": 0.9, "p99": 0.99}
    return {name: quantile(ordered, q) for name, q in quantiles.items()} | {"n": len(ordered)}


def first_line(error: BaseException) -> str:
    """The kind of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def error_of(work: Callable[[], object]) -> str:
    """The first line of what it raises, or "none"."""
    try:
        work()
    except Exception as error:
        return first_line(error)
    return "none"


def line_of(finding: Finding) -> str:
    """A finding as a line of text; empty for a call of the recording."""
    match finding["kind"]:
        case "call":
            return ""
        case "error":
            return f"FAILED: {finding['text']}"
        case "skipped":
            return f"{finding['name']}: skipped ({finding['reason']})"
        case "fact":
            return f"{finding['name']}: {finding['value']}"
    text = f"{finding['name']}: {number(finding['median'])} {finding['unit']}"
    text += f" (p10 {number(finding['p10'])}, p99 {number(finding['p99'])}, n {finding['n']})"
    if control := finding.get("control"):
        text += f", control {number(control['median'])} [{number(control['p10'])}, {number(control['p90'])}]"
    return text

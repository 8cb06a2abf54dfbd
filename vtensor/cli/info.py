"""``python -m vtensor info``: what a bug report needs, in one block, without a path of the user's."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import vtensor
from vtensor._base.terminal import tell
from vtensor._base.units import byte_text
from vtensor.cli.drivers import Driver, drivers, libraries
from vtensor.cli.limits import Limit, limits
from vtensor.cli.selftest import Step, self_test

_TEST_PAGES = 64
_OPTIONS = re.compile(
    "VTENSOR_.*|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING)|PYTORCH_(CUDA_)?ALLOC_CONF|(OMP|MKL)_NUM_THREADS"
)
# Folders of the kernel and of the system's settings are the same for everyone.
_PATH_OF_THE_USER = re.compile(r"(?<![\w./])~?/(?!(?:proc|sys|dev|etc)/)[\w.@~+-]+(?:/[\w.@~+-]*)*")


def main(as_json: bool) -> int:
    """Prints the report. Returns 1 if a step of the self-test failed or no driver was found, else 0."""
    found = drivers()
    tests: dict[str, list[Step]] = {}
    for driver in found:
        if driver.found and driver.page_size:
            if driver.device != "cpu":  # making a CUDA context takes a second
                tell(f"testing {driver.device} ...\n")
            budget = _TEST_PAGES * driver.page_size
            with vtensor.Pool(driver.device, budget=budget, prefetch=0) as pool:
                tests[driver.device] = self_test(pool)
    ok = bool(tests) and all(step.ok for steps in tests.values() for step in steps)
    report = {
        "versions": _versions(),
        "options": {name: value for name, value in sorted(os.environ.items()) if _OPTIONS.fullmatch(name)},
        "drivers": found,
        "limits": limits(),
        "attention": libraries(),
        "self_test": tests,
        "ok": ok,
    }
    text = json.dumps(report, indent=1, default=asdict) if as_json else "\n".join(_lines(report))
    print(_PATH_OF_THE_USER.sub("PATH", text))
    return 0 if ok else 1


def _versions() -> dict[str, str]:
    return {
        "vtensor": vtensor.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "NVIDIA driver": _nvidia_driver(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "libc": " ".join(platform.libc_ver()),
        "cgroup": "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1 or none",
    }


def _nvidia_driver() -> str:
    try:
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return "none"
    return version.group() if version else "unknown"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for title in ("versions", "options"):
        named = ", ".join(f"{name} {value}" for name, value in report[title].items())
        yield f"{title.capitalize()}: {named or 'none in the environment'}"
    yield "\nDrivers"
    for driver in report["drivers"]:
        yield f"  {driver.device:<8}{_driver_line(driver)}"
    yield "\nLimits (! is likely to be reached)"
    yield from map(_limit_lines, report["limits"])
    yield "\nAttention"
    for library in report["attention"]:
        yield f"  {library.name:<30}{library.version or f'not here: {library.install}'}"
    for device, steps in report["self_test"].items():
        yield f"\nSelf-test on {device}"
        for step in steps:
            word = "ok" if step.ok else "WRONG"
            yield f"  {word:<7}{step.name:<9}{step.detail} ({step.milliseconds:.1f} ms)"


def _driver_line(driver: Driver) -> str:
    if not driver.found:
        return f"not here: {driver.detail}"
    return (
        f"{driver.detail}; pages of {_bytes(driver.page_size)}, at least {_bytes(driver.granularity)}; "
        f"budget {_bytes(driver.budget)}; other processes read pages by: {driver.sharing}"
    )


def _limit_lines(limit: Limit) -> str:
    def text(number: int) -> str:
        return _bytes(number) if limit.unit == "bytes" else f"{number:,}"

    value = "no limit" if limit.value is None else text(limit.value)
    used = f", {text(limit.used)} in use" if limit.used is not None and limit.value is not None else ""
    remedy = f"\n      to raise it: {limit.remedy}" if limit.remedy and limit.value is not None else ""
    return f"  {'!' if limit.low else ' '} {limit.name:<27}{value}{used}\n      {limit.meaning}{remedy}"


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else byte_text(number)

"""``python -m vtensor info``."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

import vtensor
from vtensor.cli.drivers import Driver, drivers, libraries
from vtensor.cli.limits import Limit, limits
from vtensor.cli.selftest import Step, self_test

_TEST_PAGES = 64


def main(as_json: bool) -> int:
    """Prints the report. Returns 1 if a step of the self-test failed or no driver was found, else 0."""
    found = drivers()
    tests: dict[str, list[Step]] = {}
    for driver in found:
        if driver.found and driver.page_size:
            if driver.device != "cpu":  # making a CUDA context takes a second
                print(f"testing {driver.device} ...", file=sys.stderr, flush=True)
            budget = _TEST_PAGES * driver.page_size
            with vtensor.Pool(driver.device, budget=budget, prefetch=0) as pool:
                tests[driver.device] = self_test(pool)
    ok = bool(tests) and all(step.ok for steps in tests.values() for step in steps)
    versions = {
        "vtensor": vtensor.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": f"{platform.system()} {platform.release()}",
    }
    if as_json:
        report: dict[str, Any] = {
            "versions": versions,
            "drivers": [asdict(driver) for driver in found],
            "limits": [asdict(limit) for limit in limits()],
            "attention": [asdict(library) for library in libraries()],
            "self_test": {device: [asdict(step) for step in steps] for device, steps in tests.items()},
            "ok": ok,
        }
        print(json.dumps(report, indent=1))
        return 0 if ok else 1
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print("\nDrivers")
    for driver in found:
        print(f"  {driver.device:<8}{_driver_line(driver)}")
    print("\nLimits (! is likely to be reached)")
    for limit in limits():
        print(_limit_lines(limit))
    print("\nAttention")
    for library in libraries():
        print(f"  {library.name:<30}{library.version or f'not here: {library.install}'}")
    for device, steps in tests.items():
        print(f"\nSelf-test on {device}")
        for step in steps:
            print(
                f"  {'ok' if step.ok else 'WRONG':<7}{step.name:<9}{step.detail} ({step.milliseconds:.1f} ms)"
            )
    return 0 if ok else 1


def _driver_line(driver: Driver) -> str:
    if not driver.found:
        return f"not here: {driver.detail}"
    return (
        f"{driver.detail}; pages of {_bytes(driver.page_size)}, at least {_bytes(driver.granularity)}; "
        f"budget {_bytes(driver.budget)}"
    )


def _limit_lines(limit: Limit) -> str:
    def text(number: int) -> str:
        return _bytes(number) if limit.unit == "bytes" else f"{number:,}"

    value = "no limit" if limit.value is None else text(limit.value)
    used = f", {text(limit.used)} in use" if limit.used is not None and limit.value is not None else ""
    remedy = f"\n      to raise it: {limit.remedy}" if limit.remedy and limit.value is not None else ""
    return f"  {'!' if limit.low else ' '} {limit.name:<27}{value}{used}\n      {limit.meaning}{remedy}"


def _bytes(number: int | None) -> str:
    if number is None:
        return "unknown"
    size, units = float(number), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.4g} {units[0]}"

"""``python -m benchmarks.gpu.worker MODULE``: one question, or one case of it, in a process of its own."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
import traceback
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.worker")
    parser.add_argument("module", help=".calls, or another module that has run(session)")
    parser.add_argument("--emit", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--case")
    parser.add_argument("--rehearsal", action="store_true")
    options = parser.parse_args()
    deadline = time.time() + options.seconds  # before the imports, which take seconds
    faulthandler.enable()

    from .device import CudaDevice, StandIn
    from .session import Session

    question = importlib.import_module(options.module, "benchmarks.gpu")
    device = StandIn() if options.rehearsal else CudaDevice()
    session = Session(options.module, device, options.emit, deadline)
    work = question.CASES[options.case] if options.case else question.run
    try:
        work(session)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a device in error, or a stream that waits, would hold an orderly exit up

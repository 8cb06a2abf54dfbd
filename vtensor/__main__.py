"""``python -m vtensor``."""

from __future__ import annotations

import io
import sys

from vtensor._base import starting
from vtensor.cli import main

if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that its encoding lacks
    status = main()
    starting.stop_at_once()  # the interpreter's end runs code of torch's too, and all is printed
    sys.exit(status)

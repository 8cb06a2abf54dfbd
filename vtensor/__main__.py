"""``python -m vtensor``."""

from __future__ import annotations

import io
import sys

from vtensor.cli import main

if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that its encoding lacks
    sys.exit(main())

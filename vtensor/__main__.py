"""``python -m vtensor``."""

from __future__ import annotations

import sys

from vtensor.cli import main

if __name__ == "__main__":
    sys.exit(main())

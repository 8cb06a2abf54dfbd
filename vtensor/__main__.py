"""``python -m vtensor demo``."""

from __future__ import annotations

import importlib
import sys

USAGE = """usage: python -m vtensor demo [--quick] [--json] [--picture FILE]

  demo   read a text and continue it with each of Hugging Face's caches and with VTensorCache"""


def main(arguments: list[str]) -> int:
    """Runs the command that the first argument names; returns the exit status."""
    if arguments[:1] != ["demo"]:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        # By name: the package itself needs nothing but torch, only its commands do.
        demo = importlib.import_module("vtensor.integrations.demo")
    except ModuleNotFoundError as missing:
        print(f"the demo needs {missing.name}: pip install 'vtensor[demo]'", file=sys.stderr)
        return 1
    status: int = demo.main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

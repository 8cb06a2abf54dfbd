"""``python -m vtensor.replay``."""

from __future__ import annotations

import argparse
import sys

from vtensor.replay.cli import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m vtensor.replay")
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))

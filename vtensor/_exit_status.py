"""The exit status of a command, from vtensor's errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from vtensor.errors import InvalidArgument, VTensorError

__all__ = ["exit_status"]


def exit_status(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """Runs a command and returns its exit status: 0, or 2 for invalid arguments, or 1 for other errors of
    vtensor. Prints the error to stderr."""
    try:
        run(arguments)
    except VTensorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 1
    return 0

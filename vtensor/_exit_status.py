"""From an error of vtensor's to the exit status of a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from vtensor.errors import InvalidArgument, VTensorError

__all__ = ["exit_status"]


def exit_status(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """Runs a command. 0; or, with the error on stderr, 2 for arguments that are not valid, and 1."""
    try:
        run(arguments)
    except VTensorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 1
    return 0

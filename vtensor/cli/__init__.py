"""The command line, ``python -m vtensor``: ``info``, ``top``, ``demo``, ``bench``, ``replay`` and
``replay-allocations``.

Exit statuses: 0 for success, 1 if something failed, 2 for invalid arguments, 130 after Ctrl-C, 141 if the
reader of the output has closed the pipe.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vtensor import __version__
from vtensor._base import starting
from vtensor._base.terminal import tell
from vtensor.errors import InvalidArgument, VTensorError

PIPE_CLOSED = 141  # SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command in ``arguments`` (``sys.argv[1:]`` by default). Returns the exit status."""
    try:
        try:
            starting.over()
            status = _run(sys.argv[1:] if arguments is None else list(arguments))
        except SystemExit as leaving:  # from argparse, for --help or a wrong argument
            status = leaving.code if isinstance(leaving.code, int) else 1
        print(end="", flush=True)  # now, because a closed pipe can still be handled here
        return status
    except KeyboardInterrupt:
        tell("stopped\n")
        return starting.INTERRUPTED
    except OSError as error:
        try:
            print(end="", flush=True)
        except OSError:  # the interpreter flushes again when it ends, and would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        tell(f"error: {error}\n")
        return 1
    except VTensorError as error:
        tell(f"error: {error}\n")
        return 2 if isinstance(error, InvalidArgument) else 1


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m vtensor", description="Tensors that grow in place.")
    parser.add_argument("--version", action="version", version=f"vtensor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info",
        help="this machine: drivers, limits and how to raise them, attention libraries, and a self-test",
        description="Drivers, limits, attention libraries, and a self-test on real memory.",
    )
    info.add_argument("--json", action="store_true", help="print the report as JSON")
    top = commands.add_parser(
        "top",
        help="the pools that share a budget on this machine, and what each has, live",
        description="The pools that share a budget, in all processes of this user, each second until Ctrl-C.",
    )
    top.add_argument("--once", action="store_true", help="print once, and end")
    top.add_argument("--json", action="store_true", help="print as JSON, a line each second")
    demo = commands.add_parser(
        "demo",
        help="a real text, read and continued with each cache",
        description="A real text, read and continued with each of Hugging Face's caches and ours.",
    )
    demo.add_argument("--quick", action="store_true", help="a few hundred tokens, to see that it runs")
    demo.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    picture = "where to save the picture (%(default)s)"
    demo.add_argument("--picture", type=Path, default=Path("vtensor-demo.png"), help=picture)
    # bench has a parser of its own, which also handles --help.
    commands.add_parser("bench", help="figures beside their baselines, from a checkout", add_help=False)
    if arguments[:1] not in (["info"], ["top"], ["demo"], ["bench"]):
        _imported("replay.cli").add_parser(commands)
        _imported("allocations.cli").add_parser(commands)

    options, rest = parser.parse_known_args(arguments)
    if rest and arguments[0] != "bench":
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
    runs: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
        "info": lambda options, rest: _imported("cli.info").main(as_json=options.json),
        "top": lambda options, rest: _imported("cli.top").main(once=options.once, as_json=options.json),
        "demo": lambda options, rest: _demo(options),
        "bench": lambda options, rest: _imported("cli.bench").main(rest),
        "replay": lambda options, rest: _imported("replay.cli").main(options) or 0,
        "replay-allocations": lambda options, rest: _imported("allocations.cli").main(options) or 0,
    }
    return runs[options.command](options, rest)


def _imported(name: str) -> Any:
    """A module of vtensor, by name: the package needs only torch, and only its commands need more."""
    return importlib.import_module(f"vtensor.{name}")


def _demo(options: argparse.Namespace) -> int:
    try:
        demo = _imported("integrations.demo")
    except ModuleNotFoundError as missing:
        raise VTensorError(f"[demo] it needs {missing.name}: pip install 'vtensor[demo]'") from missing
    status: int = demo.main(options)
    return status

"""``python -m vtensor replay-allocations TRACE``: recorded allocations with models of allocators."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vtensor._base.terminal import Progress
from vtensor.allocations.formats import read_allocations
from vtensor.allocations.models import MODELS
from vtensor.allocations.real import real
from vtensor.allocations.replay import ROOM, device_needed
from vtensor.allocations.report import Comparison, picture, table, to_json

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DESCRIPTION = f"""Passes recorded allocations to models of torch's native allocator, of its expandable
segments and of vtensor's allocator. Finds the smallest device on which each serves all of them, as a multiple
of the peak of live bytes, and counts driver calls there and on a device of {ROOM:g} times the peak. No memory
is mapped, except with --allocator vtensor, and no device is needed."""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replay-allocations",
        help="the smallest device for recorded allocations, by allocator",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="+",
        help="a pickle of torch.cuda.memory._snapshot() (.pickle), a torch.profiler trace with memory "
        "events (.json, .json.gz), or the plain format: lines of event,id,bytes,stream (.csv, .csv.gz, "
        ".csv.xz)",
    )
    parser.add_argument(
        "--allocator",
        action="append",
        choices=[*MODELS, "vtensor"],
        help="may be given several times (default: all models). vtensor is the allocator itself: "
        "it maps real memory of this machine, as much as was live, and takes minutes",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="the device, such as cuda:0 or cpu (default: the only one)"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="also draw a picture (.png, .svg, ...)")


def main(arguments: argparse.Namespace) -> None:
    traces = {path: read_allocations(path, arguments.device) for path in arguments.traces}
    comparisons = []
    with Progress() as progress:
        for path, trace in traces.items():
            needs = [
                device_needed(name, real if name == "vtensor" else MODELS[name], trace, progress)
                for name in dict.fromkeys(arguments.allocator or MODELS)
            ]
            comparisons.append(Comparison(Path(path).name, trace, needs))
    if arguments.json:
        print(to_json(comparisons))
    else:
        print("\n\n".join(map(table, comparisons)))
    if arguments.plot:  # last: without a picture the figures stay
        picture(comparisons, arguments.plot)

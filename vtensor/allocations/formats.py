"""Reads recorded allocations in any of three formats, which the file's suffix selects."""

from __future__ import annotations

import lzma
import os
import zlib
from pathlib import Path

from vtensor.allocations.events import AllocationTrace, malformed
from vtensor.allocations.plain import read_plain
from vtensor.allocations.profiler import read_profile
from vtensor.allocations.snapshot import read_snapshot


def read_allocations(path: str | os.PathLike[str], device: str | None = None) -> AllocationTrace:
    """Reads a recording of allocations.

    Args:
        path: a pickle of ``torch.cuda.memory._snapshot()`` (``.pickle``, ``.pkl``), a trace of
            ``torch.profiler`` with memory events (``.json``, ``.json.gz``), or the plain format (``.csv``,
            ``.csv.gz``, ``.csv.xz``).
        device: the device of the allocations, such as ``"cuda:0"``; may be left out if there is only one.

    Raises:
        InvalidArgument: if the file has none of the formats, cannot be read or has no allocation, or if an
            event is malformed.
    """
    file = Path(path)
    name = file.name.lower()
    try:
        if name.endswith((".pickle", ".pkl")):
            trace = read_snapshot(file, device)
        elif name.endswith((".json", ".json.gz")):
            trace = read_profile(file, device)
        elif name.endswith((".csv", ".csv.gz", ".csv.xz")):
            if device is not None:
                raise malformed(f"--device {device}: the plain format has one device; leave it out")
            trace = read_plain(file)
        else:
            raise malformed(
                f"{file}: pass a snapshot (.pickle), a torch.profiler trace (.json, "
                ".json.gz) or the plain format (.csv, .csv.gz, .csv.xz)"
            )
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:  # damaged archives
        raise malformed(f"{file} cannot be read: {error}") from error
    if not trace.events:
        raise malformed(f"{file} has no allocation: nothing to replay")
    return trace

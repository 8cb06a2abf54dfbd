"""What the trace costs ``extend(1)`` inside a page, in instructions that callgrind counts (I16).

Off: a function with a point against the same function without, both in C++, times the points that an extend
passes. On: extend while a recording runs against extend without one. A quick run counts the point
alone, because under callgrind torch takes ten seconds to import.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .harness import Bar, Figure, Settings, Skipped, count
from .native import build_trace_points

TIMES = 200

# valgrind keeps the kernel's clock (the vDSO) from its programs, so callgrind misses its instructions. A span
# reads it twice; single steps through clock_gettime(CLOCK_MONOTONIC) on x86-64 were 82.
CLOCK = 2 * 82

POINTS = """
import ctypes, sys
library, times = ctypes.CDLL(sys.argv[1]), int(sys.argv[2])
library.count_points(times)
"""

EXTENDS = """
import torch, vtensor
pool = vtensor.Pool("cpu", page_size=2 << 20)  # 512 tokens
t = vtensor.empty(1, 1, 8, 128, grow_dim=1, capacity=512, dtype=torch.float32, device="cpu", pool=pool)

def extend(n):
    for _ in range(n):
        t.extend(1)

def counted(name, n):
    t.truncate(1)
    extend(20)
    library.begin()
    extend(n)
    library.end(name)

for n in (times, 2 * times):
    counted(b"extend off %d" % n, n)
    with vtensor.trace.record():
        counted(b"extend on %d" % n, n)
t.truncate(1)
with vtensor.trace.record() as recording:
    extend(times)
print(len(recording.events()))
"""


def run(settings: Settings) -> list[Figure]:
    counts, events = instructions(POINTS if settings.quick else POINTS + EXTENDS)
    off, on = ((counts[state] - counts["bare"]) / TIMES for state in ("off", "on"))
    figures = [
        count("a trace point, off", "no point", off, "instructions", Bar(100)),
        count("a trace point, on", "no point", on + CLOCK, "instructions", Bar(1000)),
    ]
    if settings.quick:
        return figures
    # What a loop of twice the length takes more: without what is the same for both.
    extend, recorded = (
        (counts[f"extend {state} {2 * TIMES}"] - counts[f"extend {state} {TIMES}"]) / TIMES
        for state in ("off", "on")
    )
    points = events / TIMES
    more = recorded - extend + points * CLOCK
    against = f"its {extend:,.0f} instructions"
    return [
        *figures,
        count("extend(1), tracing off", against, 100 * points * off / extend, "% more", Bar(1)),
        count("extend(1), tracing on", against, 100 * more / extend, "% more", Bar(10)),
    ]


def instructions(program: str) -> tuple[dict[str, int], int]:
    """Runs a program of Python under callgrind: instructions between its marks, by name, and what it prints,
    or 0."""
    valgrind = shutil.which("valgrind")
    if valgrind is None or not Path("/usr/include/valgrind/callgrind.h").exists():
        raise Skipped("no valgrind with its callgrind.h: install it (Debian: apt-get install valgrind)")
    with tempfile.TemporaryDirectory() as folder:
        library, out = Path(folder) / "trace_points.so", Path(folder) / "counts"
        build_trace_points(library)
        callgrind = [valgrind, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}", "-q"]
        finished = subprocess.run(
            [*callgrind, sys.executable, "-c", program, str(library), str(TIMES)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
        )
        counts = {}
        for part in Path(folder).glob("counts.*"):
            text = part.read_text()
            if name := re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE):
                counts[name[1]] = int(re.findall(r"^totals: (\d+)$", text, re.MULTILINE)[0])
    return counts, int(finished.stdout or 0)

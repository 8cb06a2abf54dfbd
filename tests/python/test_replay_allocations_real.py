"""The allocator itself in a replay: real pages, and no more of them than its model takes."""

from __future__ import annotations

import random

from vtensor.allocations import MODELS, device_needed
from vtensor.allocations.events import AllocationTrace, Event
from vtensor.allocations.plain import write_plain
from vtensor.allocations.real import real
from vtensor.cli import main

MIB = 1 << 20


def trace(seed: int) -> AllocationTrace:
    rng, events, live = random.Random(seed), [], []
    for number in range(120):
        if live and (number > 100 or rng.random() < 0.45):
            events.append(live.pop(rng.randrange(len(live)))._replace(kind="free"))
        else:
            nbytes = rng.choice([4096, 300_000, 2 * MIB, 3 * MIB + 512, 6 * MIB, 9 * MIB - 4096])
            live.append(Event("alloc", number, nbytes, 0))
            events.append(live[-1])
    return AllocationTrace(events)


def test_it_needs_what_its_model_says():
    for seed in range(3):
        recorded = trace(seed)
        need = device_needed("vtensor", real, recorded)
        model = device_needed("stitched", MODELS["stitched"], recorded)
        assert model.smallest - 2 * MIB <= need.smallest <= model.smallest + 2 * MIB
        assert need.with_room.seconds > 0 and sum(need.with_room.calls.values()) > 0
        assert max(need.run.device_bytes) <= need.smallest


def test_the_command(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    write_plain(trace(0), path)
    assert main(["replay-allocations", str(path), "--allocator", "vtensor"]) == 0
    printed = capsys.readouterr().out
    assert "vtensor" in printed and "real memory of the host" in printed and "mmap" in printed

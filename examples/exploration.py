"""A ring buffer on a VTensor: its trace, pictures of its memory, and a property test.

    python examples/exploration.py [folder for the pictures]

Needs matplotlib and hypothesis: ``pip install 'vtensor[plot]' hypothesis``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vtensor
from vtensor import plot, testing


class Ring:
    """The last ``size`` rows that were put in, as one contiguous tensor."""

    def __init__(self, size: int, width: int, pool: vtensor.Pool) -> None:
        self.size = size
        # Front shrinks use the capacity up. Then the pages move to fresh addresses; no byte is copied.
        self.rows = vtensor.empty(0, width, grow_dim=0, capacity=4 * size, pool=pool, when_full="move")

    def put(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows.append(rows[-self.size :])
        if self.rows.length > self.size:
            self.rows.shrink(self.rows.length - self.size, front=True)
        return self.rows


def record(pool: vtensor.Pool, folder: Path) -> None:
    """Records and draws the memory of a ring while 20 times its size passes through it."""
    ring = Ring(1000, 64, pool)
    with vtensor.trace.record() as recording:
        for start in range(0, 20_000, 100):
            ring.put(torch.arange(start, start + 100.0)[:, None].expand(100, 64))
    assert ring.rows[:, 0].equal(torch.arange(19_000, 20_000.0))
    print(recording)
    print(recording.summary())
    recording.export(folder / "ring.json.gz")  # for ui.perfetto.dev
    for name, draw, what in (
        ("pages", plot.page_map, ring.rows),
        ("memory", plot.memory, recording),
        ("timeline", plot.timeline, recording),
    ):
        draw(what).figure.savefig(folder / f"{name}.png")
    mapped, needed = ring.rows.nbytes_mapped, ring.rows.numel() * ring.rows.element_size()
    print(f"{needed:,} bytes in the ring, {mapped:,} mapped, {ring.rows.nbytes_reserved:,} reserved")


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 40), batches=st.lists(st.integers(0, 60), max_size=20))
def test_any_ring(size: int, batches: list[int]) -> None:
    """The ring has the last rows of any batches, and leaves no memory behind."""
    with testing.host_pool(page_size=4096, budget="1MiB") as pool, testing.assert_no_leaks(pool):
        ring, expected, number = Ring(size, 128, pool), torch.empty(0, 128), 0
        for batch in batches:
            rows = torch.arange(number, number + batch, dtype=torch.float32)[:, None].expand(batch, 128)
            number += batch
            expected = torch.cat([expected, rows])[-size:]
            assert torch.equal(ring.put(rows), expected)
        ring.rows.close()


def test_a_ring_survives_any_refusal() -> None:
    """If the n-th driver call is refused, for any n, the ring keeps its rows."""
    for n in range(1000):
        with testing.host_pool(page_size=4096, budget="1MiB") as pool:
            ring = Ring(8, 1024, pool)
            ring.put(torch.ones(8, 1024))
            with testing.fail_after(pool, n) as refusals:
                try:
                    ring.put(torch.ones(8, 1024))
                except vtensor.DriverError as error:
                    assert error.call in refusals.calls
            assert ring.rows.eq(1).all()
        if not refusals:
            return
    raise AssertionError("calls were refused without end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("ring"), help="for the pictures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with vtensor.Pool("cpu", page_size=4096, budget="64MiB") as pool:
        record(pool, folder)
    test_any_ring()
    test_a_ring_survives_any_refusal()
    print(f"pictures and a trace for Perfetto are in {folder}/")


if __name__ == "__main__":
    main()

"""Models of allocators: their accounting, torch's behaviour by hand, and the bars over real traces."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import ROOT
from vtensor import InvalidArgument, OutOfPages
from vtensor.allocations import MODELS, device_needed, read_allocations
from vtensor.allocations.events import AllocationTrace, Event
from vtensor.allocations.models import ExpandableAllocator, NativeAllocator, StitchedAllocator
from vtensor.allocations.plain import write_plain
from vtensor.allocations.replay import replay_allocations
from vtensor.cli import main

MIB = 1 << 20
PAGE = 2 * MIB
AMPLE = 1 << 40
TRACES = sorted((ROOT / "benchmarks" / "traces").glob("*.csv.xz"))
MAKERS = {
    "native": NativeAllocator,
    "expandable": ExpandableAllocator,
    "expandable in small pages": lambda capacity: ExpandableAllocator(capacity, page=PAGE),
    "stitched": StitchedAllocator,
    "stitched, whole pages": lambda capacity: StitchedAllocator(capacity, most_loss=1.0),
}

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(MIB // 2, 3 * MIB),
    st.integers(1, 24).map(lambda pages: pages * PAGE),
    st.integers(PAGE, 48 * MIB),
)


@st.composite
def traces(draw: st.DrawFn) -> AllocationTrace:
    """Allocations and frees in any order, of several streams."""
    live: dict[int, Event] = {}
    events = []
    for i in range(draw(st.integers(1, 40))):
        if live and draw(st.booleans()):
            begun = live.pop(draw(st.sampled_from(sorted(live))))
            events.append(begun._replace(kind="free"))
        else:
            live[i] = Event("alloc", i, draw(SIZES), draw(st.integers(0, 2)))
            events.append(live[i])
    return AllocationTrace(events)


def held_once_emptied(allocator) -> int:
    """Has an allocator give back all free pages. Returns the bytes that it keeps for no other allocation."""
    if isinstance(allocator, NativeAllocator):
        allocator.release()
        return allocator.device_bytes
    allocator.make_room(AMPLE)
    return allocator.device_bytes - PAGE * getattr(allocator, "_unmapped", 0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(trace=traces(), pages=st.integers(1, 120))
def test_every_model_keeps_its_books(make, trace: AllocationTrace, pages: int) -> None:
    allocator = make(pages * PAGE)
    live: dict[int, tuple[int, Event]] = {}
    refused = False
    for event in trace.events:
        if event.kind == "free":
            if event.id in live:
                address, begun = live.pop(event.id)
                allocator.free(address, begun.bytes, begun.stream)
            continue
        try:
            live[event.id] = allocator.allocate(event.bytes, event.stream), event
        except OutOfPages:
            refused = True  # what is live stays, and later events find the books whole
        finally:
            ranges = sorted((address, address + begun.bytes) for address, begun in live.values())
            assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges)), "live allocations overlap"
            held = sum(begun.bytes for _, begun in live.values())
            assert held <= allocator.device_bytes <= pages * PAGE
            assert allocator.device_bytes % PAGE == 0
    for address, begun in live.values():
        allocator.free(address, begun.bytes, begun.stream)
    assert held_once_emptied(allocator) == 0
    if not refused:  # torch keeps a range that was reserved for what was then refused
        calls = allocator.calls
        assert calls.get("cuMemAddressReserve", 0) == calls.get("cuMemAddressFree", 0)


@pytest.mark.parametrize("name", MODELS)
@given(trace=traces())
def test_the_smallest_device_is_one_page_more_than_too_small(name: str, trace: AllocationTrace) -> None:
    need = device_needed(name, MODELS[name], trace)
    assert need.of_peak >= 1
    assert max(need.run.device_bytes) <= need.smallest
    with MODELS[name](need.smallest) as allocator:
        assert replay_allocations(trace, allocator) == need.run
    if need.smallest - PAGE >= need.peak:
        with MODELS[name](need.smallest - PAGE) as allocator:
            assert replay_allocations(trace, allocator) is None


@given(trace=traces())
def test_a_model_with_one_allocation_at_a_time_loses_a_page_at_most(trace: AllocationTrace) -> None:
    alone = [event for event in trace.events if event.kind == "alloc"]
    events = [each for event in alone for each in (event, event._replace(kind="free"))]
    need = device_needed("stitched", MODELS["stitched"], AllocationTrace(events))
    assert need.smallest < need.peak + PAGE


# ---- torch's native allocator ----


def test_native_packs_small_allocations_into_2_mib() -> None:
    native = NativeAllocator(AMPLE)
    first = native.allocate(100, 0)
    assert native.allocate(MIB, 0) == first + 512
    assert native.device_bytes == 2 * MIB
    native.allocate(MIB, 0)  # 2 MiB less 512 bytes less 1 MiB are left: too few
    assert native.device_bytes == 4 * MIB
    assert native.calls == {"cudaMalloc": 2}


def test_native_splits_20_mib_for_less_than_10() -> None:
    native = NativeAllocator(AMPLE)
    first = native.allocate(MIB + 1, 0)
    assert native.device_bytes == 20 * MIB
    assert native.allocate(10 * MIB, 0) == first + MIB + 512, "what is left of the 20 MiB is large enough"
    assert native.device_bytes == 20 * MIB
    assert native.allocate(10 * MIB, 0) not in range(first, first + 20 * MIB)
    assert native.device_bytes == 30 * MIB, "10 MiB and more are asked for as they are"
    native.allocate(10 * MIB + 1, 0)
    assert native.device_bytes == 42 * MIB, "in multiples of 2 MiB"


def test_native_leaves_a_rest_of_up_to_1_mib() -> None:
    native = NativeAllocator(AMPLE)
    address = native.allocate(12 * MIB, 0)
    native.free(address, 12 * MIB, 0)
    assert native.allocate(11 * MIB, 0) == address
    native.free(address, 11 * MIB, 0)
    assert native.allocate(11 * MIB - 512, 0) == address
    assert native.allocate(MIB + 512, 0) == address + 11 * MIB - 512, "over 1 MiB it is split"
    assert native.calls == {"cudaMalloc": 1}


def test_native_takes_the_smallest_that_fits() -> None:
    native = NativeAllocator(AMPLE)
    large, small = native.allocate(40 * MIB, 0), native.allocate(30 * MIB, 0)
    native.free(large, 40 * MIB, 0)
    native.free(small, 30 * MIB, 0)
    assert native.allocate(30 * MIB, 0) == small


def test_native_joins_free_neighbours() -> None:
    native = NativeAllocator(AMPLE)
    parts = [native.allocate(6 * MIB, 0) for _ in range(3)]
    native.free(parts[0], 6 * MIB, 0)
    native.free(parts[1], 6 * MIB, 0)
    assert native.allocate(12 * MIB, 0) == parts[0]
    native.free(parts[2], 6 * MIB, 0)
    assert native.allocate(8 * MIB, 0) == parts[2], "joined with the 2 MiB at the end"
    assert native.calls == {"cudaMalloc": 1}


def test_native_frees_whole_cached_memory_before_it_refuses() -> None:
    native = NativeAllocator(24 * MIB)
    native.free(native.allocate(20 * MIB, 0), 20 * MIB, 0)
    native.allocate(24 * MIB, 1)
    assert native.calls == {"cudaMalloc": 3, "cudaFree": 1}

    native = NativeAllocator(24 * MIB)
    native.allocate(2 * MIB, 0)  # of 20 MiB, which stay taken
    with pytest.raises(OutOfPages, match="20,971,520 are taken"):
        native.allocate(24 * MIB, 0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("size", [512, 20 * MIB])
def test_what_a_stream_frees_no_other_stream_is_given(make, size: int) -> None:
    allocator = make(AMPLE)
    address = allocator.allocate(size, 1)
    allocator.free(address, size, 1)
    before = dict(allocator.calls)
    assert allocator.allocate(size, 2) != address
    assert allocator.calls != before
    before = dict(allocator.calls)
    assert allocator.allocate(size, 1) == address
    assert allocator.calls == before, "a freed size asked for again needs no driver call"


# ---- torch's expandable segments ----


def test_expandable_maps_pages_of_20_and_of_2_mib() -> None:
    expandable = ExpandableAllocator(AMPLE)
    first = expandable.allocate(30 * MIB, 0)
    assert expandable.device_bytes == 40 * MIB
    assert expandable.allocate(10 * MIB, 0) == first + 30 * MIB
    assert expandable.calls == {
        "cuMemAddressReserve": 1,
        "cuMemCreate": 2,
        "cuMemMap": 2,
        "cuMemSetAccess": 1,
    }
    expandable.allocate(MIB, 0)
    assert expandable.device_bytes == 42 * MIB
    assert ExpandableAllocator(AMPLE, page=PAGE).allocate(30 * MIB, 0)


def test_expandable_grows_a_free_end() -> None:
    expandable = ExpandableAllocator(AMPLE)
    address = expandable.allocate(20 * MIB, 0)
    expandable.free(address, 20 * MIB, 0)
    assert expandable.allocate(30 * MIB, 0) == address
    assert expandable.device_bytes == 40 * MIB


def test_expandable_counts_an_end_that_can_grow_as_large() -> None:
    expandable = ExpandableAllocator(AMPLE)
    hole = expandable.allocate(8 * MIB, 0)
    expandable.allocate(8 * MIB, 0)
    expandable.free(hole, 8 * MIB, 0)
    assert expandable.allocate(3 * MIB, 0) == hole, "and not the 4 MiB at the end"


def test_expandable_unmaps_whole_free_pages_before_it_refuses() -> None:
    for capacity, runs in ((62, True), (58, False)):
        expandable = ExpandableAllocator(capacity * MIB)
        first = expandable.allocate(30 * MIB, 0)
        second = expandable.allocate(10 * MIB, 0)
        expandable.free(first, 30 * MIB, 0)
        if runs:  # the first page of the two goes; half of the other is free and stays
            assert expandable.allocate(40 * MIB, 0) == second + 10 * MIB
            assert expandable.device_bytes == 60 * MIB
            assert expandable.calls["cuMemUnmap"] == 1
        else:
            with pytest.raises(OutOfPages):
                expandable.allocate(40 * MIB, 0)
            assert expandable.device_bytes == 20 * MIB


def test_expandable_fills_the_lowest_gap_first() -> None:
    expandable = ExpandableAllocator(80 * MIB)
    first = expandable.allocate(20 * MIB, 0)
    expandable.allocate(20 * MIB, 0)
    expandable.free(first, 20 * MIB, 0)
    assert held_once_emptied(expandable) == 20 * MIB
    assert expandable.allocate(20 * MIB, 0) == first


# ---- vtensor's allocator ----


def test_stitched_serves_a_large_allocation_from_scattered_pages() -> None:
    stitched = StitchedAllocator(3 * PAGE)
    pages = [stitched.allocate(PAGE, 0) for _ in range(3)]
    stitched.free(pages[0], PAGE, 0)
    stitched.free(pages[2], PAGE, 0)
    stitched.allocate(2 * PAGE, 0)
    assert stitched.device_bytes == 3 * PAGE
    assert stitched.calls["cuMemCreate"] == 3, "pages move, and none is made"


def test_stitched_moves_pages_between_streams_and_kinds() -> None:
    stitched = StitchedAllocator(2 * PAGE)
    for nbytes, stream in ((2 * PAGE, 1), (PAGE + MIB, 2), (100, 3), (2 * PAGE, 0)):
        stitched.free(stitched.allocate(nbytes, stream), nbytes, stream)
    assert stitched.calls["cuMemCreate"] == 2


def test_stitched_moves_only_the_pages_that_are_missing() -> None:
    stitched = StitchedAllocator(8 * PAGE)
    address = stitched.allocate(8 * PAGE, 0)
    stitched.free(address, 8 * PAGE, 0)
    stitched.allocate(3 * PAGE, 1)
    before = dict(stitched.calls)
    stitched.allocate(5 * PAGE, 0)
    assert stitched.calls == before


def test_stitched_cuts_what_would_lose_much_of_a_page() -> None:
    def held(most_loss: float) -> int:
        stitched = StitchedAllocator(AMPLE, most_loss)
        for _ in range(4):
            stitched.allocate(5 * MIB // 2, 0)
        return stitched.device_bytes

    assert held(1 / 1024) == 10 * MIB
    assert held(1.0) == 16 * MIB


# ---- recorded training ----


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_stitched_needs_hardly_more_than_the_peak(path: Path) -> None:
    trace = read_allocations(path)
    stitched, expandable = (
        device_needed(name, MODELS[name], trace) for name in ("stitched", "expandable-2MiB")
    )
    assert stitched.of_peak <= 1.002
    assert stitched.smallest <= expandable.smallest


def test_there_are_traces_of_each_way_of_training() -> None:
    assert [path.name for path in TRACES] == [
        f"train-{way}.csv.xz" for way in ("checkpointing", "lengths", "offload")
    ]


@pytest.mark.parametrize("way", ["lengths", "checkpointing", "offload"])
def test_the_recorder_records(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import record_allocations as recorder

    for name, value in {"LAYERS": 2, "HIDDEN": 32, "VOCABULARY": 64, "LONGEST": 80, "STEPS": 2}.items():
        monkeypatch.setattr(recorder, name, value)
    trace = recorder.record(way)
    assert trace == recorder.record(way), "the same each time"
    assert len(trace.events) > 500
    assert all(event.bytes % recorder.SCALE == 0 for event in trace.events)
    assert any("scale" in note for note in trace.notes)


# ---- the command ----


def command(*words: str) -> int:
    return main(["replay-allocations", *words])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    write_plain(AllocationTrace([Event("alloc", 1, 3 * PAGE, 0), Event("alloc", 2, 100, 1)]), path)
    return path


def test_the_table(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(small), "--allocator", "native", "--allocator", "stitched") == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "small.csv: 2 events, 2 streams, at most 6 MiB live"
    assert "stitched            8 MiB   1.3333" in shown
    assert "native            too small" not in shown
    assert "expandable" not in shown


def test_json_and_a_picture(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "picture.png"
    small = small.rename(tmp_path / "$a_{$\udcff.csv")
    assert command(str(small), str(small), "--json", "--plot", str(drawn)) == 0
    result = json.loads(capsys.readouterr().out)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert [each["name"] for each in result[0]["allocators"]] == list(MODELS)
    assert result[0]["peak_bytes"] == 3 * PAGE + 100
    native = result[0]["allocators"][0]
    assert native["smallest_device_bytes"] == 22 * MIB  # 20 for the large one and 2 for the small one
    assert native["calls"] == {"cudaMalloc": 2}
    assert native["calls_with_room"] is None


def test_what_cannot_be_replayed_or_drawn(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(tmp_path / "missing.csv")) == 2
    assert "missing.csv cannot be read" in capsys.readouterr().err
    assert command(str(small), "--plot", str(tmp_path / "none" / "picture.png")) == 1
    shown = capsys.readouterr()
    assert "cannot be drawn" in shown.err and "stitched" in shown.out  # the figures stay
    with pytest.raises(InvalidArgument, match="allocated again"):
        twice = tmp_path / "twice.csv"
        twice.write_text("event,id,bytes,stream\nalloc,1,1,0\nalloc,1,1,0\n")
        read_allocations(twice)


def test_an_allocator_of_any_other_kind_can_be_replayed(small: Path) -> None:
    class Bump:
        def __init__(self, capacity: int) -> None:
            self.capacity, self.device_bytes, self.calls = capacity, 0, {"bump": 0}

        def allocate(self, bytes: int, stream: int) -> int:
            if self.device_bytes + bytes > self.capacity:
                raise OutOfPages("full")
            self.calls["bump"] += 1
            self.device_bytes += bytes
            return self.device_bytes

        def free(self, address: int, bytes: int, stream: int) -> None:
            pass

    need = device_needed("bump", lambda capacity: nullcontext(Bump(capacity)), read_allocations(small))
    assert need.smallest == 4 * PAGE and need.run.calls == {"bump": 2}

"""Recorded allocations in three formats: what is read and refused, and that a file runs nothing."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from test_replay_allocations import traces
from vtensor import InvalidArgument
from vtensor.allocations import read_allocations
from vtensor.allocations.events import AllocationTrace, Event
from vtensor.allocations.plain import write_plain

# ---- the plain format ----


@given(trace=traces(), archive=st.sampled_from(["", ".gz", ".xz", ".GZ", ".XZ"]))
def test_a_trace_is_read_as_it_was_written(
    trace: AllocationTrace, archive: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("plain") / f"trace.csv{archive}"
    trace = AllocationTrace(trace.events, ["a note", "another"])
    write_plain(trace, path)
    written = path.read_bytes()
    assert written.startswith({".gz": b"\x1f\x8b", ".xz": b"\xfd7z"}.get(archive.lower(), b"#"))
    assert read_allocations(path) == trace
    write_plain(read_allocations(path), path)
    assert path.read_bytes() == written


def plain(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(["event,id,bytes,stream", *lines]))
    return path


def test_live_bytes_and_streams(tmp_path: Path) -> None:
    trace = read_allocations(
        plain(tmp_path, "alloc,7,512,3", "", "alloc,8,100,0", "free,7,512,3", "free,8,,")
    )
    assert trace.live_bytes() == [512, 612, 100, 0]
    assert trace.streams == 2


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["alloc,1,5"], "line 2: 3 fields"),
        (["malloc,1,5,0"], "line 2: event 'malloc'"),
        (["alloc,x,5,0"], "line 2: id 'x'"),
        (["alloc,1,-5,0"], "line 2: bytes '-5'"),
        (["alloc,1,9999999999999999,0"], "line 2: 9,999,999,999,999,999 bytes"),
        (["alloc,١,5,0"], "line 2: id"),
        (["free,1,,"], "line 2: 1 is freed and not allocated"),
        (["alloc,1,5,0", "free,1,,", "free,1,,"], "line 4: 1 is freed and not allocated"),
        (["alloc,1,5,0", "", "alloc,1,5,0"], "line 4: 1 is allocated again"),
        (["alloc,1,5,0", "free,1,6,0"], "line 3: 1 is freed with 6 bytes"),
        (["alloc,1,5,0", "free,1,5,2"], "line 3: 1 is freed with 5 bytes of stream 2"),
        ([], "has no allocation"),
    ],
)
def test_malformed_lines(lines: list[str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_allocations(plain(tmp_path, *lines))
    assert reason in str(refused.value)


@given(
    data=st.binary(max_size=300),
    name=st.sampled_from(["a.csv", "a.csv.gz", "a.csv.xz", "a.json", "a.json.gz", "a.pkl"]),
)
def test_any_bytes_are_refused_with_a_sentence(
    data: bytes, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bytes") / name
    path.write_bytes(data)
    with pytest.raises(InvalidArgument, match=r"^\[replay-allocations\] .*" + name):
        read_allocations(path)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.xz", "a.json.gz"])
def test_a_damaged_archive(name: str, tmp_path: Path) -> None:
    compress = lzma.compress if name.endswith(".xz") else gzip.compress
    whole = compress(b"event,id,bytes,stream\n" + b"alloc,1,5,0\nfree,1,,\n" * 500)
    for data in (whole[:-9], whole[:20], whole[:30] + b"\xff\xff" + whole[32:]):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidArgument, match="cannot be read"):
            read_allocations(tmp_path / name)


def test_what_is_no_trace(tmp_path: Path) -> None:
    for name, reason in (
        ("a.txt", "pass a snapshot"),
        ("a.csv", "cannot be read"),
        ("a.pkl", "cannot be read"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            read_allocations(tmp_path / name)
    with pytest.raises(InvalidArgument, match="the columns are 'time,size'"):
        (tmp_path / "a.csv").write_text("time,size\n")
        read_allocations(tmp_path / "a.csv")
    with pytest.raises(InvalidArgument, match="one device; leave it out"):
        read_allocations(plain(tmp_path, "alloc,1,5,0"), "cuda:0")


# ---- torch.cuda.memory._snapshot() ----


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    frames = [{"filename": "train.py", "line": 3, "name": "step"}]
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": frames}


def snapshot(folder: Path, *histories: list[Any], ranges: Any = ()) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": list(ranges), "device_traces": list(histories)}))
    return path


def test_a_snapshot_frees_memory_when_torch_can_use_it_again(tmp_path: Path) -> None:
    history = [
        entry("segment_alloc", 4096, 2 << 20, 7),
        entry("alloc", 4096, 600, 7),
        entry("free_requested", 4096, 600, 7),
        entry("alloc", 8192, 100, 0),
        entry("free_completed", 4096, 600, 7),
        entry("alloc", 4096, 500, 7),
        entry("snapshot", 0, 600),
        {"action": "oom", "size": 5, "stream": 0, "device_free": 1},
    ]
    first, second, third = Event("alloc", 1, 600, 7), Event("alloc", 2, 100, 0), Event("alloc", 3, 500, 7)
    ended = first._replace(kind="free")
    assert read_allocations(snapshot(tmp_path, history)).events == [first, second, ended, third]
    history = [each for each in history if each["action"] != "free_completed"]
    assert read_allocations(snapshot(tmp_path, history)).events == [first, ended, second, third]


def test_what_was_allocated_before_the_history_comes_first(tmp_path: Path) -> None:
    history = [entry("alloc", 9000, 70), entry("free_completed", 5000, 60, 2)]
    ranges = [
        {
            "address": 1000,
            "stream": 4,
            "device": 0,
            "blocks": [
                {"size": 512, "requested_size": 500, "state": "active_allocated"},
                {"size": 512, "state": "inactive"},
                {"size": 1024, "requested_size": 999, "state": "active_awaiting_free"},
            ],
        },
        {"address": 1, "device": 1, "blocks": [{"size": 1, "state": "active_allocated"}]},
        {
            "address": 9000,
            "device": 0,
            "blocks": [{"address": 9000, "size": 512, "state": "active_allocated"}],
        },
    ]
    assert read_allocations(snapshot(tmp_path, history, ranges=ranges)).events == [
        Event("alloc", 1, 500, 4),  # at 1000
        Event("alloc", 2, 999, 4),  # at 2024
        Event("alloc", 3, 60, 2),  # at 5000
        Event("alloc", 4, 70, 0),
        Event("free", 3, 60, 2),
    ]


def test_a_snapshot_of_several_devices(tmp_path: Path) -> None:
    path = snapshot(tmp_path, [entry("alloc", 1, 5)], [], [entry("alloc", 1, 6), entry("alloc", 2, 7)])
    with pytest.raises(InvalidArgument, match=r"cuda:0 \(1 events\), cuda:2 \(2 events\): choose"):
        read_allocations(path)
    assert [event.bytes for event in read_allocations(path, "cuda:2").events] == [6, 7]
    with pytest.raises(InvalidArgument, match="no events of cuda:1"):
        read_allocations(path, "cuda:1")


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "hostile.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[Hostile(marker)]]}))
    with pytest.raises(InvalidArgument, match=r"posix\.mkdir.*plain containers only"):
        read_allocations(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists(), "elsewhere it does run"
    path.write_bytes(b"\x80\x04\x8c\x01xQ.")  # a persistent id
    with pytest.raises(InvalidArgument, match="objects outside of it"):
        read_allocations(path)


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        ([], "has no device_traces"),
        ({"device_traces": [[]]}, "empty history"),
        ({"device_traces": [[7]]}, r"device_traces\[0\]\[0\]: an int, not a dict"),
        ({"device_traces": [[entry("alloc", 1, 5) | {"size": "5"}]]}, r"\[0\]\[0\]: size is '5'"),
        ({"device_traces": [[entry("alloc", -1, 5)]]}, "addr is -1"),
        ({"device_traces": [[entry("alloc", 1, 10**5000)]]}, "size is an int too long to show"),
        ({"device_traces": [[entry("alloc", 1, 5) | {"addr": [10**5000]}]]}, "addr is a list too long"),
        (
            {"device_traces": [[entry("alloc", 1, 5), entry("alloc", 1, 5)]]},
            r"\[0\]\[1\]: 1 is allocated again",
        ),
        ({"device_traces": [[entry("snapshot", 0, 5)]]}, "has no allocation"),
        ({"device_traces": [[entry("alloc", 1, 5)]], "segments": [{"device": 0}]}, "address is None"),
        (
            {"device_traces": [[entry("alloc", 1, 5)]], "segments": [{"address": 1, "blocks": [3]}]},
            r"segments\[0\]\['blocks'\]\[0\]: an int",
        ),
    ],
)
def test_malformed_snapshots(given_: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(given_))
    with pytest.raises(InvalidArgument, match=reason):
        read_allocations(path)


# ---- torch.profiler ----


def memory(ts: float, addr: int, nbytes: Any, device: tuple[int, int] = (1, 0)) -> dict[str, Any]:
    values = {"Addr": addr, "Bytes": nbytes, "Device Type": device[0], "Device Id": device[1]}
    return {"ph": "i", "name": "[memory]", "ts": ts, "args": values}


def chrome(folder: Path, events: Any, name: str = "trace.json") -> Path:
    path = folder / name
    data = json.dumps({"traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "TRACE.JSON.GZ"])
def test_a_real_profile(name: str, tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        first = torch.empty(1000)
        second = torch.empty(50_000)
        del first
        third = torch.empty(77)
        del second, third
    path = tmp_path / name
    recorded.export_chrome_trace(str(tmp_path / name.lower()))
    (tmp_path / name.lower()).rename(path)
    trace = read_allocations(path)
    assert [(event.kind, event.bytes) for event in trace.events] == [
        ("alloc", 4000),
        ("alloc", 200_000),
        ("free", 4000),
        ("alloc", 308),
        ("free", 200_000),
        ("free", 308),
    ]
    assert trace.notes == ["torch.profiler, cpu"]


def test_events_of_a_profile_are_taken_by_time(tmp_path: Path) -> None:
    events = [
        {"name": "aten::add", "ts": 0},
        memory(3, 16, -5),
        memory(1, 16, 5),
        memory(4, 16, 6),
        memory(2, 99, -8),
    ]
    assert read_allocations(chrome(tmp_path, events, "t.json.gz")).events == [
        Event("alloc", 1, 8, 0),  # from before the recording
        Event("alloc", 2, 5, 0),
        Event("free", 1, 8, 0),
        Event("free", 2, 5, 0),
        Event("alloc", 3, 6, 0),
    ]


def test_a_profile_of_several_devices(tmp_path: Path) -> None:
    path = chrome(tmp_path, [memory(1, 1, 5, (0, -1)), memory(1, 1, 6, (1, 1)), memory(2, 2, 7, (1, 1))])
    with pytest.raises(InvalidArgument, match=r"cpu \(1 events\), cuda:1 \(2 events\): choose"):
        read_allocations(path)
    assert [event.bytes for event in read_allocations(path, "cuda:1").events] == [6, 7]
    with pytest.raises(InvalidArgument, match="no events of cuda:0, only of cpu"):
        read_allocations(path, "cuda:0")


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "record with profile"),
        ({}, "has no traceEvents"),
        ([{"name": "[memory]"}], r"traceEvents\[0\]: ts is None"),
        ([memory(1, 5, "7")], r"traceEvents\[0\]: args.Bytes is '7'"),
        ([memory(1, 5, 7), memory(2, 5, 7)], r"traceEvents\[1\]: 1 is allocated again"),
        ([memory(1, 5, 7), memory(2, 5, -8)], r"traceEvents\[1\]: 1 is freed with 8 bytes"),
    ],
)
def test_malformed_profiles(events: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        read_allocations(chrome(tmp_path, events))

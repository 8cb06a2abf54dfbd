"""The trace (I16): what a recording holds, what it says of it, and that it lies beside torch's profiler."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import vtensor
from support import filled, quarter, run_snippet
from vtensor import _core, plot, trace
from vtensor._pictures import events as curves

# What torch's converted clock and ours may be apart, in microseconds. Seen: below 1.
APART = 100.0


def of(events, what):
    return [event for event in events if event.what == what]


# -- what a recording holds


def test_extend_and_shrink_say_what_where_how_much_when_and_who(pool):
    t = quarter(pool, rows=(3,))
    item = pool.page_size // 4
    before = time.time_ns()
    with trace.record() as recording:
        t.extend(2)
        t.append(torch.ones(3, 5, item, dtype=torch.uint8))
        t.shrink(1)
        t.shrink(2, front=True)
        t.truncate(3)
    after = time.time_ns()
    events = recording.events()
    changes = [event for event in events if event.what in ("extend", "shrink")]
    base = changes[0].tensor
    assert [(e.what, e.nbytes // item, (e.address - base) // item) for e in changes] == [
        ("extend", 3 * 2, 0),
        ("extend", 3 * 5, 2),
        ("shrink", 3 * 1, 6),
        ("shrink", 3 * 2, 0),
        ("shrink", 3 * 1, 5),
    ]
    assert t.address == base + 2 * item  # the tensor's name is where its range begins
    assert {e.tensor for e in changes} == {base}
    assert {e.role for e in changes} == {"caller"}
    assert {e.thread for e in changes} == {threading.get_native_id()}
    assert all(e.duration_ns > 0 and e.call == "" for e in changes)
    times = [t for e in changes for t in (e.time_ns, e.time_ns + e.duration_ns)]
    assert times == sorted(times)
    assert before - 1000 <= times[0] and times[-1] <= after + 1000


def test_a_refused_extend_is_there_too(pool):
    t = quarter(pool, capacity=1000)
    with trace.record() as recording, pytest.raises(vtensor.OutOfPages):
        t.extend(1000)
    assert len(of(recording.events(), "extend")) == 1


def test_what_a_tensor_and_the_mapper_do_is_all_there(pool_factory):
    """One of each, by thread."""
    pool = pool_factory("host", prefetch=16 * 4096, cache=16 * 4096)
    with trace.record() as recording:
        t = quarter(pool, 2, make=vtensor.zeros)
        t.prepare(14)
        pool.wait_idle()
        t.extend(14)  # three pages that are ready
        t.truncate(4)
        t.extend(4)  # as zeros again
        t.close()
        pool.wait_idle()
        reused = quarter(pool, 4, make=vtensor.zeros)
        reused.fork().unshare(0, 4)
    events = recording.events()
    seen = {(event.what, event.role): event for event in events}
    caller = {"extend", "prepare", "revive", "shrink", "fork", "unshare", "zero", "reuse"}
    assert caller <= {what for what, role in seen if role == "caller"}
    assert {"map", "populate", "zero"} <= {what for what, role in seen if role == "mapper"}
    assert any(event.what == "cache" for event in events)
    assert seen["revive", "caller"].tensor and seen["zero", "caller"].nbytes == 4 * 1024


def test_kinds_that_are_drawn_are_among_those_that_there_are():
    drawn = {*curves._GROWTH, *trace.MAPPED, *plot._KIND_OF, *plot._MARKS}
    assert drawn < set(_core.TRACE_KINDS)


def test_the_newest_stay_and_the_others_are_counted(host):
    t = quarter(host, capacity=4)
    t.extend(4).truncate(1)
    with trace.record(capacity=100) as recording:
        assert recording.capacity == 128
        for _ in range(500):
            t.extend(1).truncate(1)
        inside = recording.events()
    assert len(inside) == 128
    assert len(recording.events()) == 128
    assert recording.dropped >= 1000 - 128
    assert f"{recording.dropped:,} older events were dropped" in recording.summary()


# -- beginning and ending


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_recording_stops_and_keeps_what_it_has(host, error):
    t = quarter(host)
    with pytest.raises(error), trace.record() as recording:
        t.extend(1)
        raise error
    t.extend(1)
    assert len(of(recording.events(), "extend")) == 1


def test_one_recording_runs_at_a_time_and_holds_its_own_part(host):
    t, waiting = quarter(host), trace.record(128)
    refused = r"^\[trace.record\] another recording runs.*: leave its `with`"
    with trace.record(1024) as first:
        t.extend(1)
        with pytest.raises(vtensor.VTensorError, match=refused), waiting:
            pass
        t.extend(2)
    with waiting as second:  # of another size
        t.extend(3)
    item = host.page_size // 4
    assert [e.nbytes // item for e in of(first.events(), "extend")] == [1, 2]
    assert [e.nbytes // item for e in of(second.events(), "extend")] == [3]
    assert (first.capacity, second.capacity) == (1024, 128)


def test_a_forked_child_records_nothing_and_says_so():  # I13
    run_snippet(
        """
        from vtensor import trace
        t = vtensor.empty(1, 4, grow_dim=0, capacity=64, dtype=torch.float32, device="cpu")

        def refused(call):
            try:
                call()
            except vtensor.VTensorError as error:
                return "[trace." in str(error) and "forked" in str(error) and ": " in str(error)
            return False

        with trace.record() as recording:
            t.extend(1)
            pid = os.fork()
            if pid == 0:
                torch.set_num_threads(1)
                ok = refused(lambda: trace.record().__enter__()) and refused(recording.events)
                recording.__exit__(None, None, None)
                os._exit(0 if ok else 1)
            assert os.waitpid(pid, 0)[1] == 0
            t.extend(1)
        assert [e.what for e in recording.events()].count("extend") == 2
        """
    ).check()


# -- what is made of it


def recording_of(*rows):
    recording = trace.record()
    facts = {"capacity": 64, "dropped": 0, "started": 1_000_000_000}
    recording._core = SimpleNamespace(**facts, events=lambda: list(rows), stop=lambda: None)
    return recording


ROWS = (
    (1_000_001_000, 9_000, "extend", "", 0x7000, 4096, 0x7000, 11, "caller"),
    (1_000_002_500, 1_500, "driver_call", "mmap", 0x7000, 4096, 0, 11, "caller"),
    (1_000_004_000, 2_000, "map", "", 0x7000, 4096, 0x7000, 11, "caller"),
    (1_000_005_000, 0, "retire", "", 0x9000, 8192, 0x7000, 12, "mapper"),
    (1_000_005_500, 100, "map", "", 0x8000, 8192, 0x7000, 12, "mapper"),
    (1_000_009_000, 5_000, "unmap", "", 0x7000, 4096, 0x7000, 12, "mapper"),
)


def test_the_summary_counts_and_times_each_call():
    driver = [(0, 1000 * i, "driver_call", "mmap", 0, 4096, 0, 1, "caller") for i in range(1, 102)]
    other = (0, 2_000_000, "driver_call", "mmap", 0, 1, 0, 2, "mapper")
    instant = (0, 0, "retire", "", 0, 7, 0, 1, "caller")
    lines = recording_of(*driver, other, instant).summary().splitlines()
    assert [line.split() for line in lines] == [
        ["what", "thread", "count", "total", "ms", "p50", "us", "p99", "us", "bytes"],
        ["mmap", "caller", "101", "5.151", "51.00", "100.00", "413,696"],
        ["mmap", "mapper", "1", "2.000", "2,000.00", "2,000.00", "1"],
        ["retire", "caller", "1", "0.000", "0.00", "0.00", "7"],
    ]
    assert len({len(line) for line in lines}) == 1  # the last column is aligned to the right
    assert recording_of().summary().count("\n") == 0


def test_the_export_is_what_perfetto_reads(tmp_path):
    recording_of(*ROWS).export(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    records = written["traceEvents"]
    assert written["baseTimeNanoseconds"] == 1_000_000_000

    for record in records:
        assert record["ph"] in {"X", "i", "M", "C"} and isinstance(record["name"], str)
        assert record["pid"] == os.getpid() and isinstance(record["tid"], int)
        assert record["ph"] == "M" or isinstance(record["ts"], float)
        assert ("dur" in record) == (record["ph"] == "X")

    spans = {record["name"]: record for record in records if record["ph"] == "X" and record["tid"] == 11}
    assert {name: (span["ts"], span["dur"]) for name, span in spans.items()} == {
        "extend": (1.0, 9.0),
        "mmap": (2.5, 1.5),
        "map": (4.0, 2.0),
    }
    assert spans["mmap"]["cat"] == "vtensor"
    assert spans["extend"]["args"] == {
        "address": "0x7000",
        "nbytes": 4096,
        "tensor": "0x7000",
        "role": "caller",
    }
    (instant,) = [record for record in records if record["ph"] == "i"]
    assert (instant["name"], instant["s"], instant["ts"], instant["tid"]) == ("retire", "t", 5.0, 12)


def test_the_export_names_threads_and_counts_mapped_bytes(tmp_path):
    me = threading.get_native_id()
    mine = (1_000_000_500, 10, "extend", "", 0, 0, 0, me, "caller")
    recording_of(mine, *ROWS).export(tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {record["tid"]: record["args"]["name"] for record in records if record["ph"] == "M"}
    assert names == {
        0: f"python {os.getpid()}",
        me: f"{threading.current_thread().name} {me}",
        11: "thread 11",
        12: "vtensor mapper 12",
    }
    # By the time at which each was done, not begun.
    assert [(r["ts"], r["args"]) for r in records if r["ph"] == "C"] == [
        (5.6, {"bytes": 8192}),
        (6.0, {"bytes": 12288}),
        (14.0, {"bytes": 8192}),
    ]


def test_the_export_of_nothing_is_a_trace(tmp_path):
    recording_of().export(tmp_path / "trace.json")
    (record,) = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert record["name"] == "process_name"


# -- beside torch's profiler

STEPS = 6


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(a recording, the profiler beside it, the file that this exported)."""
    pool = vtensor.Pool("cpu", page_size=4096, budget=64 * 4096)
    t = filled(pool, 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, trace.record() as recording:
        t.extend(1)  # what is slow the first time
        for step in range(STEPS):
            time.sleep(0.002)  # more than the clocks may be apart: one step is not taken for another
            with record_function(f"step {step}"):
                t.extend(1)
    exported = tmp_path_factory.mktemp("profile") / "profile.json"
    profiler.export_chrome_trace(str(exported))
    t.close()
    pool.close()
    return recording, profiler, exported


def inside(inner, outer) -> bool:
    begin, end = outer["ts"] - APART, outer["ts"] + outer["dur"] + APART
    return begin <= inner["ts"] and inner["ts"] + inner["dur"] <= end


def test_events_lie_where_torchs_profiler_saw_them(both, tmp_path):
    """On one track, torch's own operators inside our events inside the user's own annotations."""
    recording, _, exported = both
    recording.export(tmp_path / "both.json", profile=exported)
    merged = json.loads((tmp_path / "both.json").read_text())
    records = [r for r in merged["traceEvents"] if r["ph"] == "X"]
    extends = [r for r in records if r["name"] == "extend"][1:]
    assert len(extends) == STEPS
    for step, extend in enumerate(extends):
        (annotation,) = [r for r in records if r["name"] == f"step {step}" and r["cat"] == "user_annotation"]
        assert inside(extend, annotation)
        operators = [r for r in records if r.get("cat") == "cpu_op" and inside(r, annotation)]
        assert operators and all(inside(operator, extend) for operator in operators)
        for record in (annotation, *operators):
            assert (record["pid"], record["tid"]) == (extend["pid"], extend["tid"])


def test_the_merged_file_has_all_that_the_profilers_has(both, tmp_path):
    recording, _, exported = both
    before = json.loads(exported.read_text())
    compressed = tmp_path / "profile.json.gz"
    compressed.write_bytes(gzip.compress(exported.read_bytes()))
    recording.export(tmp_path / "both.json", profile=compressed)
    after = json.loads((tmp_path / "both.json").read_text())
    records = after.pop("traceEvents")
    theirs = before.pop("traceEvents")
    assert records[: len(theirs)] == theirs
    assert after == before
    ours = records[len(theirs) :]
    assert len([r for r in ours if r["ph"] == "X"]) == len([e for e in recording.events() if e.duration_ns])
    this = threading.get_native_id()
    assert not [r for r in ours if r["ph"] == "M" and r["tid"] in (0, this)]  # torch has named them


def test_a_profiler_is_taken_for_its_file_once(both, tmp_path):
    recording, exported_before, _ = both
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).sum()
        with pytest.raises(vtensor.VTensorError, match=r"^\[trace.export\] .*: stop it first"):
            recording.export(tmp_path / "running.json", profile=profiler)
    recording.export(tmp_path / "both.json", profile=profiler)
    names = {r["name"] for r in json.loads((tmp_path / "both.json").read_text())["traceEvents"]}
    assert {"extend", "aten::sum"} <= names
    with pytest.raises(vtensor.VTensorError, match=r"^\[trace.export\] .*give profile= that file"):
        recording.export(tmp_path / "again.json", profile=exported_before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both.json"]


# -- files that are no trace


def event_with(**change) -> str:
    """A trace of one event, with something in the place of what belongs there."""
    arguments = {"address": "0x10", "nbytes": 4096, "tensor": "0x10", "role": "caller"}
    event = {"name": "map", "cat": "vtensor", "ts": 1.0, "dur": 2.0, "tid": 5, "args": arguments}
    for key, value in change.items():
        (arguments if key in arguments else event)[key] = value
    return json.dumps({"traceEvents": [event]})


BROKEN = [
    "",
    "{",
    "[1, 2]",
    "5",
    '{"a": 1}',
    '{"traceEvents": {"a": 1}}',
    '{"traceEvents": [1, null, "x"]}',
    '{"traceEvents": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"traceEvents": [], "a": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}",
    '{"baseTimeNanoseconds": "x", "traceEvents": []}',
    '{"baseTimeNanoseconds": 1' + "0" * 400 + ', "traceEvents": []}',
    gzip.compress(event_with().encode())[:-9],
    b"\xff\xfe\x00\x81",
    b"\x1f\x8b",
]
ODD = [
    {"ts": "x"},
    {"ts": float("inf")},
    {"dur": float("nan")},
    {"address": 5},
    {"tensor": "zz"},
    {"nbytes": "much"},
    {"tid": None},
    {"role": []},
    {"name": {}},
    {"args": 5},
]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_is_no_trace_is_refused(content, tmp_path):
    file, both = tmp_path / "no.json", tmp_path / "both.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (trace.load, plot.memory, plot.timeline):
        with pytest.raises(vtensor.VTensorError, match=r"^\[trace.load\] .*no.json holds .*export"):
            read(file)
    with pytest.raises(vtensor.VTensorError, match=r"^\[trace.export\] .*no.json holds no trace: give"):
        recording_of().export(both, profile=file)
    assert not both.exists()


def test_an_odd_event_is_refused(tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(event_with())
    assert len(trace.load(file)) == 1
    for change in ODD:
        file.write_text(event_with(**change))
        with pytest.raises(vtensor.VTensorError, match=r"^\[trace.load\] \S.*: \S.*"):
            trace.load(file)


def test_what_is_not_there_and_odd_names(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "there"):
        with pytest.raises(OSError):
            trace.load(path)
    theirs = [{"ph": "M", "pid": [1], "tid": {}}, {"ph": "M"}, {"name": "x"}]
    (tmp_path / "theirs.json").write_text(json.dumps({"traceEvents": theirs}))
    recording_of().export(tmp_path / "out.json", profile=tmp_path / "theirs.json")
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"][:3] == theirs

"""Pictures of pages and recordings, against stored ones.

``VTENSOR_BASELINES=write pytest tests/python/test_plot.py`` stores them anew: look at each before committing.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'vtensor[plot]'")

import matplotlib
from matplotlib import pyplot
from matplotlib.testing.compare import compare_images

import vtensor
import vtensor.plot
from interrupts import at_every_bytecode
from support import calls, eventually, filled, quarter
from vtensor._pictures.events import lanes, memory_points, thinned
from vtensor._pictures.shares import Owner, SharedPage, as_tree, boxes
from vtensor.trace import Event

BASELINES = Path(__file__).with_name("baseline")
TOLERANCE = 6  # RMS of 255: a font rendered otherwise passes, a box of another length does not
KIB = 1024


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.use("Agg")
        matplotlib.rcParams.update({"font.family": "DejaVu Sans", "savefig.dpi": 60})
        yield
    pyplot.close("all")


def looks_as_stored(axes, name: str, folder: Path) -> None:
    actual = folder / f"{name}.png"
    axes.figure.savefig(actual, metadata={"Software": None})
    stored = BASELINES / f"{name}.png"
    if os.environ.get("VTENSOR_BASELINES") == "write":
        stored.write_bytes(actual.read_bytes())
    difference = compare_images(str(stored), str(actual), TOLERANCE)
    assert difference is None, difference


class Story:
    """A recording made by hand: the same to the nanosecond each time."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, at, lasts, what, nbytes=0, tensor=1, call="", address=1, role="caller", thread=1) -> None:
        self.events.append(Event(at, lasts, what, call, address, nbytes, tensor, thread, role))


def decode() -> Story:
    """Two tensors grow by 4 KiB a step to 64 KiB each in pages of 16 KiB; the mapper maps from step 8 on."""
    story = Story()
    for tensor in (1, 2):
        story.add(tensor * 10_000, 5_000, "driver_call", 160 * KIB, 0, "mmap", 0)
    for step in range(16):
        for tensor in (1, 2):
            at = 100_000 * (step + 1) + 30_000 * tensor
            crosses, late = step % 4 == 0, step < 8
            story.add(at, 25_000 if crosses and late else 3_000, "extend", 4 * KIB, tensor)
            if crosses:
                who = {"role": "caller"} if late else {"role": "mapper", "thread": 2}
                begin = at + 1_000 if late else at - 60_000
                story.add(begin, 22_000, "map", 16 * KIB, tensor, **who)
                story.add(begin + 1_000, 8_000, "driver_call", 16 * KIB, 0, "mmap", **who)
                story.add(begin + 10_000, 11_000, "populate", 16 * KIB, tensor, **who)
    story.add(1_750_000, 40_000, "wait")
    story.add(1_800_000, 0, "lease")
    story.add(1_820_000, 0, "out_of_memory")
    story.add(1_850_000, 20_000, "shrink", 64 * KIB, 2)
    story.add(1_851_000, 15_000, "unmap", 64 * KIB, 2)
    return story


def family(pool):
    """A root of 8 pages, two children, and a grandchild that wrote to page 1."""
    root = filled(pool, 32)
    left, right = root.fork(), root.fork()
    left.append(torch.ones(12, pool.page_size // 4, dtype=torch.uint8))
    right.append(torch.ones(4, pool.page_size // 4, dtype=torch.uint8))
    grandchild = left.fork()
    grandchild.append(torch.ones(6, pool.page_size // 4, dtype=torch.uint8))
    grandchild[4] = 7
    return {"root": root, "left": left, "right": right, "grandchild": grandchild}


# -- pictures


def test_page_map(host, tmp_path):
    t = filled(host, 20, rows=(4,), capacity=40)
    t.reindex([0, 0, 2, 3])
    view = t[:]
    t.truncate(14)
    looks_as_stored(vtensor.plot.page_map(t), "page_map", tmp_path)
    del view


def test_memory(tmp_path):
    looks_as_stored(vtensor.plot.memory(decode().events), "memory", tmp_path)


def test_timeline(tmp_path):
    looks_as_stored(vtensor.plot.timeline(decode().events), "timeline", tmp_path)


def test_sharing(host, tmp_path):
    looks_as_stored(vtensor.plot.sharing(family(host)), "sharing", tmp_path)


def test_fragmentation(pool_factory, tmp_path):
    small, large = pool_factory("host", 64), pool_factory("host", 8, page_size=32 * KIB)
    owners = {
        f"{pool.page_size // KIB} KiB": vtensor.empty(
            2, 40, 1000, grow_dim=1, capacity=80, dtype=torch.uint8, pool=pool
        )
        for pool in (small, large)
    }
    view = owners["4 KiB"][:]
    owners["4 KiB"].truncate(20)
    looks_as_stored(vtensor.plot.fragmentation(owners), "fragmentation", tmp_path)
    del view


def test_memory_is_drawn_once_while_it_sleeps(pool_factory):
    """What sleeps has no bar beside those that its memory went to, and a pool says how much it is."""
    pool = pool_factory("host", 64)
    asleep = vtensor.zeros(3000, grow_dim=0, capacity=9000, pool=pool, tag="asleep")
    cache = vtensor.KVCache(1, 1, 16, max_batch=2, max_len=64, dtype=torch.float32, pool=pool)
    assert cache.alloc() == 0 and cache.step([30, 0])
    arena = vtensor.Arena(9 * 4096, pool=pool)
    arena.map([(0, 1)])
    pool.sleep(contents="host")
    bars = vtensor.plot.fragmentation({"tensor": asleep, "cache": cache}).patches
    assert all(bar.get_width() == 0 for bar in bars)
    assert "asleep" in pool._repr_html_() and "asleep 3" in asleep._repr_html_()
    for axes in (
        *map(vtensor.plot.page_map, (asleep, cache, arena)),
        *map(vtensor.plot.sharing, (asleep, cache)),
    ):
        assert any("asleep" in text.get_text() for text in axes.get_legend().get_texts())
    assert axes.get_title(loc="left") == "0 pages mapped, 0 in memory"
    pool.wake()
    axes = vtensor.plot.fragmentation({"tensor": asleep, "cache": cache})
    assert sum(bar.get_width() for bar in axes.patches) > 0


# -- what is drawn


def drawings(pool):
    """Every function that draws, and what it draws."""
    t, events = filled(pool, 8), decode().events
    return {
        vtensor.plot.page_map: t,
        vtensor.plot.memory: events,
        vtensor.plot.timeline: events,
        vtensor.plot.sharing: [t],
        vtensor.plot.fragmentation: [t],
    }


def test_they_draw_on_the_axes_given(host):
    _, given = pyplot.subplots(1, 5)
    for (draw, what), ax in zip(drawings(host).items(), given, strict=True):
        assert draw(what, ax=ax) is ax and ax.has_data()
        assert draw(what) not in given


def test_names_are_drawn_as_they_are(host, tmp_path):
    named = {"$a_{$": filled(host, 3), "\udcff": filled(host, 2)}  # no formula, and no text
    for draw in (vtensor.plot.sharing, vtensor.plot.fragmentation):
        draw(named).figure.savefig(tmp_path / "drawn.png")


def test_without_matplotlib_a_line_says_what_to_install(host, monkeypatch):
    for name in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    for draw, what in drawings(host).items():
        says = rf"^\[plot.{draw.__name__}\] matplotlib cannot be imported.*pip install 'vtensor\[plot\]'"
        with pytest.raises(vtensor.VTensorError, match=says):
            draw(what)


def test_memory_of_a_real_recording(pool):
    with vtensor.trace.record() as recording:
        t = quarter(pool, 4)
        t.extend(6)
        t.truncate(3)
        pool.wait_idle()
        last = memory_points(recording.events())[-1]
        assert (last.needed, last.mapped) == (t.nbytes, t.nbytes_mapped) == (3 * KIB, 4 * KIB)
        t.close()
    last = memory_points(recording.events())[-1]
    assert (last.needed, last.mapped, last.reserved) == (0, 0, 0)
    assert max(point.mapped for point in memory_points(recording.events())) == 12 * KIB


def line_of(axes, name):
    (line,) = [line for line in axes.get_lines() if line.get_label().startswith(name)]
    return [float(y) for y in line.get_ydata()]


def test_a_pool_over_time(pool_factory, tmp_path):
    pool = pool_factory("host", pages=64, cache=64 * 4096, prefetch=8 * 4096)
    with vtensor.plot.memory(pool) as sampling:

        def sample() -> None:
            so_far = len(sampling._samples)
            eventually(lambda: len(sampling._samples) > so_far + 1)

        t = filled(pool, 40)
        sample()
        u = filled(pool, 8)
        u.close()
        sample()
        pool.sleep(contents="host")
        sample()
        pool.wake()
    axes = sampling.axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts[0] == "needed" and "asleep" in texts and any(text.startswith("budget") for text in texts)
    assert max(line_of(axes, "asleep")) * KIB == t.nbytes and line_of(axes, "asleep")[-1] == 0
    stacked = axes.collections[0].get_paths()[0].get_extents().y1
    assert stacked * KIB >= t.nbytes and axes.get_ylabel() == "KiB"
    axes.figure.savefig(tmp_path / "pool.png")


def test_a_pool_is_drawn_whatever_ends_it(host):
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), vtensor.plot.memory(host) as sampling:
        raise ZeroDivisionError
    assert sampling.axes.get_title(loc="left").startswith("Memory of a pool")
    assert threading.active_count() == before
    host.close()
    with pytest.raises(vtensor.Closed, match=r"\[plot.memory\]"):
        vtensor.plot.memory(host)


def test_a_sampling_that_is_interrupted_samples_no_more(host):
    axes = vtensor.plot.memory(host).axes

    def check(sampling, outcome):
        if not outcome.interrupted:
            sampling.__exit__()
        eventually(lambda: not sampling._thread.is_alive())
        if sampling._samples:
            with pytest.raises(vtensor.VTensorError, match="used before"):
                sampling.__enter__()

    begin = vtensor.plot.Sampling.__enter__
    assert at_every_bytecode(lambda: vtensor.plot.memory(host, ax=axes), begin, check, within=vtensor.plot)


def test_thinning_loses_no_peak_and_no_end():
    times = [float(i) for i in range(100_000)]
    values = [0.0] * len(times)
    values[31_415] = 7.0
    x, y = thinned(times, values, 100)
    assert len(x) <= 101 and max(y) == 7.0 and x[-1] == times[-1] and x == sorted(x)
    assert thinned([1.0, 2.0], [3.0, 4.0], 100) == ([1.0, 2.0], [3.0, 4.0])


def test_close_spans_are_one_and_threads_are_numbered():
    caller, _ = lanes(decode().events, lambda event: event.what, [], 10**9)
    assert len(caller.spans[0, "extend"]) == 1
    threads = [e._replace(thread=n) for n, e in enumerate(decode().events[:3])]
    found = lanes(threads, lambda event: "", [], 0)
    assert [lane.name for lane in found] == ["caller 1", "caller 2", "caller 3"]


def owner(name: str, keys: str) -> Owner:
    """A letter a page; capitals are shared."""
    return Owner(
        name,
        {
            i: SharedPage(key, "shared" if key.isupper() else "mapped", 2 if key.isupper() else 1)
            for i, key in enumerate(keys)
        },
    )


def test_a_tree_brings_kin_together():
    owners = [owner("alone", "xyz"), owner("a", "ABCa"), owner("b", "ABb"), owner("c", "AqCc")]
    ordered = as_tree(owners)
    assert [o.name for o in ordered] == ["b", "a", "c", "alone"]
    found = {(box.start, box.stop, box.top, box.bottom) for box in boxes(ordered, 4) if box.state == "shared"}
    assert found == {(0, 1, 0, 3), (1, 2, 0, 2), (2, 3, 1, 3)}


def test_what_two_have_parted_is_not_shared(host):
    root = filled(host, 8)
    forks = [root.fork(), root.fork()]
    for value, fork in enumerate(forks):
        fork[0] = value
    axes = vtensor.plot.sharing([root, *forks])
    assert axes.get_title(loc="left") == "6 pages mapped, 4 in memory"


def test_drawing_makes_no_driver_call(simcuda):
    t = filled(simcuda, 9)
    before = calls(simcuda)
    for draw in (vtensor.plot.page_map, vtensor.plot.sharing, vtensor.plot.fragmentation):
        draw(t)
    assert calls(simcuda) == before


# -- trace files


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_an_exported_trace_reads_as_it_was(pool, tmp_path, name):
    with vtensor.trace.record() as recording:
        t = filled(pool, 9)
        t.truncate(2)
        t.close()
        pool.wait_idle()
    path = tmp_path / name
    recording.export(path)
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    loaded, events = vtensor.trace.load(path), recording.events()
    assert [e._replace(time_ns=0, duration_ns=0) for e in loaded] == [
        e._replace(time_ns=0, duration_ns=0) for e in events
    ]
    for ours, theirs in zip(loaded, events, strict=True):
        assert abs(ours.time_ns - theirs.time_ns) <= 1 and abs(ours.duration_ns - theirs.duration_ns) <= 1
    assert vtensor.plot.timeline(path).has_data() and vtensor.plot.memory(str(path)).has_data()


def test_page_map_of_a_cache(host, tmp_path):
    """The rows of each slot."""
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "max_batch": 3, "max_len": 64}
    with vtensor.KVCache(**sizes, dtype=torch.float32, pool=host) as cache:
        slot = cache.alloc()
        assert cache.step([40 if at == slot else 0 for at in range(3)])
        cache.fork(slot)
        axes = vtensor.plot.page_map(cache)
        assert "2 of 3 slots in use" in axes.get_title(loc="left")
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert any(label.startswith("shared 24") for label in labels), labels
        axes.figure.savefig(tmp_path / "cache.png")

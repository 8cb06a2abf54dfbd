"""Nothing leaks (I14): at interpreter exit, at Pool.close(), and when the last view goes."""

from __future__ import annotations

import gc
import os
import sys

import pytest

import vtensor
from cuda_support import needs_simcuda
from kv_support import make_cache
from support import (
    HERE,
    PER_PAGE,
    Finished,
    check_endings,
    eventually,
    filled,
    memfd_mappings,
    memfds,
    open_pool,
    run_process,
    run_snippet,
    same_bytes,
    simcuda_leaks,
)


@pytest.fixture
def is_as_before(kind):
    """Says whether the test has left no descriptor, mapping or object of a driver so far."""
    before = memfds(), memfd_mappings()
    return lambda: (memfds(), memfd_mappings()) == before and not (kind == "simcuda" and simcuda_leaks())


def test_a_closed_pool_leaves_no_descriptor_mapping_or_thread(kind, is_as_before):
    threads = len(os.listdir("/proc/self/task"))
    pool = open_pool(kind, 64)
    tensors = [filled(pool, 9, i, rows=(2,)) for i in range(3)]
    tensors.append(tensors[0].fork())
    cache, arena = make_cache(pool), vtensor.Arena(4096, pool=pool)
    pool.close()
    assert all(t.closed for t in tensors) and cache.closed and arena.closed
    assert is_as_before()  # though `pool` and `tensors` live
    eventually(lambda: len(os.listdir("/proc/self/task")) <= threads)  # what was joined may still be there
    stats = pool.stats()
    assert (stats.pages_used, stats.pages_mapped, stats.pages_orphaned, stats.tensors) == (0, 0, 0, 0)


def test_pages_of_living_views_are_orphaned_and_go_with_the_last(kind, is_as_before):
    pool = open_pool(kind, 64)
    t = filled(pool, 5 * PER_PAGE, 7)
    views = [t[:2], t[2 * PER_PAGE :], t[1]]
    filled(pool, 9)
    pool.close()
    assert t.closed and pool.closed
    assert pool.stats().pages_orphaned == 5 and pool.stats().pages_used == 5
    assert all(view.eq(7).all() for view in views)
    views[0].fill_(8)
    assert views[2].eq(8).all()
    del views[0]
    views.pop()
    assert pool.stats().pages_orphaned == 5 and views[0].eq(7).all()
    views.clear()
    stats = pool.stats()
    assert (stats.pages_orphaned, stats.pages_used, stats.pages_mapped, stats.nbytes_reserved) == (0, 0, 0, 0)
    assert is_as_before()


def test_a_pool_that_is_dropped_lives_while_its_tensors_and_their_views_do(kind, is_as_before):
    pool = open_pool(kind, 64, cache=32 * 4096)
    filled(pool, 20, capacity=30).close()  # stays mapped
    t = filled(pool, 5, 7)
    del pool
    gc.collect()
    assert not t.pool.closed
    t.extend(5)
    assert t[:5].eq(7).all()
    view, expected = t[1:4], t[1:4].clone()
    del t
    gc.collect()
    assert same_bytes(view, expected)
    del view
    eventually(is_as_before)


def test_close_in_the_middle_of_shares(kind):
    with open_pool(kind, 64) as pool:
        t = filled(pool, 10, 1)
        f = t.fork()
        view = f[2:9]
    assert view.eq(1).all() and t.closed and f.closed and pool.closed
    if kind == "host":
        view.fill_(3)
        assert view.eq(3).all()
    del view
    assert pool.stats().pages_used == 0


# --- interpreter exit -------------------------------------------------------------------------------------

LIVE = """
pool = open_pool({kind!r}, 64)
t = filled(pool, 9, 5, rows=(2,))
view = t[:, 3:5]
f = t.fork()
r = f.reallocate(100)
closed = filled(pool, 3); orphan = closed[:2]; closed.close()
default = vtensor.zeros(3, 4, grow_dim=0, capacity=10)
"""

# What only keeps objects alive: each with a pool of its own, all in one process.
KEEPING = {
    "names_live": "",
    "in_a_cycle": "cycle = [t, view]; cycle.append(cycle); del t, view",
    "in_a_module": "import types; sys.modules['keeper'] = m = types.ModuleType('keeper'); m.t = t",
    "in_a_default_argument": "def keep(x=t, y=view): pass",
    "in_a_torch_module": "m = torch.nn.Linear(2, 2); m.cache = t; m.view = view",
    "in_a_finalizer": "import weakref; weakref.finalize(os.path, lambda: (t.length, view.sum(), t.close()))",
    "in_an_atexit_handler": "import atexit; atexit.register(lambda: (t.length, view.sum(), t.extend(1)))",
    "in_a_del": """
class Keeper:
    def __del__(self):
        self.t.length; self.view.sum()
keeper = Keeper(); keeper.t = t; keeper.view = view
""",
    "numpy_lives": "array = t[0].numpy(); dl = torch.from_dlpack(t); del t, view",
    "pool_closed_before": "pool.close()",
    "pool_dropped": "del pool, t, f, r, closed",
    "a_recording_runs": """
forgotten = vtensor.trace.record(64).__enter__()
del forgotten
recording = vtensor.trace.record().__enter__(); t.extend(1)
""",
}


def test_the_interpreter_exits_with_objects_kept_alive(kind):
    check_endings({name: LIVE.format(kind=kind) + ending for name, ending in KEEPING.items()})


def test_the_interpreter_exits_by_sys_exit(kind):
    finished = run_snippet(LIVE.format(kind=kind) + "sys.exit(0)", finalize=True).check()
    assert finished.err == "", finished.err


@needs_simcuda
def test_exit_gives_everything_back_to_the_driver():
    """The simulated driver says at its unloading what it was not given back."""
    report = "os.environ['SIMCUDA_REPORT_LEAKS'] = '1'\n"
    keep_no_views = "\nview = orphan = dl = array = cycle = None; gc.collect()\n"
    endings = ("names_live", "in_a_cycle", "in_a_module", "numpy_lives", "pool_dropped")
    check_endings(
        {name: report + LIVE.format(kind="simcuda") + KEEPING[name] + keep_no_views for name in endings}
    )


def test_a_process_of_its_own_exits_clean():
    """Not through the snippet server: a plain interpreter, live names, a finalizer that is refused when
    nothing can be imported any more, no word on stderr."""
    code = (
        "import vtensor\n"
        "t = vtensor.zeros(3, 4, grow_dim=0, capacity=100)\n"
        "v = t[1:2]\n"
        "f = t.fork()\n"
        "f[0] = 1\n"
        "p = vtensor.Pool('cpu', budget=1 << 20)\n"
        "u = vtensor.empty(2, 0, 5, grow_dim=1, capacity=9, pool=p)\n"
        "class Owner:\n"
        "    tensor, closed = u, vtensor.Closed\n"
        "    def __del__(self):\n"
        "        try:\n"
        "            self.tensor.extend(1)\n"
        "        except self.closed:\n"
        "            pass\n"
        "owner = Owner()\n"
    )
    assert run_process(sys.executable, "-c", code, cwd=HERE, timeout=60) == Finished(0, "", "")

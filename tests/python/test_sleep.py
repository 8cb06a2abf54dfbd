"""Pool.sleep and Pool.wake: memory goes, all else stays, and contents come back (I4, I5, I7, I8, I17)."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import vtensor
from interrupts import at_bytecode
from kv_support import UNIT, grown, make_cache
from kv_support import filled as filled_slot
from machines import case
from support import (
    Finished,
    eventually,
    leave_spare,
    open_files,
    open_pool,
    resident,
    run_program,
    run_together,
)
from vtensor import _core, testing
from vtensor.testing.kv_model import check_contents, write

PAGE = 4096
PROMPT = list(range(3 * UNIT + 2))


def filled(pool: vtensor.Pool, nbytes: int, value: int) -> vtensor.VTensor:
    t = vtensor.empty((nbytes,), grow_dim=0, capacity=100 * PAGE, dtype=torch.uint8, pool=pool)
    t.fill_(value)
    return t


def sleep_and_wake(pool: vtensor.Pool, contents: object = "host") -> None:
    pool.sleep(contents=contents)
    assert pool.stats().pages_used == 0
    testing.check_invariants(pool)
    pool.wake()


class Scene:
    """A tensor, its fork, written to, and a view; a cache of which two slots share a prefix; an arena; an
    adopted layer with a tied weight."""

    def __init__(self, pool: vtensor.Pool) -> None:
        self.pool = pool
        self.t = filled(pool, 3 * PAGE, 7)
        self.fork = self.t.fork()
        self.fork[5] = 1
        self.view = self.t[10:20]
        self.cache = cache = make_cache(pool)
        for slot in range(2):
            assert cache.alloc(PROMPT, salt="") == slot
            covered = cache.length(slot)
            assert grown(cache, slot, len(PROMPT))
            write(cache, slot, covered, PROMPT[covered:])
            cache.publish(slot, PROMPT)
        self.arena = vtensor.Arena(8 * PAGE, pool=pool)
        self.arena.map([(PAGE, 3 * PAGE)])
        self.arena.tensor[PAGE : 3 * PAGE] = 9
        self.layer = torch.nn.Linear(40, 40)
        self.layer.tied = self.layer.weight
        vtensor.adopt(self.layer, pool)
        self.weights = [p.detach().clone() for p in self.layer.parameters()]
        self.fork_bytes = self.fork.clone()
        self.addresses = self.where()

    def where(self) -> list[int]:
        tensors = [self.t, self.fork, self.view, self.arena.tensor, self.layer.weight, self.layer.bias]
        return [t.data_ptr() for t in tensors]

    def check(self) -> None:
        """Awake, and as it was."""
        testing.check_invariants(self.pool)
        assert self.where() == self.addresses
        assert self.t.eq(7).all() and self.view.eq(7).all()
        assert torch.equal(self.fork, self.fork_bytes)
        for slot in range(2):
            check_contents(self.cache, slot, [*PROMPT])
        assert self.arena.tensor[PAGE : 3 * PAGE].eq(9).all()
        for p, kept in zip(self.layer.parameters(), self.weights, strict=True):
            assert torch.equal(p, kept)
        assert self.layer.tied is self.layer.weight
        self.layer(torch.zeros(40))
        assert not self.layer._forward_pre_hooks and not self.layer._state_dict_pre_hooks

    def check_asleep(self) -> None:
        testing.check_invariants(self.pool)
        assert self.pool.stats().pages_used == 0 and self.pool.stats().pages_free == 256
        for refused in (
            lambda: self.t + 1,
            lambda: self.t.extend(1),
            lambda: self.fork.fork(),
            lambda: vtensor.lease(self.t).__enter__(),
            lambda: self.cache.alloc(),
            lambda: self.cache.step(self.cache.lengths),
            lambda: self.arena.map([(0, 1)]),
            lambda: vtensor.adopt(torch.nn.Linear(2, 2), self.pool),
            lambda: vtensor.adopt(self.layer),
            lambda: vtensor.adopt([self.view]),
            lambda: self.layer(torch.zeros(40)),
            lambda: self.layer.state_dict(),
        ):
            with pytest.raises(vtensor.Asleep, match=r"^\[(?!vtensor\]).*asleep.*wake\(\)"):
                refused()
        testing.check_invariants(self.pool)

    def go_on(self) -> None:
        """Sharing is what it was: a write reaches one of those that share."""
        self.fork[PAGE] = 3
        self.fork_bytes[PAGE] = 3
        self.t.extend(10)
        self.t.truncate(3 * PAGE)
        length = self.cache.length(1)
        assert grown(self.cache, 1, length + 3)
        self.cache.truncate(1, length)
        self.check()

    def end(self) -> None:
        self.t = self.fork = self.view = self.layer = None
        self.cache.close()
        self.arena.close()
        self.pool._close_heaps()  # which keep addresses


@pytest.fixture
def scene(pool_factory, kind):
    scene = Scene(pool_factory(kind, 256))
    yield scene
    scene.end()


@pytest.fixture(params=["host", "folder"])
def contents(request, tmp_path) -> str | Path:
    return "host" if request.param == "host" else tmp_path


def test_contents_come_back(scene, contents):
    for _ in range(3):
        used = scene.pool.stats().pages_used
        given = scene.pool.sleep(contents=contents)
        assert 0 < given <= used * PAGE and scene.pool.stats().nbytes_asleep == given
        scene.check_asleep()
        scene.pool.wake()
        scene.check()
        scene.go_on()
        if contents != "host":
            assert list(contents.iterdir()) == []


def test_discarded_contents_are_zeros(scene):
    with pytest.raises(vtensor.InvalidArgument, match="2 slots in use"):
        scene.pool.sleep(contents="discard")
    scene.check()
    scene.cache.free(0), scene.cache.free(1)
    scene.pool.sleep(contents="discard")
    scene.check_asleep()
    scene.pool.wake()
    testing.check_invariants(scene.pool)
    assert scene.where() == scene.addresses
    for t in (scene.t, scene.fork, scene.view, scene.layer.weight, scene.arena.tensor[PAGE : 3 * PAGE]):
        assert t.eq(0).all()
    assert scene.cache.alloc(PROMPT) in (0, 1) and scene.cache.lengths == [0] * 6  # no stale prefix


def test_no_property_gives_a_view(pool):
    t = vtensor.empty(4, 5, grow_dim=0, capacity=8, pool=pool)
    pool.sleep(contents="host")
    for name in dir(torch.Tensor):
        if not callable(getattr(torch.Tensor, name, None)):
            with contextlib.suppress(RuntimeError, AttributeError):
                given = getattr(t, name)
                assert not isinstance(given, torch.Tensor) or given.numel() == 0, name
    t.close()


def test_new_memory_shows_nothing_of_others(pool_factory, kind):
    """I7: pages that others wrote to come back as zeros."""
    pool = pool_factory(kind, 16, zero="new_owner")
    t = filled(pool, 8 * PAGE, 5)
    pool.sleep(contents="discard")
    other = filled(pool, 12 * PAGE, 6)
    other.close()
    pool.wake()
    assert t.eq(0).all()


def test_what_sleeps_leaves_its_memory_to_others(pool_factory, kind):
    """One budget: a tensor grows into what sleeping weights left, and gives it back."""
    pool = pool_factory(kind, 64)
    layer = torch.nn.Linear(200, 250)  # 50 pages
    vtensor.adopt(layer, pool)
    weight = layer.weight.detach().clone()
    t = filled(pool, 10 * PAGE, 3)
    with pytest.raises(vtensor.OutOfPages):
        t.extend(40 * PAGE)
    pool.sleep(tag="weights", contents="host")
    t.extend(40 * PAGE)
    with pytest.raises(vtensor.OutOfPages, match=r"need 50 pages.*has 14 of 64"):
        pool.wake()
    testing.check_invariants(pool)
    assert pool.stats().nbytes_asleep >= 50 * PAGE
    t.truncate(10 * PAGE)
    pool.budget = 40 * PAGE
    with pytest.raises(vtensor.OutOfPages, match=r"need 50 pages.*has 30 of 40"):
        pool.wake()
    pool.budget = 64 * PAGE
    pool.wake(tag="weights")
    assert torch.equal(layer.weight, weight) and t.eq(3).all()
    del layer
    pool._close_heaps()


def test_pages_that_wait_for_a_swapped_slot_too_sleep(pool_factory, kind):
    pool = pool_factory(kind, 400)
    with make_cache(pool) as cache:
        slot = filled_slot(cache, 40)
        (fork,) = cache.fork(slot)
        cache.swap_out([slot, fork])
        assert cache.swap_in(slot)  # its pages are kept for the fork
        cache.wait(slot)
        sleep_and_wake(pool)
        assert cache.swap_in(fork)
        cache.wait(fork)
        for one in (slot, fork):
            check_contents(cache, one, [*range(40)])


def test_a_write_to_a_view_while_contents_are_saved_is_not_lost(pool_factory, monkeypatch):
    """The kernel copies the page that it goes to: that one stays where it is."""
    pool = pool_factory("host")
    t = filled(pool, 4 * PAGE, 5)
    child = t.fork()
    view = child[:]
    save = vtensor._pool.sleep._copy

    def write_then(copy, doing):
        save(copy, doing)
        if doing == "Pool.sleep":
            view[PAGE] = 9

    monkeypatch.setattr(vtensor._pool.sleep, "_copy", write_then)
    pool.sleep(contents="host")
    pool.wake()
    assert t.eq(5).all() and child[PAGE] == 9 and child.eq(5).sum() == 4 * PAGE - 1
    testing.check_invariants(pool)


def test_a_signal_handler_may_ask_while_memory_falls_asleep(scene, monkeypatch):
    def copy_and_ask(copy, doing, own=vtensor._pool.sleep._copy):
        assert scene.pool.sleep(contents="discard") == 0  # all of it sleeps, or is on its way
        if doing == "Pool.sleep":
            scene.pool.wake()  # nothing of it sleeps yet
        else:
            with pytest.raises(vtensor.VTensorError, match="inside another operation of this thread"):
                scene.pool.wake()
        own(copy, doing)

    monkeypatch.setattr("vtensor._pool.sleep._copy", copy_and_ask)
    scene.pool.sleep(contents="host")
    scene.check_asleep()
    scene.pool.wake()
    scene.check()


def test_what_dies_asleep_gives_its_pages_up(scene):
    pool = scene.pool
    pool.sleep(contents="host")
    before = pool.stats().nbytes_asleep
    scene.fork.close()
    scene.t = None
    gc.collect()
    pool.wait_idle()
    testing.check_invariants(pool)
    assert pool.stats().nbytes_asleep < before
    pool.wake()
    assert scene.view.eq(7).all()
    scene.view = None
    pool.wait_idle()


def test_what_is_closed_does_not_sleep(scene):
    """Though the program keeps it."""
    kept = scene.cache, scene.arena
    for one in kept:
        one.close()
    scene.pool.sleep(contents="host")
    assert all(one.closed for one in kept) and scene.t.nbytes_mapped == 0
    with pytest.raises(vtensor.InvalidArgument, match="kv"):
        scene.pool.wake(tag="kv")
    scene.pool.wake()
    assert scene.t[0].item() == 7


@pytest.mark.parametrize("one", ["cache", "arena"])
def test_what_another_thread_closes_does_not_keep_the_rest_awake(scene, monkeypatch, one):
    closing = getattr(scene, one)
    fall_asleep = type(closing)._fall_asleep

    def close_first(self, *args):
        if self is closing:
            self.close()
        fall_asleep(self, *args)

    monkeypatch.setattr(type(closing), "_fall_asleep", close_first)
    scene.pool.sleep(contents="host")
    assert closing.closed and scene.pool.stats().pages_mapped == 0
    scene.pool.wake()
    assert scene.fork[5] == 1 and scene.view.eq(7).all()


def test_a_pool_closed_asleep(pool_factory, kind, tmp_path):
    pool = pool_factory(kind, 256)
    scene = Scene(pool)
    pool.sleep(contents=tmp_path)
    pool.close()
    scene.end()
    gc.collect()
    assert pool.stats().pages_used == 0 and pool.stats().nbytes_asleep == 0
    assert list(tmp_path.iterdir()) == []


def test_a_graph_replays_after_waking(sim, stream_pool):
    """Addresses stay, and with them what was captured."""
    pool = stream_pool(64, patience=0.2)
    t = filled(pool, 2 * PAGE, 1)
    stream = sim.stream()
    sim.begin_capture(stream)
    with vtensor.lease(t, stream=stream):
        sim.kernel(stream, t, 0, PAGE, writes=8)
    graph = sim.end_capture(stream)
    executable = sim.instantiate(graph)
    sleep_and_wake(pool)
    assert t.eq(1).all()
    sim.replay(executable, stream)
    eventually(lambda: sim.pending(stream) == 0)
    assert t[:PAGE].eq(8).all() and t[PAGE:].eq(1).all()
    sim.destroy_graph(graph), sim.destroy_executable(executable)


@pytest.mark.parametrize("leased", [False, True])
def test_sleep_waits_for_work_on_the_device(sim, stream_pool, leased):
    pool = stream_pool(64, patience=0.05)
    t = filled(pool, 2 * PAGE, 1)
    stream = sim.stream(held=True)
    with vtensor.lease(t, stream=stream) if leased else nullcontext():
        sim.kernel(stream, t, 0, PAGE, writes=8)
    if not leased:
        t.record_stream(stream)
    with pytest.raises(vtensor.TimedOut, match="work on the device"):
        pool.sleep(contents="host")
    t.extend(1)  # awake
    sim.release(stream)
    sleep_and_wake(pool)
    assert t[:PAGE].eq(8).all()


def test_no_memory_is_kept(pool_factory, kind):
    """What freed tensors left cached, and what was mapped ahead, goes to others too."""
    pool = pool_factory(kind, 64, prefetch=16 * PAGE, cache=64 * PAGE)
    t = filled(pool, 8 * PAGE, 1)
    filled(pool, 20 * PAGE, 2).close()
    t.prepare(30 * PAGE)
    pool.wait_idle()
    assert pool.stats().pages_prefetched >= 16
    assert pool.sleep(contents="host") == 8 * PAGE  # the others are not copied
    assert pool.stats().nbytes_held == 0
    pool.wake()
    assert t.eq(1).all()


def test_prefixes_make_room_for_what_wakes(pool_factory, kind):
    pool = pool_factory(kind, 64)
    t = filled(pool, 40 * PAGE, 3)
    with make_cache(pool) as cache:
        pool.sleep(tag="tensors", contents="host")
        for salt in "abc":
            slot = cache.alloc(PROMPT, salt=salt)
            assert grown(cache, slot, len(PROMPT))
            cache.publish(slot, PROMPT, salt=salt)
            cache.free(slot)
        pool.trim()  # what freed slots left
        assert pool.stats().pages_used > 24
        pool.wake()
        assert t.eq(3).all()
        testing.check_invariants(pool)


def test_a_shared_budget(pool_factory, kind):
    """What sleeps is given back to the other pools; what wakes asks them."""
    name = f"sleep-{os.getpid()}"
    with open_pool(kind, 64, shared_budget=name) as pool, open_pool("host", 64, shared_budget=name) as other:
        t = filled(pool, 40 * PAGE, 3)
        pool.sleep(contents="host")
        testing.check_invariants(pool)
        theirs = filled(other, 60 * PAGE, 4)
        with pytest.raises(vtensor.OutOfPages, match="need 40 pages"):
            pool.wake()
        testing.check_invariants(pool)
        theirs.close()  # which leaves spare pages there, to be asked for
        pool.wake()
        testing.check_invariants(pool)
        assert t.eq(3).all()
        t.close()


def test_slots_that_are_away_and_bands_that_differ(pool_factory, kind):
    pool = pool_factory(kind, 256)
    with make_cache(pool, bands=2) as cache:
        slots = [filled_slot(cache, len(PROMPT)) for _ in range(3)]
        cache.swap_out(slots[1])
        cache.swap_out(slots[2], bands=[1])
        for _ in range(2):
            sleep_and_wake(pool)
            check_contents(cache, slots[0], PROMPT)
        cache.swap_in(slots[1])  # its copies may be under way
        sleep_and_wake(pool)
        cache.swap_in(slots[2], bands=[1])
        pool.wait_idle()
        for slot in slots:
            check_contents(cache, slot, PROMPT)
        testing.check_invariants(pool)


def test_a_prefix_that_the_mapper_has_not_mapped_yet(pool_factory, kind):
    pool = pool_factory(kind, 256)
    with make_cache(pool) as cache:
        first = filled_slot(cache, len(PROMPT))
        cache.publish(first, PROMPT)
        second = cache.alloc(PROMPT, salt="", deferred=True)
        covered = cache.length(second)
        assert covered == 3 * UNIT
        for _ in range(2):
            sleep_and_wake(pool)
        assert grown(cache, second, len(PROMPT))
        write(cache, second, covered, PROMPT[covered:])
        for slot in (first, second):
            check_contents(cache, slot, PROMPT)
        testing.check_invariants(pool)


def test_two_threads_put_to_sleep_and_wake(scene):
    pool = scene.pool

    def cycle(tag: str) -> None:
        for _ in range(5):
            pool.sleep(tag=tag, contents="host")
            pool.wake(tag=tag)

    run_together(*(partial(cycle, tag) for tag in ("weights", "kv", "tensors", "kv")))
    pool.wake()
    scene.check()


def test_a_tensor_has_aliases_as_soon_as_it_is_awake(pool, monkeypatch):
    """Also while another thread's wake() has still to set its class."""
    t = filled(pool, PAGE, 7)
    pool.sleep(contents="host")
    with monkeypatch.context() as patch:
        patch.setattr(vtensor.VTensor, "_wake", lambda _: None)
        pool.wake()
    assert t.alias().eq(7).all()


# --- folders -----------------------------------------------------------------------------------------------


def test_two_sleeps_into_one_folder(scene, tmp_path):
    """Each has a file of its own, and a sleep of what sleeps already has none."""
    before = open_files()
    scene.pool.sleep(tag="weights", contents=tmp_path)
    assert scene.pool.sleep(tag="kv", contents=tmp_path) > 0
    assert scene.pool.sleep(tag="kv", contents=tmp_path) == 0
    assert scene.pool.sleep(contents=tmp_path) > 0
    assert scene.pool.sleep(contents=tmp_path) == 0
    assert list(tmp_path.iterdir()) == [] and open_files() == before + 3
    scene.check_asleep()
    scene.pool.wake()
    scene.check()
    assert open_files() == before


def test_what_wakes_leaves_no_bytes_with_what_sleeps_on(pool_factory, kind, tmp_path):
    """What slept before a sleep keeps nothing of that one."""
    pool = pool_factory(kind, 64)
    first = vtensor.zeros(PAGE, grow_dim=0, capacity=PAGE, dtype=torch.uint8, pool=pool, tag="first")
    filled(pool, PAGE, 1)
    second = filled(pool, 2 * PAGE, 2)
    before = open_files()
    pool.sleep(tag="first", contents="host")
    for _ in range(3):
        pool.sleep(contents=tmp_path)
        pool.wake(tag="tensors")
    assert open_files() == before and len(pool._asleep) == 1
    pool.wake()
    assert second.eq(2).all() and first.eq(0).all()


def test_the_working_directory_may_change(scene, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    scene.pool.sleep(contents=".")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rmdir()  # nothing is in it
    scene.pool.wake()
    scene.check()


@pytest.mark.parametrize("form", [str, os.fsencode], ids=["text", "bytes"])
def test_odd_names_of_folders(scene, tmp_path, form):
    class Given(os.PathLike):
        def __fspath__(self):
            return form(folder)

    for name in ("host", "with space", "\udc80", "\N{SNOWMAN}"):
        folder = tmp_path / name
        folder.mkdir()
        sleep_and_wake(scene.pool, Given())
        scene.check()


def test_what_is_no_folder(scene, tmp_path):
    """Nothing is made, replaced, or waited for."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"kept")
    wrong = [7, None, b"host", "hosts", "Discard", "", "a\0b", "\ud800", "/dev/full", "/dev/null"]
    wrong += [tmp_path / "fifo", tmp_path / "file", tmp_path / "gone", Path("discard"), Path("host")]
    for contents in wrong:
        with pytest.raises(vtensor.InvalidArgument, match="'discard', 'host', or a folder that exists"):
            scene.pool.sleep(contents=contents)
    with pytest.raises(TypeError, match="contents"):
        scene.pool.sleep()
    scene.check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "file"]
    assert (tmp_path / "file").read_bytes() == b"kept" and Path("/dev/full").is_char_device()


@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_a_folder_that_takes_no_file(scene, folder):
    before = open_files()
    with pytest.raises(OSError, match=r"\[Pool.sleep\].*nothing fell asleep.*another folder") as refused:
        scene.pool.sleep(contents=folder)
    assert refused.value.errno in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS)
    scene.check()
    assert open_files() == before


def run(program: str, **named: object) -> Finished:
    """A program in a process of its own, with ``t``, 16 MiB of ones, in ``pool``."""
    begin = """
import os, resource, sys, threading, time, torch, vtensor
from support import open_files
from vtensor import testing
pool = vtensor.Pool("cpu", budget="64MiB", prefetch=0)
t = vtensor.zeros((4 << 20,), grow_dim=0, capacity=4 << 20, pool=pool)
t.fill_(1)
"""
    begin += "".join(f"{name} = {value!r}\n" for name, value in named.items())
    return run_program(begin + program)


def test_a_full_disk(tmp_path):
    """It is found before anything is written; all stays awake, and the next sleep finds its folder usable."""
    done = run(
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
before = open_files()
try:
    pool.sleep(contents=folder)
except OSError as error:
    print(error)
assert t.eq(1).all() and open_files() == before
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
pool.sleep(contents=folder)
pool.wake()
assert t.eq(1).all()
""",
        folder=str(tmp_path),
    )
    done.check()
    assert "[Pool.sleep] the folder has no space for 16777216 bytes: nothing fell asleep" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["asleep", "while it copies"])
def test_a_killed_process_leaves_nothing(tmp_path, when):
    program = "pool.sleep(contents=folder)\nos.kill(os.getpid(), 9)"
    if when != "asleep":
        program = "threading.Timer(0.002, os.kill, (os.getpid(), 9)).start()\n"
        program += "while True:\n    pool.sleep(contents=folder)\n    pool.wake()"
    assert run(program, folder=str(tmp_path)).code == -9
    assert list(tmp_path.iterdir()) == []


def test_a_collected_pool_leaves_nothing(pool_factory, kind, tmp_path):
    before = open_files()
    pool = open_pool(kind, 64)
    t = filled(pool, 8 * PAGE, 1)
    pool.sleep(contents=tmp_path)
    del t, pool
    gc.collect()
    eventually(lambda: open_files() <= before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_signals_while_it_copies(tmp_path, contents):
    """A signal at any moment: all awake or all asleep, nothing lost, and no copy goes on behind it."""
    done = run(
        """
import signal, random
class Signal(Exception): pass
def handler(*_): raise Signal
signal.signal(signal.SIGALRM, handler)
before, cut = open_files(), 0
for i in range(150):
    for change in (lambda: pool.sleep(contents=contents), pool.wake):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.Random(i).uniform(1e-4, 0.04))
            change()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Signal:
            cut += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    pool.wake()
    assert t.eq(1).all(), i
    testing.check_invariants(pool)
assert open_files() == before and cut > 20, cut
""",
        contents=str(contents),
    )
    done.check()
    assert list(tmp_path.iterdir()) == []


def test_pages_larger_than_a_piece(tmp_path):
    pool = vtensor.Pool("cpu", budget="96MiB", page_size="32MiB", prefetch=0)
    t = vtensor.zeros((48 << 20,), grow_dim=0, capacity=64 << 20, dtype=torch.uint8, pool=pool)
    marks = {(i * 5) << 20: i + 1 for i in range(9)}
    for at, mark in marks.items():
        t[at] = mark
    sleep_and_wake(pool, tmp_path)
    assert {at: t[at].item() for at in marks} == marks and t.count_nonzero() == len(marks)
    t.close()
    pool.close()


def test_a_file_that_cannot_be_read(scene, tmp_path):
    """All stays asleep; what is lost can be given up."""
    scene.pool.sleep(contents=tmp_path)
    links = {d: Path("/proc/self/fd", d) for d in os.listdir("/proc/self/fd")}
    (own,) = (int(d) for d, at in links.items() if at.is_symlink() and str(tmp_path) in os.readlink(at))
    os.ftruncate(own, PAGE)
    with pytest.raises(OSError, match=r"\[Pool.wake\].*all stays asleep.*discard=True"):
        scene.pool.wake()
    scene.check_asleep()
    scene.pool.wake(discard=True)
    testing.check_invariants(scene.pool)
    assert scene.t.eq(0).all()


# --- what else goes on meanwhile ---------------------------------------------------------------------------


def test_closed_by_another_thread(kind, tmp_path, contents):
    """The pool, or a tensor of it, while it falls asleep and wakes."""
    before = open_files()
    for turn in range(12):
        pool = open_pool(kind, 1024)
        tensors = [filled(pool, 100 * PAGE, i) for i in range(8)]
        begun = threading.Event()

        def cycle(pool=pool, begun=begun) -> None:
            with suppress(vtensor.Closed):
                while True:
                    pool.sleep(contents=contents)
                    begun.set()
                    pool.wake()

        def close(pool=pool, begun=begun, tensors=tensors, turn=turn) -> None:
            begun.wait(20)
            for t in tensors[turn % 8 :]:
                t.close()
            time.sleep(turn * 0.0005)
            pool.close()

        run_together(cycle, close)
        tensors.clear()
        gc.collect()
        eventually(lambda pool=pool: pool.stats().pages_used == pool.stats().nbytes_asleep == 0)
    assert open_files() <= before + 2 and list(tmp_path.iterdir()) == []


def test_counts_say_asleep_once(scene):
    """What sleeps counts as asleep, and nowhere else (I4)."""
    pool = scene.pool
    awake, names, pages = pool.stats(), repr(scene.t), [record.address for record in scene.t.pages()]
    given = pool.sleep(contents="host")
    stats = pool.stats()
    assert stats.nbytes_asleep == given == awake.pages_used * PAGE
    mapped = (stats.pages_active, stats.pages_prefetched, stats.pages_cached, stats.pages_pinned)
    assert (stats.pages_used, stats.pages_mapped, stats.nbytes_mapped, *mapped) == (0,) * 7
    if pool._core.kernel_copies_on_write:
        assert scene.view.eq(0).all()  # torch knows nothing of it, and reads the page of zeros
        assert pool.stats().pages_used == 0
    records = scene.t.pages()
    assert [record.address for record in records] == pages
    assert {(record.state, record.page_id) for record in records} == {("asleep", -1)}
    assert stats.pages_private == pool.trim() == 0
    leave_spare(pool, 4)
    testing.check_invariants(pool)
    assert stats.pages_orphaned == 0 and set(stats.nbytes_by_tag.values()) == {0}
    assert scene.t.nbytes_mapped == scene.fork.nbytes_mapped == 0
    assert scene.cache.stats().nbytes_mapped == scene.arena.stats().nbytes_mapped == 0
    assert names != repr(scene.t) == str(scene.t) and "asleep" in repr(scene.t)
    assert "asleep: kv, tensors, weights" in repr(pool)
    pool.wake(tag="weights")
    by_tag = pool.stats().nbytes_by_tag
    assert by_tag == awake.nbytes_by_tag and pool.stats().pages_mapped > 0
    assert "asleep: kv, tensors>" in repr(pool)
    pool.wake()
    counts = attrgetter("pages_used", "pages_mapped", "pages_active", "pages_pinned")
    assert counts(pool.stats()) == counts(awake)
    assert "asleep" not in repr(pool) and repr(scene.t) == names


def test_tags_of_each_object(pool_factory, kind):
    pool = pool_factory(kind, 256)
    t = vtensor.zeros(PAGE, grow_dim=0, capacity=PAGE, dtype=torch.uint8, pool=pool, tag="a")
    copies = [t.fork(), vtensor.empty_like(t), vtensor.from_tensor(torch.ones(3), 0, 9, pool, tag="b")]
    cache, arena = make_cache(pool, tag="c"), vtensor.Arena(PAGE, pool=pool, tag="d")
    arena.map([(0, 1)])
    pool.sleep(tag="a", contents="host")
    for asleep in (t, *copies[:2]):
        with pytest.raises(vtensor.Asleep):
            asleep + 1
    copies[2] + 1
    pool.sleep(tag="c", contents="host")
    with pytest.raises(vtensor.Asleep):
        cache.alloc()
    arena.map([(0, 1)])
    pool.sleep(tag="d", contents="host")
    with pytest.raises(vtensor.Asleep):
        arena.map([(0, 1)])
    pool.wake()
    cache.close(), arena.close()


# --- random programs ---------------------------------------------------------------------------------------

TAGS = ("first", "second", "tensors")


whole = precondition(lambda machine: not machine.pool.broken)


class SleepMachine(RuleBasedStateMachine):
    """Modules of two tags, and a tensor, that sleep, wake, lose their contents, are adopted again, and are
    cut off in all of that: before any bytecode of ours, or by a refused driver call. If the driver refuses
    the undo of what was cut off, the pool is broken; what is awake stays readable."""

    kind = "host"

    def __init__(self) -> None:
        super().__init__()
        self.pool = open_pool(self.kind, 256)
        self.folder = tempfile.TemporaryDirectory()
        self.modules = {tag: torch.nn.Linear(30, 40) for tag in TAGS[:2]}
        for tag, module in self.modules.items():
            vtensor.adopt(module, self.pool, tag=tag)
        self.t = filled(self.pool, 3 * PAGE, 7)
        self.expected = {tag: t.clone() for tag, t in self.plain().items()}
        self.asleep: dict[str, str | Path] = {}

    def plain(self) -> dict[str, torch.Tensor]:
        return {**{tag: module.weight.detach() for tag, module in self.modules.items()}, "tensors": self.t}

    def change(self, body: Callable[[], object], cut: int | None, fail: int | None) -> bool:
        """Whether it came to its end."""
        try:
            with testing.fail_after(self.pool, fail) if fail is not None else nullcontext():
                if cut is not None:
                    return not at_bytecode(cut, body).interrupted
                body()
                return True
        except vtensor.DriverError:
            return False

    @whole
    @rule(
        tag=st.sampled_from([*TAGS, None]),
        contents=st.sampled_from(["host", "folder", "discard"]),
        cut=st.none() | st.integers(1, 300),
        fail=st.none() | st.integers(0, 6),
    )
    def sleep(self, tag: str | None, contents: str, cut: int | None, fail: int | None) -> None:
        where = self.folder.name if contents == "folder" else contents
        ended = self.change(lambda: self.pool.sleep(tag=tag, contents=where), cut, fail)
        new = [one for one in TAGS if tag in (one, None) and one not in self.asleep]
        falls = [one for one in new if _core.is_asleep(self.address(one))]
        assert falls in ([], new) and (falls == new or not ended)  # whole or nothing
        self.asleep.update(dict.fromkeys(falls, contents))

    @whole
    @rule(
        tag=st.sampled_from([*TAGS, None]),
        discard=st.booleans(),
        cut=st.none() | st.integers(1, 200),
        fail=st.none() | st.integers(0, 6),
    )
    def wake(self, tag: str | None, discard: bool, cut: int | None, fail: int | None) -> None:
        chosen = [one for one in self.asleep if tag in (one, None)]
        ended = self.change(lambda: self.pool.wake(tag=tag, discard=discard), cut, fail)
        awake = [one for one in chosen if not _core.is_asleep(self.address(one))]
        assert awake in ([], chosen) and (awake == chosen or not ended)
        for one in awake:
            if discard or self.asleep[one] == "discard":
                self.expected[one] = torch.zeros_like(self.expected[one])
            del self.asleep[one]
        if not ended and awake:
            self.pool.wake(tag=tag)  # does the rest

    @whole
    @rule(tag=st.sampled_from(TAGS[:2]), to=st.sampled_from(TAGS[:2]))
    def adopt(self, tag: str, to: str) -> None:
        """Again, into its heap or another: refused if either sleeps."""
        if {tag, to} & self.asleep.keys():
            with pytest.raises(vtensor.Asleep):
                vtensor.adopt(self.modules[tag], self.pool, tag=to)
        elif tag == to:
            vtensor.adopt(self.modules[tag], self.pool, tag=to)

    @rule()
    def stats(self) -> None:
        stats = self.pool.stats()  # a broken pool has them too
        assert stats.pages_used + stats.pages_free == 256

    def address(self, tag: str) -> int:
        return self.t.address if tag == "tensors" else self.modules[tag].weight.data_ptr()

    @invariant()
    def everything_holds(self) -> None:
        testing.check_invariants(self.pool)
        for tag, tensor in self.plain().items():
            assert tag in self.asleep or torch.equal(tensor, self.expected[tag])
        if self.pool.broken:
            return
        for tag, module in self.modules.items():
            if tag in self.asleep:
                with pytest.raises(vtensor.Asleep):
                    module(torch.ones(30))
            else:
                module(torch.ones(30))
        if "tensors" in self.asleep:
            with pytest.raises(vtensor.Asleep):
                self.t + 1
        if not self.asleep:
            assert self.pool.stats().nbytes_asleep == 0 and "asleep" not in repr(self.pool)
            assert not any(module._forward_pre_hooks for module in self.modules.values())

    def teardown(self) -> None:
        self.pool.close()
        self.modules.clear()
        assert os.listdir(self.folder.name) == []
        self.folder.cleanup()


class CudaSleepMachine(SleepMachine):
    kind = "simcuda"


TestSleep = case(SleepMachine, seconds=300)
TestSimulatedSleep = case(CudaSleepMachine, seconds=300)


@pytest.mark.alone
def test_resident_memory_falls(tmp_path):
    """To within 1 MiB of what it was before the pool had any."""
    pool = vtensor.Pool("cpu", budget="256MiB")
    t = vtensor.zeros((0,), grow_dim=0, capacity=1 << 26, pool=pool, dtype=torch.uint8)
    t.extend(1 << 20)
    for contents in ("discard", tmp_path):
        sleep_and_wake(pool, contents)
    gc.collect()
    time.sleep(0.1)
    pool.sleep(contents="discard")
    before = resident()
    pool.wake()
    t.extend((1 << 26) - (1 << 20))
    t.fill_(1)
    assert resident() - before > 60 << 20
    pool.sleep(contents=tmp_path)
    assert resident() - before < 1 << 20
    pool.wake()
    assert t.eq(1).all()
    t.close()
    pool.close()

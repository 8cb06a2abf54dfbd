"""Pool.sleep and Pool.wake: memory goes, all else stays, and contents come back (I4, I5, I7, I8, I17)."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import vtensor
from interrupts import at_every_bytecode
from kv_support import UNIT, make_cache
from support import eventually, leave_spare, open_pool
from vtensor import _sleep_file, testing
from vtensor.testing.kv_model import check_contents, write

PAGE = 4096
PROMPT = list(range(3 * UNIT + 2))


def filled(pool: vtensor.Pool, nbytes: int, value: int) -> vtensor.VTensor:
    t = vtensor.empty((nbytes,), grow_dim=0, capacity=100 * PAGE, dtype=torch.uint8, pool=pool)
    t.fill_(value)
    return t


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
            covered, lengths = cache.length(slot), cache.lengths
            lengths[slot] = len(PROMPT)
            assert cache.step(lengths)
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

    def check_asleep(self) -> None:
        testing.check_invariants(self.pool)
        assert self.pool.stats().pages_used == 0 and self.pool.stats().pages_free == 256
        for refused in (
            lambda: self.t + 1,
            lambda: self.t.extend(1),
            lambda: self.fork.fork(),
            lambda: self.cache.alloc(),
            lambda: self.cache.step(self.cache.lengths),
            lambda: self.arena.map([(0, 1)]),
            lambda: vtensor.adopt(torch.nn.Linear(2, 2), self.pool),
        ):
            with pytest.raises(vtensor.Asleep, match=r"asleep.*wake\(\)"):
                refused()
        testing.check_invariants(self.pool)

    def go_on(self) -> None:
        """Sharing is what it was: a write reaches one of those that share."""
        self.fork[PAGE] = 3
        self.fork_bytes[PAGE] = 3
        self.t.extend(10)
        self.t.truncate(3 * PAGE)
        lengths = self.cache.lengths
        lengths[1] += 3
        assert self.cache.step(lengths)
        lengths[1] -= 3
        self.cache.truncate(1, lengths[1])
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


@pytest.fixture(params=["host", "file"])
def contents(request, tmp_path) -> str | Path:
    return "host" if request.param == "host" else tmp_path / "sleep"


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
            assert list(contents.parent.iterdir()) == []


def test_discarded_contents_are_zeros(scene):
    with pytest.raises(vtensor.InvalidArgument, match="2 slots in use"):
        scene.pool.sleep()
    scene.check()
    scene.cache.free(0), scene.cache.free(1)
    scene.pool.sleep()
    scene.check_asleep()
    scene.pool.wake()
    testing.check_invariants(scene.pool)
    assert scene.where() == scene.addresses
    for t in (scene.t, scene.fork, scene.view, scene.layer.weight, scene.arena.tensor[PAGE : 3 * PAGE]):
        assert t.eq(0).all()
    assert scene.cache.alloc(PROMPT) in (0, 1) and scene.cache.lengths == [0] * 6  # no stale prefix


def test_new_memory_shows_nothing_of_others(pool_factory, kind):
    """I7: pages that others wrote to come back as zeros."""
    pool = pool_factory(kind, 16, zero="new_owner")
    t = filled(pool, 8 * PAGE, 5)
    pool.sleep()
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
    pool.wake(tag="weights")
    assert torch.equal(layer.weight, weight) and t.eq(3).all()
    del layer
    pool._close_heaps()


def test_tags(scene):
    pool = scene.pool
    with pytest.raises(vtensor.InvalidArgument, match="'kv', 'weights'|'weights'"):
        pool.sleep(tag="activations")
    assert pool.sleep(tag="kv", contents="host") > 0
    assert pool.sleep(tag="kv", contents="host") == 0  # already
    assert scene.t.eq(7).all()
    pool.wake()
    scene.check()
    pool.sleep(contents="host")
    pool.wake(tag="weights")
    for p, kept in zip(scene.layer.parameters(), scene.weights, strict=True):
        assert torch.equal(p, kept)
    with pytest.raises(vtensor.Asleep):
        scene.cache.alloc()
    pool.wake()
    scene.check()
    pool.wake()  # nothing sleeps


@pytest.mark.parametrize("prefetch", [0, 16 * PAGE])
def test_every_driver_call_refused_in_turn(pool_factory, kind, contents, prefetch):
    """Whole or nothing, going and coming: a refusal leaves all awake, or all asleep with nothing lost."""
    scene = Scene(pool_factory(kind, 256, prefetch=prefetch))
    refusals = 0
    for skip in [*range(50), *range(50, 5000, 61)]:
        with testing.fail_after(scene.pool, skip) as refused:
            try:
                scene.pool.sleep(contents=contents)
            except vtensor.VTensorError:
                refusals += 1
                asleep = False
            else:
                asleep = True
        if not asleep:
            scene.check()
            scene.pool.sleep(contents=contents)
        with testing.fail_after(scene.pool, skip) as refused_waking:
            try:
                scene.pool.wake()
            except vtensor.VTensorError:
                refusals += 1
                scene_asleep = True
            else:
                scene_asleep = False
        if scene_asleep:
            testing.check_invariants(scene.pool)
            scene.pool.wake()
        scene.check()
        if not refused and not refused_waking:
            break
    else:
        pytest.fail("a sleep that never ends its calls")
    assert refusals >= 2
    scene.go_on()
    scene.end()


@pytest.mark.slow
@pytest.mark.parametrize("going", [True, False], ids=["going", "waking"])
@pytest.mark.parametrize("place", ["host", "file"])
def test_cut_off_at_any_bytecode(tmp_path, place, going):
    """I17: an exception from outside leaves all awake, or all asleep with nothing lost."""
    contents = "host" if place == "host" else tmp_path / "sleep"

    def setup():
        scene = Scene(open_pool("host", 256))
        if not going:
            scene.pool.sleep(contents=contents)
        return scene

    def operation(scene):
        scene.pool.sleep(contents=contents) if going else scene.pool.wake()

    def check(scene, outcome):
        testing.check_invariants(scene.pool)
        scene.pool.wake()
        scene.check()
        scene.go_on()
        scene.end()
        scene.pool.close()
        assert scene.pool.stats().pages_used == 0
        assert list(tmp_path.iterdir()) == []

    assert at_every_bytecode(setup, operation, check) > 50


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


def test_a_pool_closed_asleep(pool_factory, kind, tmp_path):
    pool = pool_factory(kind, 256)
    scene = Scene(pool)
    pool.sleep(contents=tmp_path / "sleep")
    pool.close()
    scene.end()
    gc.collect()
    assert pool.stats().pages_used == 0 and pool.stats().nbytes_asleep == 0
    assert list(tmp_path.iterdir()) == []


def test_sleep_waits_for_leases_with_a_bound(pool_factory, kind):
    pool = pool_factory(kind, 16, patience=0.05) if kind == "simcuda" else open_pool("host", 16)
    t = filled(pool, PAGE, 1)
    if kind == "simcuda":
        with vtensor.lease(t), pytest.raises(vtensor.TimedOut, match="lease"):
            pool.sleep(contents="host")
        assert t.eq(1).all()
        t.extend(3)
    pool.sleep(contents="host")
    pool.wake()
    assert t[:PAGE].eq(1).all()
    t.close()
    pool.close()


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
    pool.sleep(contents="host")
    pool.wake()
    assert t.eq(1).all()
    sim.replay(executable, stream)
    eventually(lambda: sim.pending(stream) == 0)
    assert t[:PAGE].eq(8).all() and t[PAGE:].eq(1).all()
    assert sim.illegal_accesses() == 0
    sim.destroy_graph(graph), sim.destroy_executable(executable)


def test_sleep_waits_for_work_on_the_device(sim, stream_pool):
    pool = stream_pool(64, patience=0.05)
    t = filled(pool, 2 * PAGE, 1)
    stream = sim.stream(held=True)
    t.record_stream(stream)
    sim.kernel(stream, t, 0, PAGE, writes=8)
    with pytest.raises(vtensor.TimedOut, match="work on the device"):
        pool.sleep(contents="host")
    t.extend(1)  # awake
    sim.release(stream)
    pool.sleep(contents="host")
    pool.wake()
    assert t[:PAGE].eq(8).all()


def test_a_sleep_that_is_refused_wakes_nothing_else(scene):
    """What slept before sleeps on: its heap gives no memory."""
    pool = scene.pool
    pool.sleep(tag="weights", contents="host")
    with pytest.raises(vtensor.InvalidArgument, match="2 slots in use"):
        pool.sleep()
    with pytest.raises(vtensor.Asleep):
        vtensor.adopt(torch.nn.Linear(2, 2), pool)
    testing.check_invariants(pool)
    pool.wake()
    scene.check()
    pool.sleep(tag="weights", contents="host")
    assert pool.sleep(contents="host") > 0
    with pytest.raises(vtensor.Asleep):
        vtensor.adopt(torch.nn.Linear(2, 2), pool)
    pool.wake(tag="weights")
    vtensor.adopt(torch.nn.Linear(2, 2), pool)
    pool.wake()
    scene.check()


def test_what_sleeps_is_not_leased(scene):
    scene.pool.sleep(contents="host")
    with pytest.raises(vtensor.Asleep), vtensor.lease(scene.t):
        pass
    scene.pool.wake()
    with vtensor.lease(scene.t):
        pass
    scene.check()


def test_no_memory_is_kept(pool_factory, kind):
    """What freed tensors left cached, and what was mapped ahead, goes to others too."""
    pool = pool_factory(kind, 64, prefetch=16 * PAGE, cache=64 * PAGE)
    t = filled(pool, 8 * PAGE, 1)
    filled(pool, 20 * PAGE, 2).close()
    t.prepare(30 * PAGE)
    pool.wait_idle()
    pool.sleep(contents="host")
    assert pool.stats().nbytes_held == 0
    pool.wake()
    assert t.eq(1).all()


def test_reports_while_asleep(scene):
    pool = scene.pool
    pages = {record.address for record in scene.t.pages()}
    pool.sleep(contents="host")
    if pool._core.kernel_copies_on_write:
        assert scene.view.eq(0).all()  # torch knows nothing of it, and reads the page of zeros
    records = scene.t.pages()
    assert {record.address for record in records} == pages
    assert {(record.state, record.page_id) for record in records} == {("asleep", -1)}
    stats = pool.stats()
    assert stats.pages_used == stats.pages_private == 0
    assert pool.trim() == 0
    leave_spare(pool, 4)
    testing.check_invariants(pool)
    pool.wake()
    scene.check()


def test_a_budget_lowered_while_asleep(pool_factory, kind):
    pool = pool_factory(kind, 64)
    t = filled(pool, 40 * PAGE, 3)
    pool.sleep(contents="host")
    pool.budget = 20 * PAGE
    with pytest.raises(vtensor.OutOfPages, match="need 40 pages.*has 20 of 20"):
        pool.wake()
    testing.check_invariants(pool)
    pool.budget = 40 * PAGE
    pool.wake()
    assert t.eq(3).all()


def test_prefixes_make_room_for_what_wakes(pool_factory, kind):
    pool = pool_factory(kind, 64)
    t = filled(pool, 40 * PAGE, 3)
    with make_cache(pool) as cache:
        pool.sleep(tag="tensors", contents="host")
        for salt in "abc":
            slot = cache.alloc(PROMPT, salt=salt)
            lengths = cache.lengths
            lengths[slot] = len(PROMPT)
            assert cache.step(lengths)
            cache.publish(slot, PROMPT)
            cache.free(slot)
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
        slots = [cache.alloc() for _ in range(3)]
        lengths = cache.lengths
        for slot in slots:
            lengths[slot] = len(PROMPT)
        assert cache.step(lengths)
        for slot in slots:
            write(cache, slot, 0, PROMPT)
        cache.swap_out(slots[1])
        cache.swap_out(slots[2], bands=[1])
        for _ in range(2):
            pool.sleep(contents="host")
            assert pool.stats().pages_used == 0
            testing.check_invariants(pool)
            pool.wake()
            check_contents(cache, slots[0], PROMPT)
        cache.swap_in(slots[1])  # its copies may be under way
        pool.sleep(contents="host")
        pool.wake()
        cache.swap_in(slots[2], bands=[1])
        pool.wait_idle()
        for slot in slots:
            check_contents(cache, slot, PROMPT)
        testing.check_invariants(pool)


def test_a_prefix_that_the_mapper_has_not_mapped_yet(pool_factory, kind):
    pool = pool_factory(kind, 256)
    with make_cache(pool) as cache:
        first = cache.alloc(PROMPT, salt="")
        lengths = cache.lengths
        lengths[first] = len(PROMPT)
        assert cache.step(lengths)
        write(cache, first, 0, PROMPT)
        cache.publish(first, PROMPT)
        second = cache.alloc(PROMPT, salt="", deferred=True)
        covered = cache.length(second)
        assert covered == 3 * UNIT
        for _ in range(2):
            pool.sleep(contents="host")
            assert pool.stats().pages_used == 0
            testing.check_invariants(pool)
            pool.wake()
        lengths = cache.lengths
        lengths[second] = len(PROMPT)
        assert cache.step(lengths)
        write(cache, second, covered, PROMPT[covered:])
        for slot in (first, second):
            check_contents(cache, slot, PROMPT)
        testing.check_invariants(pool)


def test_two_threads_put_to_sleep_and_wake(scene):
    pool = scene.pool
    refused: list[BaseException] = []

    def cycle(tag: str) -> None:
        try:
            for _ in range(5):
                pool.sleep(tag=tag, contents="host")
                pool.wake(tag=tag)
        except BaseException as error:
            refused.append(error)

    threads = [threading.Thread(target=cycle, args=(tag,)) for tag in ("weights", "kv", "tensors", "kv")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == []
    pool.wake()
    scene.check()


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["changed", "cut", "another", "gone"])
def test_a_file_that_is_not_what_was_written(scene, tmp_path, how):
    path = tmp_path / "sleep"
    scene.pool.sleep(contents=path)
    kept = path.read_bytes()
    if how == "changed":
        path.write_bytes(kept[: PAGE * 3] + bytes([kept[PAGE * 3] ^ 1]) + kept[PAGE * 3 + 1 :])
    elif how == "cut":
        path.write_bytes(kept[:-100])
    elif how == "another":
        path.write_bytes(b"x" * len(kept))
    else:
        path.unlink()
    with pytest.raises(vtensor.VTensorError, match=r"all stays asleep.*discard=True"):
        scene.pool.wake()
    scene.check_asleep()
    path.write_bytes(kept)
    scene.pool.wake()
    scene.check()


def test_lost_contents_can_be_given_up(scene, tmp_path):
    path = tmp_path / "sleep"
    scene.pool.sleep(contents=path)
    path.unlink()
    scene.pool.wake(discard=True)
    testing.check_invariants(scene.pool)
    assert scene.t.eq(0).all()


def test_a_full_disk(scene, tmp_path, monkeypatch):
    path = tmp_path / "sleep"
    path.write_bytes(b"what was there")
    write_all, left = _sleep_file._write, 6 * PAGE

    def full(descriptor, view, offset):
        nonlocal left
        write_all(descriptor, view[:left], offset)
        left -= min(left, len(view))
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_sleep_file, "_write", full)
    with pytest.raises(OSError, match=r"No space left.*nothing fell asleep") as raised:
        scene.pool.sleep(contents=path)
    assert raised.value.errno == errno.ENOSPC
    scene.check()
    assert path.read_bytes() == b"what was there" and len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_has_too_little_space(scene, tmp_path, monkeypatch):
    """It is found before anything is written."""

    def refused(descriptor, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    monkeypatch.setattr(_sleep_file, "_write", None)
    with pytest.raises(OSError, match=r"No space left.*nothing fell asleep"):
        scene.pool.sleep(contents=tmp_path / "sleep")
    scene.check()
    assert not list(tmp_path.iterdir())


def test_pages_larger_than_a_piece(tmp_path):
    pool = vtensor.Pool("cpu", budget="96MiB", page_size="32MiB", prefetch=0)
    t = vtensor.zeros((48 << 20,), grow_dim=0, capacity=64 << 20, dtype=torch.uint8, pool=pool)
    marks = {(i * 5) << 20: i + 1 for i in range(9)}
    for at, mark in marks.items():
        t[at] = mark
    pool.sleep(contents=tmp_path / "sleep")
    pool.wake()
    assert {at: t[at].item() for at in marks} == marks and t.count_nonzero() == len(marks)
    t.close()
    pool.close()


def test_the_file_is_gone_where_no_thread_can_be_started(scene, tmp_path, monkeypatch):
    """A thread gives its space back; without one, waking takes longer."""
    scene.pool.sleep(contents=tmp_path / "sleep")
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "vtensor-remove":
            raise RuntimeError("can't start new thread")
        start(thread)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refused)
    scene.pool.wake()
    scene.check()
    assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == before


def test_killed_while_it_writes(tmp_path):
    """What stood at the path stands there still."""
    path = tmp_path / "sleep"
    path.write_bytes(b"what was there")
    program = f"""
import vtensor
from vtensor import _sleep_file
pool = vtensor.Pool("cpu", budget="64MiB", prefetch=0)
t = vtensor.zeros((1 << 20,), grow_dim=0, capacity=1 << 20, pool=pool)
write = _sleep_file._write
def slow(descriptor, view, offset):
    write(descriptor, view, offset)
    print("written", flush=True)
    input()
_sleep_file._write = slow
pool.sleep(contents={str(path)!r})
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "written\n"
    child.kill()
    child.communicate()
    assert path.read_bytes() == b"what was there"


@pytest.mark.parametrize("contents", [7, None, b"host"])
def test_contents_that_cannot_be(scene, contents):
    with pytest.raises(vtensor.InvalidArgument, match="'discard', 'host' or a path"):
        scene.pool.sleep(contents=contents)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.alone
def test_resident_memory_falls(tmp_path):
    """To within 1 MiB of what it was before the pool had any."""
    pool = vtensor.Pool("cpu", budget="256MiB")
    t = vtensor.zeros((0,), grow_dim=0, capacity=1 << 26, pool=pool, dtype=torch.uint8)
    t.extend(1 << 20)
    for contents in ("discard", tmp_path / "sleep"):
        pool.sleep(contents=contents)
        pool.wake()
    gc.collect()
    time.sleep(0.1)
    pool.sleep()
    before = resident()
    pool.wake()
    t.extend((1 << 26) - (1 << 20))
    t.fill_(1)
    assert resident() - before > 60 << 20
    pool.sleep(contents=tmp_path / "sleep")
    assert resident() - before < 1 << 20
    pool.wake()
    assert t.eq(1).all()
    t.close()
    pool.close()

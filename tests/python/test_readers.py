"""Memory that other processes read: they see the writer's bytes, whole steps, and no page that is reused."""

from __future__ import annotations

import fcntl
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from multiprocessing import reduction
from multiprocessing.connection import Listener
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import vtensor
from cuda_support import device
from interrupts import Outcome, at_every_bytecode
from kv_support import grown, lengths_with, make_cache
from reader_process import (
    CONTEXT,
    HANDLES,
    ReaderProcess,
    named_memory,
    opened,
    read,
    receive,
    rows,
    write_and_die,
)
from support import eventually, memfd_mappings, open_files, open_pool, received, run_program, simcuda_library
from vtensor import VTensor, sharing, testing
from vtensor._base.units import byte_text
from vtensor._pool import sleep as _sleep

PAGE = 4096


@pytest.fixture(scope="module")
def process():
    with ReaderProcess() as process:
        yield process


@pytest.fixture
def other(process):
    """A process that closes its reader at the end of the test."""
    yield process
    process.close()


@pytest.fixture
def short_lived():
    """Makes processes that end with the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(ReaderProcess())


@pytest.fixture(params=["file", *HANDLES])
def kind(request, monkeypatch):
    """How the writer's pages go to readers: over the host ("file"), or over the simulated libcuda."""
    if request.param not in HANDLES:
        yield request.param
        return
    if simcuda_library() is None:
        pytest.skip("no simulated libcuda: run scripts/build.sh")
    monkeypatch.setattr(sharing, "cuda_library", str(simcuda_library()))
    with device(handle_types=HANDLES[request.param]):
        yield request.param


on_the_host = pytest.mark.parametrize("kind", ["file"], indirect=True)


@pytest.fixture
def pool(kind):
    with shareable(kind) as pool:
        assert pool.stats().sharing == kind
        yield pool
        pool._core.check_invariants()


def shareable(kind, budget=256, **options):
    options = {"prefetch": 0, "shareable": True} | options
    if kind in HANDLES:
        return open_pool("simcuda", budget, PAGE, **options)
    return testing.host_pool(page_size=PAGE, budget=budget * PAGE, strict_holes=False, **options)


def sent(other, t):
    """The tensor, which the other process reads from now on."""
    other.receive(t)
    return t


# -- a tensor


def test_a_reader_follows_at_sync_and_only_then(pool, other):
    t = rows(pool, 10)
    assert other.receive(t) == "Reader"
    assert torch.equal(other.read(), t)
    assert other.sync() is False
    t.append(torch.randn(2, 500, 64))
    assert other.length() == 10
    assert other.sync() is True and other.length() == 510
    assert torch.equal(other.read(), t)
    t.shrink(30)
    t.shrink(100, front=True)
    assert other.sync() is True and torch.equal(other.read(), t)
    t.truncate(0)
    assert other.sync() is True and other.length() == 0
    t.append(torch.randn(2, 7, 64))
    assert other.sync() is True and torch.equal(other.read(), t)


def test_a_page_that_changes_often_between_two_syncs_is_mapped_once(pool, other):
    t = sent(other, rows(pool, 100))
    for _ in range(5):
        t.truncate(0)
        t.append(torch.randn(2, 60, 64))
        pool.wait_idle()
    assert other.sync() is True
    assert torch.equal(other.read(), t)
    assert other.evaluate("r.nbytes_mapped") == len(t.pages()) * PAGE


def test_bytes_written_in_place_are_seen_without_a_sync(pool, other):
    t = rows(pool, 100)
    other.receive(t)
    t.mul_(3)
    assert other.sync() is False and torch.equal(other.read(), t)


def test_a_page_that_a_reader_may_see_is_not_reused(pool, other):
    t = sent(other, rows(pool, 1000))
    shown = t.clone()
    other.keep("view")
    t.truncate(0)
    assert pool.stats().pages_held_by_readers > 100
    with pytest.raises(vtensor.OutOfPages):
        rows(pool, 1500)
    free = pool.stats().pages_free
    rest = rows(pool, free * 8 - 64)  # takes what is left, and writes there
    assert torch.equal(other.read("view"), shown)
    assert other.sync() is True
    assert eventually(lambda: pool.stats().pages_held_by_readers == 0)
    assert rows(pool, 700).length == 700
    del rest


def test_growth_finds_the_pages_that_a_reader_has_just_let_go(pool, other):
    t = sent(other, rows(pool))
    for _ in range(5):
        t.append(torch.zeros(2, 1000, 64))
        assert other.sync() is True
        t.truncate(0)
        assert other.sync() is True
        rows(pool, pool.budget // PAGE * 8 - 64).close()  # no look at the counts before it


def test_growth_finds_the_pages_that_it_unmaps_itself(pool_factory):
    """Their unmapping was refused before, and they left a tensor that is read no longer."""
    pool = pool_factory("host", 8, shareable=True, prefetch=0)
    t = vtensor.zeros(6 * PAGE, grow_dim=0, capacity=8 * PAGE, dtype=torch.uint8, pool=pool)
    receive(t).close()
    with testing.fail_after(pool, 0) as refused:
        t.close()
    assert refused
    with vtensor.zeros(6 * PAGE, grow_dim=0, capacity=8 * PAGE, dtype=torch.uint8, pool=pool) as other:
        assert other.length == 6 * PAGE


def test_no_other_tensor_comes_to_the_pages_of_one_that_is_read(kind, other):
    with shareable(kind, prefetch=1 << 20) as pool:
        t = sent(other, rows(pool, 300))
        shown = t.clone()
        t.close()
        for _ in range(3):
            rows(pool, 300).fill_(1)
        assert torch.equal(other.read(), shown)
        other.close()


def test_a_closed_reader_holds_what_its_views_show(pool, other):
    t = sent(other, rows(pool, 1000))
    shown = t.clone()
    other.keep("view")
    other.close()
    t.close()
    assert torch.equal(other.read("view"), shown)
    assert pool.stats().pages_held_by_readers > 0
    other.evaluate("held_view", held_view=None)
    other.receive(rows(pool), "view")  # in its place
    assert eventually(lambda: pool.stats().pages_held_by_readers == 0)
    other.close("view")


def test_a_reader_that_comes_while_contents_are_saved_keeps_them_awake(pool, monkeypatch):
    t = rows(pool, 10)
    memory, of_range = opened(t)  # on their way to it
    save, readers = _sleep._copy, []

    def come_first(copy, doing):
        readers.append(read(memory, of_range))
        save(copy, doing)

    monkeypatch.setattr(_sleep, "_copy", come_first)
    with pytest.raises(vtensor.VTensorError, match="1 readers in other processes"):
        pool.sleep(contents="host")
    assert t.extend(1).length == 11
    assert readers[0].sync()  # does not find it asleep


@pytest.mark.parametrize("end", ["close", "reallocate", "move", "reindex"])
def test_what_was_read_stays_when_the_writer_closes_or_moves(pool, other, end):
    t = sent(other, rows(pool, 300, when_full="move", capacity=400))
    shown = t.clone()
    if end == "close":
        t.close()
    elif end == "reallocate":
        t = t.reallocate(5000)
    elif end == "move":
        t.shrink(200, front=True)
        assert other.sync() is True
        shown = t.clone()
        t.extend(250)
    else:
        t.reindex([1, 0, 1])
    kind, text = other.sync()
    assert kind == "Closed" and "stays readable" in text
    assert torch.equal(other.read(), shown)


def test_rows_that_change_places_do_so_in_one_sync(pool, other, kind):
    t = sent(other, rows(pool, 300))
    before = t.clone()
    t.reindex([1, 0])
    synced = other.sync()
    if kind == "file":
        assert synced is True and torch.equal(other.read(), before[[1, 0]])
    else:  # they have moved to another range
        assert synced[0] == "Closed" and torch.equal(other.read(), before)


def test_forks_and_their_writes(pool, other):
    t = sent(other, rows(pool, 300))
    child = t.fork()
    assert other.receive(child, "child") == "Reader"
    before = t.clone()
    child.append(torch.ones(2, 1, 64))
    child[:, 5] = 1
    child.unshare(0, child.length)
    t.append(torch.zeros(2, 1, 64))
    other.sync(), other.sync("child")
    assert torch.equal(other.read()[:, :300], before)
    assert torch.equal(other.read(), t) and torch.equal(other.read("child"), child)
    other.close("child")


@on_the_host
def test_what_a_fork_has_written_is_shown(pool, other):
    t = rows(pool, 100)
    child = t.fork()
    child[:, 7] = 3  # the kernel copies the page
    other.receive(child)
    assert torch.equal(other.read(), child)


def test_memory_that_sleeps_is_not_sent(pool):
    t = rows(pool, 100)
    pool.sleep(contents="host")
    with pytest.raises(vtensor.Asleep):
        ForkingPickler.dumps(t)
    pool.wake()


def test_a_reader_that_is_refused_as_it_arrives_reads_nothing(pool):
    t = rows(pool, 100)
    ours, theirs = multiprocessing.Pipe()
    ours.send(t)
    pool.sleep(contents="host")
    with pytest.raises(vtensor.Asleep) as kept:
        theirs.recv()
    pool.wake()
    assert pool.sleep(contents="host") and kept
    pool.wake()


def test_a_reader_is_a_tensor_like_any_other(pool, other):
    t = sent(other, rows(pool, 100))
    assert other.evaluate("isinstance(r, VTensor)") is True
    assert other.evaluate("(r.capacity, r.grow_dim, r.closed, len(r.pages()))") == (4096, 1, False, 14)
    assert other.evaluate("r.address == r.data_ptr() and r.nbytes_mapped == 14 * 4096")
    assert "100 of 4,096 positions" in other.evaluate("repr(r)")
    assert other.evaluate("r._repr_mimebundle_()['text/plain'] == repr(r) and 'positions' in r._repr_html_()")
    assert torch.equal(other.evaluate("torch.nn.functional.softmax(r, -1)"), t.softmax(-1))
    assert other.evaluate("r.numpy()[0, 5:9].tolist()") == t[0, 5:9].tolist()
    assert not other.evaluate("r.numpy().flags.writeable")
    for write in (
        "r.append(r)",
        "r.extend(1)",
        "r.truncate(0)",
        "r.fork()",
        "r.mul_(2)",
        "r.__setitem__(0, 1)",
        "r.resize_(1)",
        "r.set_(r)",
    ):
        kind, text = other.evaluate(write)
        assert kind == "VTensorError" and "belongs to another process" in text, write
    for move in ("reserve(r, 9)", "reindex([r], [[0, 0]])"):
        kind, text = other.evaluate(f"vtensor.together.{move}")
        assert kind == "InvalidArgument" and "a Reader: give a VTensor" in text, move
    assert torch.equal(other.evaluate("__import__('copy').deepcopy(r)"), t)
    like = "(lambda made: (made.shape, made.dtype, made.capacity, made.pool.device))(vtensor.empty_like(r))"
    assert other.evaluate(like) == (t.shape, t.dtype, 4096, torch.device("cpu"))
    kind, text = other.evaluate("multiprocessing.reduction.ForkingPickler.dumps(r)")
    assert kind == "VTensorError" and "from the process that writes" in text
    kind, text = other.evaluate("vtensor.lease(r).__enter__()")
    assert kind == "InvalidArgument" and "record_stream" in text
    assert other.close() is None


def test_a_write_through_a_view_ends_the_process_with_a_report():
    script = """
        import torch, vtensor
        from support import received
        vtensor.explain_faults()
        pool = vtensor.Pool("cpu", shareable=True)
        t = vtensor.empty(100, 8, grow_dim=0, capacity=1000, pool=pool)
        received(t).alias()[3] = 1
    """
    ended = run_program(script)
    assert ended.code == -signal.SIGSEGV
    assert "memory of another process" in ended.err and "x.clone()" in ended.err


def test_sleep_waits_for_readers_to_close(pool, other):
    t = sent(other, rows(pool, 100))
    with vtensor.lease(t), pytest.raises(vtensor.VTensorError, match="1 readers in other processes"):
        pool.sleep(contents="host")  # not that the lease has not ended: that is not waited for
    t.append(torch.ones(2, 1, 64))
    assert other.sync() is True
    other.close()
    pool.sleep(contents="host")
    pool.wake()
    other.receive(t)
    assert torch.equal(other.read(), t)


# -- death


def test_a_killed_reader_frees_what_it_held(pool, short_lived):
    t = rows(pool, 1000)
    reader = short_lived()
    reader.receive(t)
    t.truncate(0)
    held = pool.stats().pages_held_by_readers
    assert held > 100
    reader.kill()
    began = time.monotonic()
    assert eventually(lambda: pool._core.counts().held_by_readers == 0)
    assert time.monotonic() - began < 5  # below 0.1 s on a quiet machine: benchmarks/sharing.py


def test_the_worker_frees_it_without_being_asked(kind, short_lived):
    with shareable(kind, prefetch=1 << 20) as pool:
        for patience in (0.5, 2, 8):  # asking for counts frees it too, but they say what was free before
            t = rows(pool, 1000)
            reader = short_lived()
            reader.receive(t)
            t.truncate(0)
            pool.wait_idle()
            before = pool.stats()
            assert before.pages_held_by_readers > 100
            reader.kill()
            time.sleep(patience)
            freed = pool._core.counts().spare >= before.pages_spare + before.pages_held_by_readers
            t.close()
            if freed:
                break
        assert freed


def test_a_killed_writer_leaves_what_was_synced(tmp_path, kind):
    address = str(tmp_path / "socket")
    with Listener(address, "AF_UNIX", authkey=b"x") as listener:
        arguments = address, sharing.cuda_library, HANDLES.get(kind, 1)
        writer = CONTEXT.Process(target=write_and_die, args=arguments)
        writer.start()
        with listener.accept() as pipe:
            phase = pipe.recv()
            memory, of_range = [reduction.recv_handle(pipe) for _ in range(2)]
            core = read(memory, of_range)
            core.sync()
            pipe.send(1)
        writer.join(60)
        assert writer.exitcode == -signal.SIGKILL
    view = sharing._View(0, phase, (100, 8), (8, 1), torch.float32).over(core)
    assert bool((view == 7).all())
    time.sleep(0.06)
    with pytest.raises(vtensor.Closed, match="the process that wrote has ended"):
        core.sync()
    assert bool((view == 7).all())
    core.close()


def test_a_forked_child_of_a_reader_or_writer_keeps_nothing_alive(pool):
    t = rows(pool, 1000)
    reader = received(t)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        t.truncate(0)
        assert pool.stats().pages_held_by_readers > 0
        reader.close()
        del reader
        gc.collect()
        assert eventually(lambda: pool.stats().pages_held_by_readers == 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@on_the_host
def test_a_forked_child_receives_readers_and_loses_those_of_its_parent(pool):
    t = rows(pool, 100)
    arena = vtensor.Arena(PAGE, pool=pool)
    mine, blocks = received(t), received(arena)
    total = float(t.double().sum())
    context = multiprocessing.get_context("fork")
    queue, back = context.Queue(), context.Queue()

    def read():
        torch.set_num_threads(1)
        got = queue.get(timeout=30)
        refused = [repr(blocks) == "<ArenaReader of the parent process>"]
        # Reading it would end the child.
        for touch in (
            mine.close,  # leaves it as it is
            mine.sum,
            mine.alias,
            mine.numpy,
            lambda: mine.data,
            lambda: blocks.tensor,
            blocks.sync,
        ):
            try:
                touch()
            except vtensor.VTensorError as error:
                refused.append("this process was forked" in str(error))
        back.put((float(got.double().sum()), refused))

    process = context.Process(target=read)
    process.start()
    queue.put(t)
    seen, refused = back.get(timeout=30)
    process.join(30)
    assert seen == total and refused == [True] * 8
    assert process.exitcode == 0 and torch.equal(mine.alias(), t)
    for one in (mine, blocks, arena):
        one.close()


# -- nothing is left


@pytest.mark.parametrize("n", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_sharing_leaves_no_descriptor_and_no_file(pool, n):
    t = rows(pool, 100)
    ours, theirs = multiprocessing.Pipe()

    def share():
        ours.send(t)
        theirs.recv().close()

    share()
    descriptors, shm = open_files(), named_memory()
    for _ in range(n):
        share()
    gc.collect()
    # Threads close some: multiprocessing's that sends, and the pool's that answers.
    assert eventually(lambda: open_files() <= descriptors)
    assert named_memory() <= shm


def test_a_program_that_a_reader_starts_inherits_no_descriptor(pool):
    def inherited():
        return len(subprocess.check_output(["ls", "/proc/self/fd"], close_fds=False).split())

    before = inherited()
    t = rows(pool, 100)
    reader = received(t)
    assert inherited() == before
    reader.close()


# -- trust


@pytest.mark.parametrize("memory", ["host", "simcuda"])
def test_a_pool_that_is_not_shareable_refuses(pool_factory, memory):
    pool = pool_factory(memory)
    assert pool.stats().sharing == "none"
    t = vtensor.empty(4, 4, grow_dim=0, capacity=100, pool=pool)
    with pytest.raises(vtensor.InvalidArgument, match="shareable=True"):
        ForkingPickler.dumps(t)
    with pytest.raises(vtensor.InvalidArgument, match="shareable=True"):
        ForkingPickler.dumps(vtensor.Arena(PAGE, pool=pool))


def test_plain_pickles_hand_nothing_over(pool):
    t = rows(pool, 10)
    assert torch.equal(pickle.loads(pickle.dumps(t)), t)  # a copy
    module = torch.nn.Linear(8, 8)
    vtensor.adopt(module, pool)
    for what in (vtensor.Arena(PAGE, pool=pool), vtensor.share(module)):
        with pytest.raises(TypeError, match="can be neither pickled nor copied"):
            pickle.dumps(what)


def test_a_reader_is_not_sent_on(pool):
    arena = vtensor.Arena(PAGE, pool=pool)
    for reader, refusal in ((received(rows(pool, 10)), vtensor.VTensorError), (received(arena), TypeError)):
        for _ in "open", "closed":
            with pytest.raises(refusal, match=r"^\[\w*Reader.*: send .* from the process that writes"):
                ForkingPickler.dumps(reader)
            reader.close()
    arena.close()


@on_the_host
@pytest.mark.parametrize(
    "wrong",
    ["text", "memfd", "pipe", "unsealed", "shorter", "swapped", "other memory", "other words", "cut"],
)
def test_what_is_not_ours_is_refused(pool, tmp_path, wrong):
    t = rows(pool, 10)
    of_memory, of_range = opened(t)
    words = 2
    if wrong == "text":
        (tmp_path / "text").write_text("vtshare" * 1000)
        os.close(of_range)
        of_range = os.open(tmp_path / "text", os.O_RDWR)
    elif wrong == "memfd":
        os.close(of_range)
        of_range = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    elif wrong == "pipe":
        os.close(of_range)
        of_range, end = os.pipe()
        os.close(end)
    elif wrong in ("unsealed", "shorter"):  # as it is, in a file that may be cut; or that lacks its end
        with open(of_range, "rb") as ours:
            content = ours.read()
        of_range = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
        os.write(of_range, content if wrong == "unsealed" else content[:-8])
        if wrong == "shorter":
            fcntl.fcntl(of_range, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    elif wrong == "swapped":
        of_range, of_memory = of_memory, of_range
    elif wrong == "other memory":
        os.close(of_memory)
        with shareable("file") as another:
            u = rows(another, 10)
            of_memory, unused = opened(u)
            os.close(unused)
    elif wrong == "other words":
        words = 3
    else:
        os.close(of_memory)
        of_memory = os.memfd_create("cut")
    descriptors = open_files()
    mappings = memfd_mappings()
    with pytest.raises(vtensor.InvalidArgument, match="cannot be read"):
        read(of_memory, of_range, words=words)
    assert open_files() == descriptors - 2
    assert memfd_mappings() == mappings


@on_the_host
def test_a_tensor_that_does_not_lie_in_its_range_is_refused(pool):
    core = receive(rows(pool, 10))
    most = core.bytes(0) // 256
    for offset, sizes, stride in ((0, most + 1, 64), (256, most, 64), (2, 1, 64), (-256, 1, 64), (0, 1, -64)):
        view = sharing._View(0, offset, (sizes, 64), (stride, 1), torch.float32)
        with pytest.raises(vtensor.VTensorError, match="does not fit its range"):
            view.over(core)
    core.close()


@on_the_host
def test_what_comes_after_the_end_of_its_sender_is_refused(kind, short_lived):
    sender = short_lived()
    tensor = "vtensor.zeros(4, 8, grow_dim=0, capacity=9, pool=vtensor.Pool('cpu', shareable=True))"
    sent = sender.evaluate(f"bytes(sharing.reduction.ForkingPickler.dumps({tensor}))")
    sender.kill()
    files = open_files()
    with pytest.raises(vtensor.VTensorError, match="did not arrive .* while its sender lives"):
        pickle.loads(sent)
    assert open_files() == files


def test_readers_have_a_bound(pool):
    t = rows(pool, 10)
    readers = []
    with pytest.raises(vtensor.VTensorError, match="128 places for readers"):
        for _ in range(200):
            readers.append(receive(t))
    assert len(readers) == 128
    readers.pop().close()
    receive(t).close()
    for reader in readers:
        reader.close()


# -- refused calls


def test_handing_over_that_is_interrupted_leaves_no_descriptor(pool, monkeypatch):  # I17
    t, on_the_way = rows(pool, 10), []

    class Sent:
        """What multiprocessing makes of a descriptor, whose duplicate stays with it."""

        def __init__(self, descriptor: int) -> None:
            self.descriptor = os.dup(descriptor)
            on_the_way.append(self.descriptor)

        def detach(self) -> int:
            on_the_way.remove(self.descriptor)
            return self.descriptor

    monkeypatch.setattr(sharing.reduction, "DupFd", Sent)

    def hand_over(_: Any) -> VTensor:
        rebuild, arguments = sharing._reduce(t)
        return rebuild(*arguments)

    def check(before: int, outcome: Outcome) -> None:
        if not outcome.interrupted:
            outcome.result.close()
        for descriptor in on_the_way:
            os.close(descriptor)
        on_the_way.clear()
        # A device's writer closes its end by itself; a reader may wait for the collector.
        eventually(lambda: open_files() <= before or gc.collect() < 0)

    hand_over(None).close()
    gc.collect()
    assert at_every_bytecode(setup=open_files, operation=hand_over, check=check) > 50


def test_a_tensor_that_closes_as_it_is_sent_leaves_no_descriptor(pool, monkeypatch):
    """A queue pickles on a thread of its own, beside the one that closes."""
    t, duplicated = rows(pool, 10), []

    class Closing:
        @staticmethod
        def open_for_readers(core: Any, tensor: VTensor) -> Any:
            opened = core.open_for_readers(tensor)
            tensor.close()
            return opened

    monkeypatch.setattr(sharing, "TensorCore", Closing)
    monkeypatch.setattr(sharing.reduction, "DupFd", duplicated.append)
    with pytest.raises(vtensor.Closed):
        ForkingPickler.dumps(t)
    assert not duplicated  # multiprocessing would keep them until they are received


def test_an_interrupted_sync_shows_all_of_one_moment(pool):  # I17
    t = rows(pool, 10)
    reader = received(t)

    def grow() -> None:
        t.append(torch.ones(2, 1, 64))

    def check(_: Any, outcome: Outcome) -> None:
        assert reader.length == reader.shape[1]
        reader.sync()
        assert torch.equal(reader, t)

    assert at_every_bytecode(grow, lambda _: reader.sync(), check, within=sharing) > 20
    reader.close()


def test_an_interrupted_close_of_a_reader_of_tensors_is_whole(pool):  # I17
    arena = vtensor.Arena(1 << 16, pool=pool)

    def check(reader: Any, outcome: Outcome) -> None:
        if not reader.closed:
            assert reader.tensor.shape == (1 << 16,)
        reader.close()

    close = sharing.ArenaReader.close
    assert at_every_bytecode(lambda: received(arena), close, check, within=sharing) > 0


def test_each_refused_call_of_a_writer_leaves_it_as_it_was(pool):
    for call in itertools.count():
        t, descriptors = rows(pool, 10), None
        with testing.fail_after(pool, call) as refused, suppress(vtensor.DriverError):
            descriptors = opened(t)
        core = read(*(descriptors or opened(t)))
        core.sync()
        assert core.words == [0, 10]
        core.close()
        t.append(torch.ones(2, 1, 64)).close()
        if not refused:
            break


def test_a_refused_sync_shows_what_was_there(pool, kind):
    t = rows(pool, 10)
    core = receive(t)
    core.sync()
    t.append(torch.randn(2, 500, 64))
    t.fork().append(torch.ones(2, 1, 64))
    refused = 0
    for call in itertools.count():
        core.fail_after(call, 1)
        try:
            core.sync()
            break
        except vtensor.DriverError:
            refused += 1
            assert core.words == [0, 10]
    core.fail_after(1 << 40, 1)
    core.sync()
    assert refused > (1 if kind in HANDLES else 0) and core.words == [0, 510]
    seen = torch.empty(0, dtype=torch.float32).set_(core.storage(0, 0, 510 * 256), 0, (510, 64), (64, 1))
    assert torch.equal(seen, t[0])
    del seen
    core.close()


# -- arenas, modules, caches


def test_an_arena(pool, other, kind):
    arena = vtensor.Arena(1 << 20, pool=pool)
    assert other.receive(arena) == "ArenaReader"
    arena.map([(70000, 90000), (4096, 8192)])
    arena.tensor[70000:90000] = 7
    assert other.sync() is True
    mapped = slice(70000, 90000) if kind in HANDLES else slice(0, 100000)  # a device has holes
    assert torch.equal(other.evaluate("r.tensor[mapped].clone()", mapped=mapped), arena.tensor[mapped])
    arena.unmap([(70000, 90000)])
    arena.trim()
    assert other.sync() is True
    if kind not in HANDLES:
        assert other.evaluate("int(r.tensor[70000:90000].sum())") == 0
    arena.map([(70000, 90000)])
    arena.tensor[70000:90000] = 5
    assert other.sync() is True
    assert other.evaluate("int(r.tensor[70000:90000].sum())") == 5 * 20000
    mapped = byte_text(arena.stats().nbytes_mapped)
    assert other.evaluate("repr(r)") == f"<ArenaReader of 1 tensor, {mapped} of another process mapped>"
    arena.close()
    assert other.sync()[0] == "Closed"


def test_a_module(pool, other):
    module = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.BatchNorm1d(50))
    vtensor.adopt(module, pool)
    assert other.receive(vtensor.share(module)) == "ModuleReader"
    assert other.evaluate("sorted(r.state_dict())") == sorted(module.state_dict())
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert torch.equal(other.evaluate("r.state_dict()['0.weight'].clone()"), module[0].weight)
    save = "(torch.save(r.state_dict(), file := __import__('io').BytesIO()), file.getvalue())[1]"
    saved = other.evaluate(save)
    assert len(saved) < 10 * PAGE  # not the range
    assert torch.equal(torch.load(io.BytesIO(saved))["0.weight"], module[0].weight)
    other.close()
    with pytest.raises(vtensor.InvalidArgument, match="in no pool"):
        vtensor.share(torch.nn.Linear(2, 2))
    part = module.append(torch.nn.ReLU())[-1]  # without elements
    with pytest.raises(vtensor.InvalidArgument, match="no tensor of the module has memory"):
        ForkingPickler.dumps(vtensor.share(part))
    module[0].bias = torch.nn.Parameter(torch.zeros(50))
    with pytest.raises(vtensor.InvalidArgument, match="0.bias is not in the pool .* call vtensor.adopt"):
        ForkingPickler.dumps(vtensor.share(module))


def test_a_cache_shows_whole_steps(pool, other):
    cache = make_cache(pool, max_batch=3, max_len=512)
    assert other.receive(cache) == "CacheReader"
    slots = [cache.alloc(), cache.alloc()]
    lengths = [0, 0, 0]
    for n in (5, 40, 41, 300):
        lengths[slots[0]], lengths[slots[1]] = n, n // 2
        assert cache.step(lengths)
        for tensor, slot in itertools.product(itertools.chain(*cache), slots):
            tensor[slot, : lengths[slot]].normal_()
        assert other.sync() is True and other.lengths() == lengths
        for layer, slot in itertools.product(range(cache.num_layers), slots):
            for seen, own in zip(other.layer(layer, slot, lengths[slot]), cache[layer], strict=True):
                assert torch.equal(seen, own[slot, : lengths[slot]])
    cache.truncate(slots[0], 7)
    cache.free(slots[1])
    lengths[slots[0]], lengths[slots[1]] = 7, 0
    assert other.sync() is True and other.lengths() == lengths == cache.lengths
    cache.fork(slots[0], 1)
    assert other.sync() is True and other.lengths() == cache.lengths
    shown = other.layer(0, slots[0], 7)
    cache.close()
    assert other.sync()[0] == "Closed"
    assert torch.equal(other.layer(0, slots[0], 7)[0], shown[0])


@on_the_host
def test_a_freed_slot_shows_what_it_had_until_it_is_used_again(kind, other):
    """Also while the worker has nothing else to do than to zero its pages for the next request."""
    with shareable(kind, prefetch=64 * PAGE) as pool, make_cache(pool) as cache:
        slot = cache.alloc()
        assert grown(cache, slot, 20)
        for tensor in cache[0]:
            tensor[slot, :20] = 7
        other.receive(cache)
        cache.free(slot)
        pool.wait_idle()
        assert pool.stats().pages_cached
        assert other.evaluate(f"bool(r[0][0][{slot}, :20].eq(7).all())")
        other.sync()
        other.close()
        again = cache.alloc()
        assert grown(cache, again, 20)
        assert not cache[0][0][again, :20].any()


def test_a_slot_has_no_tokens_before_its_prefix_is_mapped(kind, other):
    with shareable(kind, prefetch=1 << 20) as pool:
        cache = make_cache(pool, max_batch=3, max_len=512, lookahead=16)
        tokens = torch.arange(400)
        slot = cache.alloc()
        assert grown(cache, slot, 300)
        cache[0][0][slot, :300] = 3
        cache.publish(slot, tokens[:300])
        other.receive(cache)
        cache.free(slot)
        pool.wait_idle()
        hit = cache.alloc(tokens, deferred=True)
        found = cache.length(hit)
        assert found > 0
        other.sync()
        assert other.lengths()[hit] == 0
        assert grown(cache, hit, found)
        assert other.sync() is True and other.lengths() == cache.lengths
        assert bool((other.layer(0, hit, found)[0] == 3).all())
        other.close()
        cache.close()


@pytest.mark.parametrize(
    ("idle", "bands"), [(False, None), (True, None), (False, [0])], ids=["wait", "wait_idle", "a band"]
)
def test_a_swapped_slot_has_no_tokens_until_it_is_whole_again(pool, other, idle, bands):
    """Nor has one whose other band is here: its length is not 0."""
    cache = make_cache(pool, max_batch=2, max_len=512, bands=2 if bands else 1)
    slot = cache.alloc()
    lengths = lengths_with(cache, slot, 100)
    assert cache.step(lengths)
    for k, v in cache:
        k[slot, :100], v[slot, :100] = 3, 3
    other.receive(cache)
    assert other.lengths() == lengths
    cache.swap_out([slot], bands=bands)
    assert cache.lengths == (lengths if bands else [0, 0])
    assert other.sync() is True and other.lengths() == [0, 0]
    cache.swap_in([slot], bands=bands)
    pool.wait_idle() if idle else cache.wait(slot)
    assert other.sync() is True and other.lengths() == lengths
    assert bool((other.layer(0, slot, 100)[0] == 3).all())

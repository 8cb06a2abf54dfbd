"""Readers of a device's pages: order with the work of both processes, refused calls, what a device shares.

Over the simulated libcuda. What holds on the host too is in test_readers.py.
"""

from __future__ import annotations

import itertools
import os
import resource
import socket
import struct
import time
from concurrent.futures import Future, wait

import pytest
import torch
from vtensor.integrations.sdpa import scaled_dot_product_attention

import vtensor
from cuda_support import device, needs_simcuda
from reader_process import HANDLES, ReaderProcess, limit_descriptors, opened, read, receive, rows
from support import beside, on_a_device, received, run_program, simcuda_disarm, simcuda_leaks, simcuda_library
from vtensor import sharing

pytestmark = needs_simcuda

PAGE = 4096


@pytest.fixture(params=HANDLES)
def way(request):
    with device(handle_types=HANDLES[request.param]):
        yield request.param


@pytest.fixture
def make_pool(pool_factory, sim):
    return lambda pages=256, **kw: pool_factory("simcuda", pages, shareable=True, **kw)


@pytest.fixture
def reading(make_pool):
    """Makes a tensor of so many positions, and a reader of it that has synced."""
    cores = []

    def read(n, **options):
        t = rows(make_pool(**options), n)
        cores.append(receive(t))
        cores[-1].sync()
        return t, cores[-1]

    yield read
    for core in cores:
        core.close()


def shown(core, t):
    """What the reader shows of the tensor's capacity."""
    sizes = (2, t.capacity, 64)
    whole = core.storage(0, 0, core.bytes(0))
    return torch.empty(0).set_(whole, t._core.phase // 4, sizes, t.stride())


def assert_shows(core, t):
    begin, end = core.words
    assert torch.equal(shown(core, t)[:, begin:end], t)


def launch(sim, stream, core, t):
    """A kernel of the reader's over all that it shows."""
    for row in shown(core, t):
        sim.kernel(stream, row, *core.words)


def waits(call: Future) -> bool:
    return not wait([call], 0.1).done


# -- order


def test_a_sync_waits_for_the_work_that_the_writer_has_launched(reading, sim):
    t, core = reading(10)
    stream = sim.stream(held=True)
    t.record_stream(stream)
    for change in (lambda: t.extend(500), lambda: t.extend(1)):  # with new pages, and without
        change()
        sim.kernel(stream, t, t.length - 1, writes=7)
        reading = beside(core.sync)
        assert waits(reading)
        sim.release(stream)
        assert reading.result(30) is True
        assert core.words[1] == t.length
        assert_shows(core, t)
        sim.hold(stream)
    sim.release(stream)


@pytest.mark.parametrize("takes", ["sync", "close"])
def test_pages_are_taken_away_only_after_the_readers_kernels(reading, sim, takes):
    t, core = reading(500)
    stream = sim.stream(held=True)
    core.record_stream(stream)  # of work to come
    launch(sim, stream, core, t)
    t.truncate(0)
    t.pool.wait_idle()
    taking = beside(getattr(core, takes))
    assert waits(taking)
    assert t.pool.stats().pages_held_by_readers > 0
    sim.release(stream)
    if takes == "sync":
        assert taking.result(30) is True and core.words == [0, 0]
    taking.result(30)
    assert t.pool.stats().pages_held_by_readers == 0
    assert sim.illegal_accesses() == 0


def test_a_sync_waits_for_what_a_shim_has_launched(make_pool, sim, monkeypatch):
    """In a stream that the reader has not seen before."""
    monkeypatch.setattr(sharing, "cuda_library", str(simcuda_library()))
    t = vtensor.zeros(1, 500, 1, 64, grow_dim=1, capacity=4096, pool=make_pool())
    stream = sim.stream(held=True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with received(t) as reader:
        scaled_dot_product_attention(on_a_device(torch.zeros(1, 1, 1, 64)), reader, reader)
        sim.kernel(stream, reader)
        t.truncate(0)
        t.pool.wait_idle()
        reading = beside(reader.sync)
        assert waits(reading)
        sim.release(stream)
        assert reading.result(30) is True and reader.length == 0
    assert sim.illegal_accesses() == 0


def test_a_close_beside_a_sync_comes_after_it(make_pool, sim, monkeypatch):
    monkeypatch.setattr(sharing, "cuda_library", str(simcuda_library()))
    t = rows(make_pool(), 10)
    reader = received(t)
    stream = sim.stream(held=True)
    t.record_stream(stream)
    t.extend(500)
    sim.kernel(stream, t, writes=7)
    syncing, closing = beside(reader.sync), beside(reader.close)
    assert waits(syncing) and waits(closing)
    sim.release(stream)
    assert syncing.result(30) is True and closing.result(30) is None
    assert reader.closed


def test_a_close_beside_a_capture_leaves_the_reader_over():
    """So the writer keeps the pages, and the capture stays valid. In a process of its own: it leaks."""
    script = """
        from test_device_readers import *
        from support import open_pool
        from stream_support import SimulatedDevice
        sim = SimulatedDevice()
        t = rows(open_pool("simcuda", 256, shareable=True), 100)
        core = receive(t)
        core.sync()
        stream = sim.stream()
        core.record_stream(stream)
        sim.begin_capture(stream)
        launch(sim, stream, core, t)
        core.close()
        graph = sim.end_capture(stream)
        t.truncate(0)
        assert t.pool.stats().pages_held_by_readers > 0
        sim.replay(sim.instantiate(graph), stream)
        assert sim.pending(stream) == 0 and sim.illegal_accesses() == 0
    """
    run_program(script).check()


def test_a_refused_sync_leaves_no_old_length_over_pages_that_went(reading, sim):
    t, core = reading(300)
    t.shrink(100, front=True)  # pages go, and others come
    t.append(torch.randn(2, 300, 64))
    for call in ("cuMemMap", "cuMemSetAccess", "cuMemImportFromShareableHandle"):
        sim.fail(call, 1)
        with pytest.raises(vtensor.VTensorError):
            core.sync()
        assert core.words == [0, 300]
        shown(core, t)[:, :300].sum()  # no page of these is gone
    sim.fail("cuMemUnmap")
    with pytest.raises(vtensor.DriverError):
        core.sync()
    assert_shows(core, t)
    assert core.sync() is True
    assert_shows(core, t)


def test_a_pool_closes_while_a_reader_waits_for_its_work(reading, sim):
    t, core = reading(10)
    stream = sim.stream(held=True)
    t.record_stream(stream)
    t.extend(1)
    sim.kernel(stream, t, 0, 11)
    reading = beside(core.sync)
    assert waits(reading)
    began = time.monotonic()
    t.pool._core.retire()
    assert time.monotonic() - began < 10
    assert isinstance(reading.exception(30), vtensor.VTensorError)
    with pytest.raises(vtensor.Closed, match="the pool is closed"):
        receive(t)
    sim.release(stream)


def test_pages_of_any_multiple_of_the_granularity_are_read(reading):
    t, core = reading(100, page_size=3 * PAGE)
    assert core.page_size == 3 * PAGE
    assert_shows(core, t)


def test_a_wait_for_the_writers_work_is_bounded(reading, sim):
    t, core = reading(10, patience=0.2)
    stream = sim.stream(held=True)
    t.record_stream(stream)
    t.extend(300)
    sim.kernel(stream, t, 0, 310)
    with pytest.raises(vtensor.VTensorError, match="no pages came from the writer.*timed out after 0.2 s"):
        core.sync()
    assert core.words == [0, 10]
    sim.release(stream)
    assert core.sync() is True
    assert_shows(core, t)


def test_a_writer_that_captures_a_graph_says_so(reading, sim):
    t, core = reading(10)
    stream = sim.stream()
    t.record_stream(stream)
    t.extend(1)
    sim.begin_capture(stream)
    with pytest.raises(vtensor.VTensorError, match="being captured into a CUDA graph"):
        core.sync()
    sim.destroy_graph(sim.end_capture(stream))
    assert core.sync() is True and core.words == [0, 11]


# -- pages


def test_more_pages_than_a_message_has_come_in_one_sync(reading, way):
    t, core = reading(10, pages=1000)
    t.append(torch.randn(2, 4000, 64))
    assert core.sync() is True and core.mapped(0) > 300
    assert_shows(core, t)


def test_one_page_at_two_places_is_fetched_once(make_pool, way):
    t = rows(make_pool(), 300).reindex([1, 1])
    core = receive(t)
    core.sync()
    assert_shows(core, t)
    core.close()


@pytest.mark.parametrize("limited", ["reader", "writer"])
def test_too_few_descriptors_are_a_refusal(make_pool, limited):
    reader = ReaderProcess()
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        t = rows(make_pool(1000), 10)
        reader.receive(t)
        t.append(torch.randn(2, 2000, 64))
        if limited == "reader":
            reader.evaluate("limit_descriptors(20)")
        else:
            limit_descriptors(20)
        kind, text = reader.sync()
        assert kind == "VTensorError"
        assert ("ulimit -n" if limited == "reader" else "cuMemExportToShareableHandle") in text
        reader.evaluate("limit_descriptors(1000)")
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        assert reader.sync() is True and torch.equal(reader.read(), t)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        reader.end()


def test_pages_that_a_reader_shows_no_more_are_given_back(reading, way):
    t, core = reading(10)
    before = simcuda_leaks().handles
    t.append(torch.randn(2, 1000, 64))
    core.sync()
    t.truncate(10)
    core.sync()
    t.pool.trim()
    assert simcuda_leaks().handles == before


def test_fabric_handles_that_are_not_permitted_are_not_used(make_pool):
    with device(handle_types=9, imex=0):
        assert make_pool().stats().sharing == "descriptors"


def test_a_pool_whose_device_shares_nothing_is_refused(make_pool):
    with device(handle_types=0), pytest.raises(vtensor.InvalidArgument, match="cuda:0 makes no memory"):
        make_pool()
    with device(handle_types=8, imex=0), pytest.raises(vtensor.InvalidArgument, match="makes no memory"):
        make_pool()


def test_a_reader_finds_the_device_whatever_its_number(make_pool):
    with device(devices=3):
        t = rows(make_pool(), 10)
        with device(first_uuid=0):  # the writer's is the second here
            core = receive(t)
        core.sync()
        assert_shows(core, t)
        core.close()
        with (
            device(first_uuid=5),
            pytest.raises(vtensor.InvalidArgument, match="none of the 3 CUDA devices.*CUDA_VISIBLE_DEVICES"),
        ):
            receive(t)


# -- trust and ends


def memory_of(t):
    """The descriptor of its memory alone."""
    memory, of_range = opened(t)
    os.close(of_range)
    return memory


def range_of(t):
    memory, of_range = opened(t)
    os.close(memory)
    return of_range


def test_what_is_no_socket_of_the_writer_is_refused(make_pool):
    t, other = rows(make_pool(), 10), rows(make_pool(), 10)
    with pytest.raises(vtensor.InvalidArgument, match="no socket"):
        read(os.memfd_create("other"), range_of(t))
    core = read(memory_of(other), range_of(t))
    with pytest.raises(vtensor.VTensorError, match="pages of another pool"):
        core.sync()
    core.close()


# PageMessage::Content: number, device and inode of the memory, count, kind, handles, fabric handles, refusal.
MESSAGE = struct.Struct("=QQQIBxxx1024s8192s1000s")


def test_a_question_for_what_is_no_page_is_refused(make_pool):
    t = rows(make_pool(), 10)
    memory, of_range = opened(t)
    file = os.fstat(of_range)  # which names the memory
    question = MESSAGE.pack(7, file.st_dev, file.st_ino, 1, 0, (12345).to_bytes(8, "little"), b"", b"")
    with socket.socket(fileno=memory) as asking:
        asking.settimeout(30)
        asking.send(question)
        number, *_, refusal = MESSAGE.unpack(asking.recv(20_000))
    assert number == 7 and b"12345 was asked for, which is no page" in refusal
    os.close(of_range)


def test_what_has_no_range_is_refused(make_pool):
    t = rows(make_pool(), 10)
    with pytest.raises(vtensor.InvalidArgument, match="it has no range"):
        read(memory_of(t))


def test_a_message_that_is_none_ends_that_connection_alone(make_pool):
    t = rows(make_pool(), 10)
    with socket.socket(fileno=memory_of(t)) as bad:
        bad.send(b"give me everything" * 10)
        bad.settimeout(30)
        assert bad.recv(100) == b""
    core = receive(t)
    core.sync()
    assert_shows(core, t)
    core.close()


@pytest.fixture
def asked_by_a_reader(make_pool):
    """A socket at which the test answers as a writer, the question that a sync asked there, and the sync."""
    t = rows(make_pool(), 10)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    core = read(theirs.detach(), range_of(t))
    syncing = beside(core.sync)
    yield ours, ours.recv(20_000), syncing
    ours.close()
    core.close()


NUMBERS = (1, 0, 0)
LONG = b"x" * 1000


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense",
        MESSAGE.pack(*NUMBERS, 129, 0, b"", b"", b""),  # more pages than a message has
        MESSAGE.pack(*NUMBERS, 1, 2, b"", b"", b""),  # a descriptor that did not come
        MESSAGE.pack(*NUMBERS, 0, 0, b"", b"", LONG),  # a text that does not end
        MESSAGE.pack(*NUMBERS, 0, 0, b"", b"", b"") + b"and more",
    ],
)
def test_an_answer_that_is_none_is_refused(asked_by_a_reader, answer):
    ours, _, syncing = asked_by_a_reader
    ours.send(answer)
    assert isinstance(syncing.exception(30), vtensor.Closed)


def test_an_answer_to_an_older_question_is_passed_over(asked_by_a_reader):
    ours, question, syncing = asked_by_a_reader
    number, *_ = MESSAGE.unpack(question)
    for answered, text in ((number - 1, b"late"), (number, b"now")):
        ours.send(MESSAGE.pack(answered, 0, 0, 0, 0, b"", b"", text))
    assert str(syncing.exception(30)).endswith("no pages came from the writer: now")


# -- refused calls


@pytest.mark.parametrize("code", [2, 999], ids=["out of memory", "unknown"])
def test_each_refused_call_of_a_reader_is_a_refusal(make_pool, sim, way, code):
    t = rows(make_pool(), 10)
    before = simcuda_leaks().handles
    refused = 0
    for n in itertools.count():
        t.truncate(10)
        core = None
        sim.fail("*", n, 1, code)
        try:
            core = receive(t)
            core.sync()
            t.append(torch.randn(2, 200, 64))
            core.sync()
            t.truncate(20)
            core.sync()
        except vtensor.VTensorError:
            refused += 1
        still = simcuda_disarm()
        if core is not None:
            t.append(torch.randn(2, 30, 64))
            try:
                core.sync()
                assert_shows(core, t)
            except vtensor.DriverError:  # what could not be undone is raised each time
                pass
            core.close()
        if still:
            break
    assert refused > 30
    t.truncate(10)
    t.pool.trim()
    assert simcuda_leaks().handles <= before

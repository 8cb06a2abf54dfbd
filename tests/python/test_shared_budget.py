"""Pools of several processes under one budget: never more than that in all, whatever any of them does or dies
of; each reaches the whole; `python -m vtensor top` shows them.

The other processes are forked from a server that has imported torch and nothing else, so to vtensor they are
processes of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import vtensor
from kv_support import grown, lengths_with, make_cache
from reader_process import Helper
from scenes import Tensors
from stream_support import SimulatedDevice
from support import (
    SOAK,
    beside,
    check_sums,
    eventually,
    leave_spare,
    open_files,
    open_pool,
    run_snippet,
    sometimes,
)
from test_failing_calls import refuse_each
from vtensor import _core, testing
from vtensor.cli import top

PAGE = 4096
WHOLE = 64  # pages of the budget, unless a test says otherwise

_names = itertools.count()


@pytest.fixture
def name(request):
    name = f"test-{os.getpid()}-{next(_names)}"
    yield name
    if getattr(request.node, "failed_call", True):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(name))
    assert not os.path.exists(path_of(name))


def budgeted(name, whole=WHOLE, *, kind="host", **options):
    """A pool of this shared budget."""
    return open_pool(kind, whole, shared_budget=name, **options)


def path_of(name):
    return f"/dev/shm/vtensor-{os.geteuid()}-{name}"


def pages(pool, n=0, capacity=4096, **kw):
    """A tensor of `n` positions of a page each."""
    return vtensor.empty(n, PAGE, grow_dim=0, capacity=capacity, dtype=torch.uint8, pool=pool, **kw)


def held(pool):
    """Pages that the pool holds, and the others of its budget."""
    stats = pool.stats()
    return stats.nbytes_held // PAGE, stats.nbytes_held_by_others // PAGE


def refused_after(call, *arguments) -> float:
    """Seconds, until it was refused for want of memory. One is for a stopped process: all others answer."""
    began = time.monotonic()
    with pytest.raises(vtensor.OutOfPages):
        call(*arguments)
    return time.monotonic() - began


LAST_REQUEST = 12  # in the file, behind the magic number and the layout


def last_request(name) -> bytes:
    with open(path_of(name), "rb") as file:
        file.seek(LAST_REQUEST)
        return file.read(4)


def survey(name, patience=0.3):
    """The pools of the budget, all at one moment."""
    found = [budget for budget in _core.survey_budgets(patience)[0] if budget.name == name]
    return found[0].holders if found else []


# -- another process


class Other(Helper):
    """A process with a pool of the budget, which runs the commands that it is sent."""

    patience = None

    def __init__(self, kind, name, whole=WHOLE, **options):
        super().__init__(_with_pool, kind, name, whole, options)
        self("held")  # it is open


def _with_pool(kind, name, whole, options):
    pool = open_pool(kind, whole, shared_budget=name, **options)
    tensors = []
    return lambda command, *arguments: _COMMANDS[command](pool, tensors, *arguments)


def _fork(pool, tensors):
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    return child


def _work(pool, tensors, seed, steps):
    """Random operations; returns how many were refused for want of memory."""
    draw = random.Random(seed)
    whole = pool.budget // PAGE
    refused = 0
    for _ in range(steps):
        try:
            _step(pool, tensors, draw, whole)
        except vtensor.OutOfPages:
            refused += 1
    return refused


def _step(pool, tensors, draw, whole):
    """One operation. No write to a shared page, for which the kernel does not ask."""
    what = draw.random()
    if not tensors or (what < 0.05 and len(tensors) < 6):
        tensors.append(pages(pool, capacity=whole))
        return
    at = draw.randrange(len(tensors))
    t = tensors[at]
    if what < 0.5:
        t.extend(draw.randint(0, min(whole // 8, whole - len(t))))
    elif what < 0.85:
        t.shrink(draw.randint(0, len(t)))
    elif what < 0.9 and len(tensors) < 6:
        tensors.append(t.fork())
    elif what < 0.91:
        pool.trim()
    else:
        tensors.pop(at).close()


_COMMANDS = {
    "grow": lambda pool, tensors, n: tensors.append(pages(pool, n)),
    "extend": lambda pool, tensors, n: len(tensors[-1].extend(n)),
    "close": lambda pool, tensors: tensors.pop().close(),
    "held": lambda pool, tensors: held(pool),
    "check": lambda pool, tensors: pool._core.check_invariants(),
    "fork": _fork,
    "work": _work,
    "end": lambda pool, tensors: pool.close(),
}


# -- the budget


def test_each_reaches_the_whole_and_neither_more(kind, name):
    with budgeted(name, kind=kind) as pool, Other(kind, name) as other:
        other("grow", 40)
        t = pages(pool, 24)
        assert held(pool) == (24, 40) and other("held") == (40, 24)
        with pytest.raises(vtensor.OutOfPages, match="need 1 pages") as refusal:
            t.extend(1)
        assert f'the budget "{name}" of {WHOLE * PAGE} bytes has 0 left' in str(refusal.value)
        assert f"the others {40 * PAGE}" in str(refusal.value)
        with pytest.raises(vtensor.OutOfPages):
            other("extend", 1)
        assert len(t) == 24 and held(pool) == (24, 40)
        t.close()
        other("extend", 24)
        assert other("held") == (WHOLE, 0)
        other("close")
        t = pages(pool, WHOLE)
        assert held(pool) == (WHOLE, 0)
        with pytest.raises(vtensor.OutOfPages):
            t.extend(1)
        other("check")
        pool._core.check_invariants()


@pytest.mark.parametrize("keeps", ["spare", "cached", "prepared", "arena"])
def test_what_one_keeps_without_need_goes_to_the_pool_that_needs_it(kind, keeps, name):
    options = {"prefetch": WHOLE * PAGE, "cache": WHOLE * PAGE}
    with budgeted(name, kind=kind, **options) as keeper, budgeted(name, kind=kind) as pool:
        kept = None
        if keeps == "spare":
            leave_spare(keeper, 60)
            assert keeper.stats().pages_spare == 60
        elif keeps == "cached":
            pages(keeper, 60, capacity=60).close()
            keeper.wait_idle()
            assert keeper.stats().pages_cached == 60
        elif keeps == "prepared":
            kept = pages(keeper, 4)
            kept.prepare(56)
            keeper.wait_idle()
            assert keeper.stats().pages_prefetched == 56
        else:
            kept = vtensor.Arena(60 * PAGE, pool=keeper)
            kept.map([(0, 60 * PAGE)])
            kept.unmap([(0, 60 * PAGE)])
            assert keeper.stats().pages_cached == 60
        needed = 4 if keeps == "prepared" else 0
        t = pages(pool)
        for n in (10, 20, WHOLE - needed - 30):
            t.extend(n)
        assert held(pool) == (WHOLE - needed, needed)
        keeper._core.check_invariants()
        if kept is not None:
            kept.close()


def test_others_keep_what_they_cache_where_the_whole_budget_is_too_small(name):
    with budgeted(name) as pool, budgeted(name, cache=WHOLE * PAGE) as other, pages(pool) as t:
        pages(other, 20).close()
        assert other.stats().pages_cached == 20
        with pytest.raises(vtensor.OutOfPages):
            t.extend(WHOLE + 1)
        assert other.stats().pages_cached == 20


def test_numbers_of_requests_wrap_around(name):
    """The answer to the first is waited for as any, also where the number of the last one is higher."""
    with budgeted(name) as pool, pages(pool) as t:

        def is_waited_for() -> bool:
            with open(path_of(name), "r+b") as file:
                file.seek(LAST_REQUEST)
                file.write(b"\xff" * 4)
            with Other("host", name, cache=WHOLE * PAGE) as other:
                other("grow", 40)
                other("close")
                other.stop()
                goes_on = threading.Timer(0.3, os.kill, [other.pid, signal.SIGCONT])
                goes_on.start()
                try:
                    t.extend(50)
                except vtensor.OutOfPages:
                    return False
                finally:
                    goes_on.join()
            return held(pool)[0] == 50

        assert sometimes(is_waited_for)


def test_the_mapper_is_woken_for_its_own_pool(name):
    """It sleeps on a word that others wake too, and for a second at most: what is prepared comes sooner."""
    with budgeted(name, prefetch=WHOLE * PAGE) as pool, pages(pool) as t:
        begin = time.monotonic()
        for n in range(1, 21):
            time.sleep(0.02)  # it sleeps
            t.prepare(n)
            eventually(lambda n=n: pool.stats().pages_prefetched >= n)
        assert time.monotonic() - begin < 10


def test_pages_are_mapped_ahead_only_beside_what_others_ask_for(kind, name):
    options = {"prefetch": WHOLE * PAGE}
    with (
        budgeted(name, kind=kind, **options) as eager,
        budgeted(name, kind=kind) as pool,
        Other(kind, name) as silent,
    ):
        silent("grow", 40)
        silent.stop()  # so that a request waits for a second
        growing, t = pages(eager, 2), pages(pool)

        def need():
            with pytest.raises(vtensor.OutOfPages):
                t.extend(40)

        def meanwhile() -> bool:
            before = last_request(name)
            asks = beside(need)
            eventually(lambda: last_request(name) != before)
            growing.prepare(10)
            time.sleep(0.2)
            ahead = eager.stats().pages_prefetched
            in_time = not asks.done()
            asks.result(30)
            assert ahead == 0 or not in_time
            growing.shrink(0)  # what was prepared goes
            eventually(lambda: eager.stats().pages_prefetched == 0)
            return in_time

        assert sometimes(meanwhile)
        growing.prepare(10)
        eventually(lambda: eager.stats().pages_prefetched == 10)


def test_a_refusal_is_quick_and_changes_nothing(kind, name):
    with budgeted(name, kind=kind) as pool, Other(kind, name) as other:
        other("grow", 60)
        t = pages(pool, 2)
        for n in (3, 62, 100):
            assert sometimes(lambda n=n: refused_after(t.extend, n) < 0.9)
        assert len(t) == 2 and held(pool) == (2, 60)


def test_a_stopped_process_is_waited_for_with_a_bound(name):
    """For a second, and no longer for each refusal until it has answered again."""
    with budgeted(name) as pool, Other("host", name) as other:
        for _ in range(2):
            other("grow", 60)
            refused_after(pages, pool, 10)  # all answer
            other("close")
            other.stop()
            assert 0.9 < refused_after(pages, pool, 10) < 20
            assert sometimes(lambda: refused_after(pages, pool, 10) < 0.5)
            os.kill(other.pid, signal.SIGCONT)
            with pages(pool, 10) as t:
                assert len(t) == 10
            pool.trim()


def test_every_refused_call_is_undone(pool_factory, kind, name):
    """I8, with the calls of the shared budget among them."""
    with budgeted(name, Tensors.PAGES, kind=kind) as pool:
        assert "fcntl" in refuse_each(pool_factory, kind, "extend_shared", 0, shared_budget=name)
        assert held(pool) == (0, 0)


def test_private_copies_count_and_may_pass_the_budget(name, capsys):
    """As in a budget that is not shared: the kernel does not ask before it copies."""
    with budgeted(name, 8) as pool, budgeted(name, 8) as other:
        t = pages(pool, 6)
        child = t.fork()
        child.fill_(1)
        assert pool.stats().pages_private == 6
        assert held(other) == (0, 12)
        stats = check_sums(pool)  # I5
        assert (stats.pages_used, stats.pages_free, stats.pages_over) == (8, 0, 4)
        assert top.main(once=True) == 0
        assert "32 KiB of 32 KiB (100%), and 16 KiB copied beside it" in capsys.readouterr().out
        with pytest.raises(vtensor.OutOfPages):
            pages(other, 1)
        child.close()
        pool.stats()  # which counts them
        assert held(other) == (0, 6)


def test_a_cache_counts_what_others_can_do_without(name):
    with budgeted(name) as keeper, budgeted(name) as pool:
        leave_spare(keeper, WHOLE)
        cache = make_cache(pool)
        lengths = lengths_with(cache, cache.alloc(), 8)
        assert cache.fits(lengths)
        assert held(pool)[0] == 0
        kept = pages(keeper, WHOLE)
        assert not cache.fits(lengths) and not cache.step(lengths)
        kept.close()
        assert cache.fits(lengths) and cache.step(lengths)


def prefixes(pool, tokens, **kw):
    """A cache that keeps the pages of a request that is over, for others that begin with the same tokens."""
    cache = make_cache(pool, **kw)
    slot = cache.alloc()
    assert grown(cache, slot, tokens)
    cache.publish(slot, list(range(tokens)))
    cache.free(slot)
    return cache


@contextlib.contextmanager
def slow_memory(kind):
    if kind == "simcuda":
        SimulatedDevice().slow("cuMemCreate", 100)
    yield
    if kind == "simcuda":
        SimulatedDevice().let_go()


def test_prefixes_that_no_request_uses_go_to_the_pool_that_needs_memory(kind, name):
    with budgeted(name, 256, kind=kind) as keeper, budgeted(name, 256, kind=kind) as pool:
        cache = prefixes(keeper, 400, max_len=512)
        kept = keeper.stats().pages_indexed
        assert kept > 64
        t = pages(pool)
        with sampled(name), slow_memory(kind):  # so that the keeper is awake while memory is made
            t.extend(256 - held(keeper)[0] + 1)
        assert 0 < keeper.stats().pages_indexed < kept  # some go, and not all
        t.extend(256 - len(t))
        assert keeper.stats().pages_indexed == 0 and held(pool) == (256, 0)
        cache.close()


@pytest.mark.parametrize("closed", [False, True])
def test_prefixes_count_as_what_others_can_do_without_as_long_as_their_cache_is_open(name, closed):
    with budgeted(name, 256) as keeper, budgeted(name, 256) as pool:
        cache = prefixes(keeper, 64)
        kept = [pages(pool, 256 - held(keeper)[0])]
        other = make_cache(pool)
        lengths = lengths_with(other, other.alloc(), 8)
        assert other.fits(lengths) and keeper.stats().pages_indexed > 0
        if closed:
            cache.close()
            kept.append(pages(keeper, 256 - len(kept[0])))
        assert other.fits(lengths) is other.step(lengths) is not closed


def test_a_cache_ends_while_others_ask_for_its_prefixes(name):
    with budgeted(name, 256) as keeper, budgeted(name, 256) as pool, ThreadPoolExecutor(1) as other:
        for _ in range(50):
            cache, t, both = prefixes(keeper, 40), pages(pool), threading.Barrier(2, timeout=30)

            def ask(t=t, both=both):
                both.wait()
                t.extend(256)

            asked = other.submit(ask)
            both.wait()
            cache.close()
            asked.result(30)
            assert held(pool) == (256, 0)
            t.close()
        keeper._core.check_invariants()


# -- ends


def test_a_child_keeps_nothing_for_a_dead_parent(name):
    with budgeted(name) as pool, Other("host", name) as other:
        other("grow", WHOLE)
        child = other("fork")
        try:
            other.kill()
            assert len(pages(pool, WHOLE)) == WHOLE
            os.kill(child, 0)  # which lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_is_no_pool_of_the_budget(name):
    with budgeted(name) as pool:
        t = pages(pool, 5)
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    budgeted(name)
                except vtensor.VTensorError:
                    status = 0
                del t, pool
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(survey(name)) == 1
        t.extend(WHOLE - 5)
        with pytest.raises(vtensor.OutOfPages):
            t.extend(1)


def test_a_closed_pool_leaves_its_place_and_the_last_the_file(kind, name):
    descriptors, threads = open_files(), len(os.listdir("/proc/self/task"))
    one, other = (budgeted(name, kind=kind) for _ in range(2))
    pages(one, 20)
    assert len(survey(name)) == 2
    one.close()
    assert len(survey(name)) == 1 and held(other) == (0, 0) and os.path.exists(path_of(name))
    other.close()
    assert not os.path.exists(path_of(name)) and survey(name) == []
    assert open_files() <= descriptors
    eventually(lambda: len(os.listdir("/proc/self/task")) <= threads)  # what was joined may still be there


def test_a_view_keeps_the_place_of_a_closed_pool(name):
    with budgeted(name) as other:
        pool = budgeted(name)
        view = pages(pool, 20)[:3]
        pool.close()
        assert held(other)[1] >= 3
        assert len(pages(other, WHOLE - 20)) == WHOLE - 20
        del view
        eventually(lambda: held(other)[1] == 0)


KEPT = {
    "a view": "sys.view = t[:3]",
    "a thread": "Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "a view of a closed pool": "sys.view = t[:3]; t.pool.close()",
    "views of two pools": 'sys.views = t[:3], filled(open_pool("host", 64, shared_budget=name), 20)[:3]',
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_process_that_ends_with_pages_in_use_leaves_no_file(name, kept):
    start = f"""
import time
from threading import Thread
name = {name!r}
sys.t = t = filled(open_pool("host", 64, shared_budget=name), 20)
"""
    run_snippet(start + KEPT[kept], finalize=True).check()
    assert not os.path.exists(path_of(name))


def test_the_file_of_the_killed_is_begun_afresh(name):
    with Other("host", name, whole=32) as other:
        other("grow", 32)
    assert os.path.exists(path_of(name)) and survey(name) == []
    with budgeted(name) as pool:  # with another budget
        assert len(pages(pool, WHOLE)) == WHOLE


# -- refusals


REMOVED, CUT = "was removed.* close the pools", "was made shorter.* close them all"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (os.unlink, REMOVED),
        (lambda path: os.truncate(path, 0), CUT),
        (lambda path: os.truncate(path, 4096), CUT),
    ],
    ids=["removed", "cut", "cut to a page"],
)
def test_a_pool_whose_file_was_harmed_takes_no_more(harm, said, name):
    """No pool sees what all hold. What this one has it keeps, and gives back, and its mapper goes on."""
    with budgeted(name, prefetch=8 * PAGE) as pool:
        t = pages(pool, 4)
        t.fill_(3)
        pool.wait_idle()
        pool.trim()
        time.sleep(0.05)  # the mapper sleeps, at a page that goes now
        harm(path_of(name))
        with pytest.raises(vtensor.VTensorError, match=rf"shared budget .* {said}"):
            t.extend(16)
        assert len(t) == 4 and t.eq(3).all()
        with contextlib.ExitStack() as stack:
            if said == REMOVED:
                later = stack.enter_context(budgeted(name))
                assert len(pages(later, WHOLE)) == WHOLE
            else:
                with pytest.raises(vtensor.VTensorError, match="was made shorter"):
                    budgeted(name)
                assert survey(name) == []
            t.prepare(8)  # the mapper can have no more either
            t.shrink(3)
            pool.wait_idle()
            assert pool.stats().pages_mapped == 1
    assert not os.path.exists(path_of(name))


def test_what_a_pool_holds_it_uses_without_the_file(name):
    """Its spare pages go for those that another tensor needs."""
    with budgeted(name, prefetch=0) as pool:
        t = pages(pool, 6)
        t.shrink(5)
        os.unlink(path_of(name))
        assert len(pages(pool, 3)) == 3 and len(t) == 1
        testing.check_invariants(pool)


def test_a_stopped_process_that_has_locked_the_file_is_waited_for_once(name):
    """I12: not for each spare page that goes instead."""
    with budgeted(name, prefetch=0, cache=0) as pool, open(path_of(name), "r+b") as file:
        given, _, t = pages(pool, 16), pages(pool, 1), pages(pool, 1)
        given.close()
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        began = time.monotonic()
        t.extend(16)
        assert 0.5 < time.monotonic() - began < 4
        assert pool.stats().pages_used == 18


def test_a_pool_that_can_give_nothing_back_answers(name):
    with budgeted(name) as pool, budgeted(name) as other:
        leave_spare(pool, WHOLE)
        with testing.fail_after(pool, 0, 2**40) as refused:
            assert sometimes(lambda: refused_after(pages, other, 1) < 0.9)
            assert refused
        assert len(pages(other, WHOLE)) == WHOLE


def test_another_budget_is_refused(name):
    with budgeted(name) as pool:
        with pytest.raises(vtensor.InvalidArgument) as refusal:
            budgeted(name, 32)
        assert str(32 * PAGE) in str(refusal.value) and str(WHOLE * PAGE) in str(refusal.value)
        with pytest.raises(vtensor.InvalidArgument, match=r"\[Pool.budget\].*all pools that share"):
            pool.budget = 32 * PAGE
        assert pool.budget == WHOLE * PAGE and len(survey(name)) == 1


def test_another_version_is_refused(name):
    with budgeted(name):
        with open(path_of(name), "r+b") as file:
            file.seek(8)
            file.write((9).to_bytes(4, "little"))
        with pytest.raises(vtensor.VTensorError, match="layout 9 where this one has 3"):
            budgeted(name)
        assert survey(name) == []


# -- top


def test_top_shows_who_has_what(kind, name, capsys):
    options = {"prefetch": WHOLE * PAGE, "cache": WHOLE * PAGE}
    with budgeted(name, kind=kind, **options) as pool, Other("host", name) as other:
        other("grow", 3)
        kept = pages(pool, 5, capacity=5)
        pages(pool, 7, capacity=7).close()
        pool.wait_idle()
        leave_spare(pool, 10)
        assert top.main(once=True, as_json=True) == 0
        (budget,) = (
            found for found in json.loads(capsys.readouterr().out)["budgets"] if found["name"] == name
        )
        assert (budget["limit"], budget["held"]) == (WHOLE * PAGE, 25 * PAGE)
        mine, theirs = sorted(budget["pools"], key=lambda pool: pool["pid"] == other.pid)
        figures = [mine[column] // PAGE for column in ("held", "active", "cached", "free")]
        assert figures == [22, 5, 7, 10]
        assert mine["pid"] == os.getpid() and theirs["active"] == 3 * PAGE
        assert mine["device"] == theirs["device"] == "cpu"  # a simulated device's memory is the host's
        assert "python" in mine["command"]

        assert top.main(once=True) == 0
        lines = capsys.readouterr().out.splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith(name))
        assert "[#########...............] 100 KiB of 256 KiB (39%)" in lines[at]
        assert lines[at + 1].split() == ["pid", "device", "held", "active", "cached", "free", "command"]
        assert lines[at + 2].split()[0] == str(os.getpid())  # the largest holder comes first
        assert "20 KiB" in lines[at + 2] and str(other.pid) in lines[at + 3]
        kept.close()


def test_top_passes_over_what_is_no_budget(name, capsys):
    strange = Path(path_of(name + "-strange"))
    strange.mkdir()
    try:
        with budgeted(name):
            assert top.main(once=True, as_json=True) == 0
            found = json.loads(capsys.readouterr().out)
            assert name in [budget["name"] for budget in found["budgets"]]
            assert any(str(strange) in why for why in found["skipped"])
            assert top.main(once=True) == 0
            assert f"skipped: [shared budget] opening {strange}" in capsys.readouterr().out
    finally:
        strange.rmdir()


def test_top_shows_its_first_lines_on_a_small_terminal(name, capsys, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top.shutil, "get_terminal_size", lambda: os.terminal_size((20, 3)))
    monkeypatch.setattr(top.time, "sleep", interrupted)
    with budgeted(name):
        with pytest.raises(KeyboardInterrupt):
            top.main()
        lines = capsys.readouterr().out.removeprefix("\x1b[H\x1b[J").split("\n")
        assert [len(line) for line in lines] == [20, 20, 0]


def test_top_does_not_wait_for_a_stopped_process(name):
    with budgeted(name), Other("host", name) as other:
        other("grow", 6)
        other.stop()
        began = time.monotonic()
        assert sorted(holder.held for holder in survey(name)) == [0, 6 * PAGE]
        assert 0.2 < time.monotonic() - began < 20


def test_top_goes_on_until_it_is_interrupted(name):
    with budgeted(name):
        process = subprocess.Popen(
            [sys.executable, "-m", "vtensor", "top", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for _ in range(2):
            assert name in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (130, "stopped\n")


# -- many operations


@contextlib.contextmanager
def sampled(name):
    """What all have held at some moment, by looks at the budget again and again."""
    found, over = set(), threading.Event()

    def look():
        while not over.wait(0.0005):
            found.add(sum(holder.held for holder in survey(name, 0)))

    looking = beside(look)
    try:
        yield found
    finally:
        over.set()
        looking.result(30)


LONG = [pytest.mark.slow, pytest.mark.seconds(600)]
HOURS = pytest.mark.skipif(not SOAK, reason="VTENSOR_HYPOTHESIS=soak")


@pytest.mark.parametrize(
    ("steps", "rounds", "options"),
    [
        (4_000, 2, {}),
        pytest.param(50_000, 4, {"prefetch": 8 * PAGE}, marks=LONG),
        pytest.param(500_000, 4, {"prefetch": 8 * PAGE}, marks=[*LONG, HOURS]),
    ],
)
def test_the_budget_holds_through_random_operations(name, steps, rounds, options):
    """Two processes do `steps` operations each; in each of `rounds` a third one works beside them, and is
    killed in the middle."""
    refused = 0
    with budgeted(name) as pool, sampled(name) as found:
        with Other("host", name) as one, Other("host", name, **options) as two:
            for seed in range(rounds):
                with Other("host", name) as killed:
                    killed.tell("work", seed, 10**9)
                    for n, lasting in enumerate((one, two)):
                        lasting.tell("work", 1000 * (n + 1) + seed, steps // rounds)
                    refused += one.hear()
                    killed.kill()
                    refused += two.hear()
                one("check")
                two("check")
            two("end")
            one("end")
        t = pages(pool, WHOLE)  # each reaches the whole, and nothing of the others is left
        assert held(pool) == (WHOLE, 0)
        t.close()
    assert refused > 0 and len(found) > 10
    assert WHOLE * PAGE // 2 < max(found) <= WHOLE * PAGE

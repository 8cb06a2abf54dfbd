"""Memory of the vLLM plug-in over several workers, without vLLM: tables of their own, served by threads."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vtensor.integrations.vllm import workers
from vtensor.integrations.vllm.memory import NoRoom, TableMemory
from vtensor.integrations.vllm.workers import Channel, Facts, Server, WorkersMemory, require_local

import vtensor
from reader_process import Helper
from support import draws
from test_vllm_plugin import table

KEY = b"k" * 32
PAGE = 4096
COUNT = 12  # blocks of a table, each of two pages


def memory_of(blocks: int) -> TableMemory:
    """With a budget for so many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VTENSOR_VLLM_BUDGET", str(blocks * 2 * PAGE))
        patch.setenv("VTENSOR_VLLM_PAGE_SIZE", str(PAGE))
        config = table(COUNT, (2, COUNT * PAGE, PAGE, 0), size=2 * COUNT * PAGE)
        return TableMemory(config, torch.device("cpu"))


class Fleet:
    """Workers with budgets for so many blocks each, and what their scheduler sees."""

    def __init__(self, *budgets: int) -> None:
        self.servers = [Server(memory_of(blocks), rank, KEY) for rank, blocks in enumerate(budgets)]
        self.tables = [server.memory for server in self.servers]
        self.memory = WorkersMemory([server.facts for server in self.servers], KEY, 30.0)

    def settle(self) -> None:
        """All messages so far were done."""
        self.memory.whole([0])

    def write(self, number: int, value: int) -> None:
        for made in self.tables:
            made.arena.tensor.view(2, COUNT, PAGE)[:, number] = value

    def read(self, number: int) -> list[set[int]]:
        """The values in each worker."""
        rows = [made.arena.tensor.view(2, COUNT, PAGE)[:, number] for made in self.tables]
        return [set(row.unique().tolist()) for row in rows]

    def close(self) -> None:
        self.memory.close()
        for made in self.tables:
            made.arena.close()
            made.pool.close()


@contextmanager
def others_have(made: TableMemory, blocks: int):
    """So many blocks' worth of a worker's memory is another tensor's."""
    with vtensor.empty(0, grow_dim=0, capacity=blocks * 2 * PAGE, dtype=torch.uint8, pool=made.pool) as other:
        other.extend(blocks * 2 * PAGE)
        yield


def test_the_least_of_the_workers_counts():
    with closing(Fleet(8, 3)) as made:
        memory = made.memory
        assert (memory.count, memory.most, memory.most_cached) == (COUNT, 3, 3)
        assert memory.hold([0, 1, 2]) == ([], [0, 1, 2]) and memory.shortage([3, 4]) == 2
        memory.release([1, 2])
        assert memory.whole([0, 1, 3]) == [True, True, False]
        assert memory.hold([1]) == ([1], []) and memory.hold([0, 1]) == ([0, 1], [])
        for worker in made.tables:
            with others_have(worker, worker.most - 2):
                made.settle()
        assert memory.evicted == 2 + 2  # pages, of both


def test_no_worker_is_asked_for_what_is_held_already():
    with closing(Fleet(8, 8)) as made:
        made.memory.hold([1, 2])
        sent = made.memory._sent
        made.memory.hold([2, 1])
        made.memory.begin_step()
        made.memory.end_step()
        assert made.memory.whole([]) == [] and made.memory.shortage([4, 5, 6]) == 0
        assert made.memory._sent == sent


def test_a_worker_that_is_behind_is_waited_for():
    """Its rank gives no result that the scheduler waits for, and has memory to give back."""
    with closing(Fleet(8, 2)) as made:
        memory, (first, second) = made.memory, made.servers
        memory.hold([1, 2])
        memory.begin_step()
        memory.release([1, 2])
        first.ended(1)
        memory.end_step()
        late = threading.Timer(0.2, lambda: second.ended(1))
        late.start()
        try:
            assert memory.hold([3, 4]) == ([], [3, 4])
        finally:
            late.join()


def test_steps_are_marked_by_vllm_s_own_calls():
    """A step ends as its tokens are sampled, or at once where there is nothing to sample; at the latest as
    the next begins."""
    with closing(Fleet(8)) as made:
        server, outputs = made.servers[0], iter([None, "empty", None, None, None])
        execute, sample = server.marking(lambda planned: next(outputs), lambda: "tokens")
        steps = [SimpleNamespace(**{workers.STEP: number}) for number in (1, 2, 3, 4)]
        seen = []
        for call in (
            lambda: execute(steps[0]),
            lambda: sample(),
            lambda: execute(steps[1]),
            lambda: execute(steps[2]),
            lambda: execute(steps[3]),
            lambda: execute(SimpleNamespace()),
        ):
            call()
            seen.append(server._ended)
        assert seen == [0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("says", [b"", b"x" * 32, KEY + b"k", KEY[:-1]])
def test_a_stranger_is_turned_away(says):
    server = Server(memory_of(4), 0, KEY)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(30)
    stranger.connect(f"\0{server.facts.address}")
    if says:
        stranger.send(says)
    else:
        stranger.shutdown(socket.SHUT_WR)
    assert stranger.recv(1) == b""
    stranger.close()
    memory = WorkersMemory([server.facts], KEY, 30)
    assert memory.hold([1]) == ([], [1])
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(f"\0{server.facts.address}")
    memory.close()
    server.memory.arena.close()
    server.memory.pool.close()


def test_a_worker_without_an_answer():
    facts = Facts(3, f"vtensor-test-{os.getpid()}", COUNT, 8, 8, 8 * 2 * PAGE, PAGE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(f"\0{facts.address}")
        silent.listen()
        memory = WorkersMemory([facts], KEY, seconds=0.2)
        with pytest.raises(RuntimeError, match=r"worker of rank 3 did not answer in 0\.2 s"):
            memory.hold([1])
        memory.close()
    with pytest.raises(RuntimeError, match="worker of rank 3 is gone"):
        WorkersMemory([facts], KEY, seconds=0.2)


def _worker(rank: int):
    server = Server(memory_of(8), rank, KEY)
    return lambda: server.facts


def test_workers_that_are_processes_and_one_that_dies():
    with Helper(_worker, 0) as first, Helper(_worker, 1) as second:
        memory = WorkersMemory([first(), second()], KEY, 30)
        assert memory.hold([1, 2]) == ([], [1, 2])
        second.kill()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="worker of rank 1 is gone: the engine cannot go on"):
            memory.hold([3])
        assert time.monotonic() - start < 10
        assert memory.mapped == 2
        memory.close()


def test_what_fails_in_a_worker_is_raised_when_it_is_asked():
    with closing(Fleet(8, 8)) as made:
        made.memory.trim([COUNT])  # sent along
        with pytest.raises(RuntimeError, match=rf"rank 0: InvalidArgument: .* there is no block {COUNT}"):
            made.memory.hold([1])


def test_tables_that_differ():
    with pytest.raises(RuntimeError, match=r"tables of workers differ: of \[3, 4\] blocks"):
        WorkersMemory([Facts(0, "", 3, 1, 1, PAGE, PAGE), Facts(1, "", 4, 1, 1, PAGE, PAGE)], KEY)


@pytest.mark.parametrize(
    "where", ["before the first is sent", "between two", "before the first answer", "between answers"]
)
def test_an_interrupted_call_has_held_nothing(monkeypatch, where):
    """And its answers, which come later, are no other call's."""
    with closing(Fleet(8, 8)) as made:
        memory = made.memory
        memory.hold([0])
        memory.release([0])
        rank = 0 if "first" in where else 1
        name = "answer" if "answer" in where else "send"
        worker, real = memory._workers[rank], getattr(memory._workers[rank], name)

        def interrupted(*args):
            monkeypatch.setattr(worker, name, real)
            raise KeyboardInterrupt

        monkeypatch.setattr(worker, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.hold([0, 1, 2])
        made.settle()
        assert memory.mapped == 0 and [t.mapped for t in made.tables] == [0, 0]
        assert memory.whole([0, 1]) == [False, False]  # no worker has said
        assert memory.hold([1, 5]) == ([], [1, 5])
        assert [t.mapped for t in made.tables] == [2, 2]


def test_a_worker_that_heard_nothing_of_a_release_hears_of_the_next(monkeypatch):
    with closing(Fleet(8, 8)) as made:
        memory = made.memory
        memory.hold([1])
        made.write(1, 3)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(memory._workers[1], "send", Mock(side_effect=KeyboardInterrupt))
            memory.release([1])
        made.settle()
        assert memory.mapped == 0 and [t.mapped for t in made.tables] == [0, 1]
        assert memory.hold([1]) == ([1], []) and made.read(1) == [{3}, {3}]
        memory.release([1])
        made.settle()
        assert [t.mapped for t in made.tables] == [0, 0]


def test_messages_of_many_packets_and_half_of_one():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Channel(ours), Channel(theirs)
    long = list(range(40_000))
    got = []

    def receive():
        got.extend(receiver.receive() for _ in range(2))

    reading = threading.Thread(target=receive)
    reading.start()
    ours.send(workers._HEADER.pack(1, False) + b"half of a message that was interrupted")
    sender.send(2, long)
    sender.send(3, "short")
    reading.join(30)
    assert got == [(2, long), (3, "short")]
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


@pytest.mark.parametrize(
    ("backend", "nodes"),
    [("uni", 1), ("mp", 1), ("mp", 2), ("ray", 1), ("external_launcher", 1), (object, 1)],
)
def test_which_executors_it_knows(backend, nodes):
    parallel = SimpleNamespace(distributed_executor_backend=backend, nnodes=nodes)
    if backend in ("uni", "mp") and nodes == 1:
        return require_local(parallel)
    with pytest.raises(RuntimeError, match=rf"on {nodes} nodes: the plug-in knows 'uni' and 'mp'"):
        require_local(parallel)


NUMBERS = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=5, unique=True)


class Workers(RuleBasedStateMachine):
    """Two workers with unequal budgets, of which others take memory and which are behind with their steps,
    against what a scheduler may rely on."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(7, 5)
        self.memory = self.fleet.memory
        self.held: set[int] = set()
        self.said: dict[int, int] = {}  # what was written to a block that is whole as far as is known
        self.begun, self.seen, self.ended = 0, 0, [0, 0]
        self.busy: dict[int, int] = {}  # blocks that steps may use, by the last of them
        self.refused: dict[int, int] = {}  # which one worker may have given, by the last step under way then
        self.written = 0

    @rule(numbers=NUMBERS)
    def hold(self, numbers):
        try:
            kept, lost = self.memory.hold(numbers)
        except NoRoom:
            self.refused.update(dict.fromkeys(set(numbers) - self.held, self.begun))
            return
        assert sorted(kept + lost) == sorted(set(numbers)) and not self.held.intersection(lost)
        self.held.update(numbers)
        for number in numbers:
            if number in lost or number not in self.said:
                self.write(number)

    @rule(number=st.integers(0, COUNT - 1))
    def write(self, number):
        if number in self.held:
            self.written = self.written % 250 + 1
            self.fleet.write(number, self.written)
            self.said[number] = self.written

    @rule(numbers=NUMBERS)
    def release(self, numbers):
        for number in self.held.intersection(numbers):
            self.busy[number] = self.begun
        self.memory.release(numbers)
        self.held.difference_update(numbers)

    @rule(numbers=NUMBERS)
    def trim(self, numbers):
        self.memory.trim(numbers)

    @precondition(lambda self: self.begun - self.seen < 3)
    @rule()
    def begin_step(self):
        self.begun = self.memory.begin_step()

    @rule(worker=st.integers(0, 1))
    def end_in_worker(self, worker):
        if self.ended[worker] < self.begun:
            self.ended[worker] += 1
            self.fleet.servers[worker].ended(self.ended[worker])

    @precondition(lambda self: self.seen < min(self.ended))
    @rule()
    def end_step(self):
        self.seen += 1
        self.memory.end_step()

    @rule(worker=st.integers(0, 1), blocks=st.integers(1, 7))
    def others(self, worker, blocks):
        """So many at most."""
        self.fleet.settle()
        for most in range(blocks, 0, -1):
            with suppress(vtensor.OutOfPages), others_have(self.fleet.tables[worker], most):
                return

    @rule(worker=st.integers(0, 1), numbers=NUMBERS, more=st.booleans())
    def lose(self, worker, numbers, more):
        """What was released goes in one worker; it may be asked for first with more than the other has."""
        self.release(numbers)
        self.others(worker, 7)
        if more:
            self.hold(list(dict.fromkeys([*numbers, *range(COUNT)]))[:6])
        self.whole(numbers)
        self.hold(numbers)

    @rule(numbers=NUMBERS)
    def whole(self, numbers):
        for number, whole in zip(numbers, self.memory.whole(numbers), strict=True):
            if whole and number in self.said:
                assert self.fleet.read(number) == [{self.said[number]}] * 2

    @invariant()
    def what_is_held_has_memory_and_what_was_written(self):
        self.fleet.settle()
        for number in self.held:
            assert self.fleet.read(number) == [{self.said[number]}] * 2
        for made, ended in zip(self.fleet.tables, self.ended, strict=True):
            assert all(made.whole(sorted(self.held)))
            given = self.after(self.refused, ended) - self.after(self.busy, ended) - self.held
            least = len(self.held | self.after(self.busy, ended))
            assert least <= made.mapped <= least + len(given)

    @invariant()
    def what_the_scheduler_counts(self):
        waiting = self.after(self.busy, self.seen) | self.after(self.refused, self.seen)
        assert self.memory.mapped == len(self.held | waiting)

    @staticmethod
    def after(blocks: dict[int, int], step: int) -> set[int]:
        return {number for number, last in blocks.items() if last > step}

    def teardown(self):
        self.fleet.close()


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=draws(60), stateful_step_count=30, deadline=None)
TestWorkers.pytestmark = [pytest.mark.thorough]

"""The memory of an engine whose workers are processes of their own, each with its part of every block.

The scheduler plans a step with blocks that have memory. So it asks before it plans, and waits for the answer:
blocks that a worker refuses are not in the step. Releases need no answer, and go along with the next message.

A worker's memory goes after the worker's own steps. The scheduler sees the result of one rank while another
may still compute. So each message has the number of steps begun when it was sent, and each worker marks the
end of its own steps. A released block goes when that worker has ended all of them.
"""

from __future__ import annotations

import functools
import hmac
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .memory import NoRoom, TableMemory

STEP = "vtensor_step"  # attribute of what the scheduler hands to the workers: the step's number
ANSWER_SECONDS = 300.0  # as long as vLLM waits for a step
STEP_SECONDS = 60.0
KEY_SECONDS = 2.0
_HEADER = struct.Struct("=Q?")  # the number of a message, and whether it ends in this packet
_PACKET = 1 << 16


class Facts(NamedTuple):
    """The description that a worker sends of itself."""

    rank: int
    address: str
    blocks: int
    most: int
    most_cached: int
    share: int
    page_size: int


class Figures(NamedTuple):
    """The figures of a worker's memory, in every answer."""

    evicted: int = 0
    room: int = 0


def require_local(parallel: Any) -> None:
    """Raises RuntimeError unless the engine's workers are its own processes on the scheduler's machine."""
    backend, nodes = parallel.distributed_executor_backend, parallel.nnodes
    if backend in ("uni", "mp") and nodes == 1:
        return
    raise RuntimeError(
        f"[vtensor.vllm] the executor is {backend!r} on {nodes} nodes: the plug-in knows 'uni' and 'mp' on "
        "one; unset VTENSOR_VLLM"
    )


class Channel:
    """Messages over a socket of packets. The kernel takes a packet whole or not at all, and each packet names
    its message, so the rest of an interrupted call is never taken for a part of another message."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._packet = memoryview(bytearray(_PACKET))
        self._parts: list[bytes] = []
        self._number = 0

    def send(self, number: int, message: object) -> None:
        data = pickle.dumps(message)
        most = _PACKET - _HEADER.size
        for begin in range(0, len(data), most):
            header = _HEADER.pack(number, begin + most >= len(data))
            self._socket.send(header + data[begin : begin + most])

    def receive(self) -> tuple[int, Any]:
        """Returns the next message. Raises EOFError if the other end is gone."""
        while True:
            size = self._socket.recv_into(self._packet)
            if size == 0:
                raise EOFError
            number, last = _HEADER.unpack_from(self._packet)
            if number != self._number:
                self._number, self._parts = number, []
            self._parts.append(bytes(self._packet[_HEADER.size : size]))
            if last:
                parts, self._parts = self._parts, []
                return number, pickle.loads(b"".join(parts))

    def close(self) -> None:
        self._socket.close()


# --- the worker's side ---


class Server:
    """Answers the one scheduler that knows ``key``, on a thread of its own."""

    def __init__(self, memory: TableMemory, rank: int, key: bytes) -> None:
        self.memory = memory
        self._key = key
        self._begun = self._ended = 0  # steps
        self._changed = threading.Condition()  # over these, and the calls of memory
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"vtensor-vllm-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self.facts = Facts(
            rank, name, memory.count, memory.most, memory.most_cached, memory.share, memory.page_size
        )
        threading.Thread(target=self._serve, name="vtensor-vllm", daemon=True).start()

    def ended(self, step: int) -> None:
        """Notes that this worker has ended the step and all before it, in the current stream."""
        with self._changed:
            self._begin(step)
            while self._ended < step:
                self.memory.end_step()
                self._ended += 1
            self._changed.notify_all()

    def marking(self, execute: Callable[..., Any], sample: Callable[..., Any]) -> tuple[Any, Any]:
        """Wraps vLLM's ``execute_model`` and ``sample_tokens`` of this worker: they then mark step ends."""
        step = 0

        @functools.wraps(execute)
        def execute_model(planned: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal step
            step = getattr(planned, STEP, step)  # none while vLLM warms up
            self.ended(step - 1)
            output = execute(planned, *args, **kwargs)
            if output is not None:  # then nothing is sampled
                self.ended(step)
            return output

        @functools.wraps(sample)
        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            try:
                return sample(*args, **kwargs)
            finally:
                self.ended(step)

        return execute_model, sample_tokens

    def _begin(self, step: int) -> None:
        while self._begun < step:
            self.memory.begin_step()
            self._begun += 1

    def _serve(self) -> None:
        channel = Channel(self._scheduler())
        failed = ""
        try:
            while True:
                number, (answered, operation, argument, begun, ended) = channel.receive()
                kind, value = "", None
                try:
                    if not failed:
                        value = self._do(operation, argument, begun, ended)
                except NoRoom:
                    kind = "no room"
                except Exception as error:  # the scheduler raises it when it asks next
                    failed = f"{type(error).__name__}: {error}"
                if answered:
                    channel.send(number, (failed or kind, value, self._figures()))
        except (EOFError, OSError):
            channel.close()  # the engine has ended

    def _scheduler(self) -> socket.socket:
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(KEY_SECONDS)
            try:
                known = hmac.compare_digest(connection.recv(len(self._key) + 1), self._key)
            except OSError:
                known = False
            if known:
                self._listener.close()
                connection.settimeout(None)
                return connection
            connection.close()

    def _do(self, operation: str, argument: Any, begun: int, ended: int) -> Any:
        with self._changed:
            # The scheduler has seen the results of these steps: they end here within moments.
            if not self._changed.wait_for(lambda: self._ended >= ended, STEP_SECONDS):
                raise RuntimeError(f"step {ended} did not end within {STEP_SECONDS:g} s")
            self._begin(begun)
            return getattr(self.memory, operation)(*argument)

    def _figures(self) -> Figures:
        with self._changed:
            return Figures(self.memory.evicted, self.memory.room)


# --- the scheduler's side ---


class _Worker:
    """The connection to one worker."""

    def __init__(self, facts: Facts, key: bytes, seconds: float) -> None:
        self.rank, self._seconds = facts.rank, seconds
        self.figures = Figures()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(seconds)
        self._channel = Channel(connection)
        self._guarded(lambda: connection.connect(f"\0{facts.address}"))
        self._guarded(lambda: connection.send(key))

    def send(self, number: int, message: object) -> None:
        self._guarded(lambda: self._channel.send(number, message))

    def answer(self, number: int) -> tuple[str, Any]:
        """The answer to that message. Answers to messages of interrupted calls are skipped."""
        while True:
            answered, (failed, value, figures) = self._guarded(self._channel.receive)
            self.figures = figures
            if answered == number:
                return failed, value

    def close(self) -> None:
        self._channel.close()

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except TimeoutError:
            problem = f"did not answer in {self._seconds:g} s"
        except (EOFError, OSError):
            problem = "is gone"
        raise RuntimeError(
            f"[vtensor.vllm] the worker of rank {self.rank} {problem}: the engine cannot go on; see what the "
            "worker wrote"
        )


class WorkersMemory:
    """As :class:`TableMemory`, for all workers at once: a block has memory in each of them, or in none.

    Args:
        workers: the description of each worker.
        key: the key that the workers have.
        seconds: the bound of their answers.
    """

    def __init__(self, workers: list[Facts], key: bytes, seconds: float = ANSWER_SECONDS) -> None:
        counts = {facts.blocks for facts in workers}
        if len(counts) != 1:
            raise RuntimeError(f"[vtensor.vllm] tables of workers differ: of {sorted(counts)} blocks")
        self.count = counts.pop()
        self.most = min(facts.most for facts in workers)
        self.most_cached = min(facts.most_cached for facts in workers)
        self.share = min(facts.share for facts in workers)
        self.page_size = max(facts.page_size for facts in workers)
        self._workers = [_Worker(facts, key, seconds) for facts in workers]
        self._sent = 0  # messages
        self._begun = self._ended = 0  # steps
        self._held: set[int] = set()
        self._leaving: dict[int, int] = {}  # released blocks, by the step whose end they wait for, in order
        self._lost: set[int] = set()  # lost in a worker, and not returned by hold() yet

    def hold(self, numbers: Iterable[int]) -> tuple[list[int], list[int]]:
        """As :meth:`TableMemory.hold`, in all workers or in none. Asks them if a block is not held."""
        numbers = list(dict.fromkeys(numbers))
        fresh = [number for number in numbers if number not in self._held]
        if not fresh:
            return numbers, []
        try:
            self._hold_in_all(fresh)
        except BaseException:
            self._leave(fresh)  # in workers that gave them memory, they wait for the steps under way
            self._send("release", fresh)
            raise
        kept = [number for number in numbers if number not in self._lost]
        lost = [number for number in numbers if number in self._lost]
        self._held.update(fresh)
        for number in fresh:
            self._leaving.pop(number, None)
        self._lost.difference_update(fresh)
        return kept, lost

    def prepare(self, numbers: Iterable[int]) -> None:
        self._send("prepare", list(numbers))

    def release(self, numbers: Iterable[int]) -> None:
        gone = [number for number in numbers if number in self._held]
        if gone:
            self._held.difference_update(gone)
            self._leave(gone)
            self._send("release", gone)

    def begin_step(self) -> int:
        """Returns the step's number, for :meth:`Server.ended`. Workers do not know of it before."""
        self._begun += 1
        return self._begun

    def end_step(self) -> None:
        self._ended += 1
        while self._leaving and next(iter(self._leaving.values())) <= self._ended:
            del self._leaving[next(iter(self._leaving))]

    def whole(self, numbers: Iterable[int]) -> list[bool]:
        numbers = list(numbers)
        if not numbers:
            return []
        by_worker = self._ask("whole", numbers)
        return [
            all(whole) and number not in self._lost
            for number, whole in zip(numbers, zip(*by_worker, strict=True), strict=True)
        ]

    def shortage(self, numbers: Iterable[int]) -> int:
        """As :meth:`TableMemory.shortage`, of the worker with the least memory. Asks if the free pages of the
        last answers are too few for all blocks."""
        numbers = list(numbers)
        if len(numbers) <= min(worker.figures.room for worker in self._workers):
            return 0
        return max(map(int, self._ask("shortage", numbers)))

    def trim(self, numbers: Iterable[int]) -> None:
        self._send("trim", list(numbers))

    def trim_all(self) -> None:
        self._send("trim_all")

    @property
    def mapped(self) -> int:
        return len(self._held) + len(self._leaving)

    @property
    def evicted(self) -> int:
        """As of the last answers. A block that went since then is found lost when it is held."""
        return sum(worker.figures.evicted for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _hold_in_all(self, fresh: list[int]) -> None:
        """Holds blocks in all workers, and notes those that a worker has lost. The worker knows such a block
        as whole from then on, even if the call fails."""
        lost = set(fresh)  # all of them, until the workers answer
        try:
            answers = self._collect(self._send("hold", fresh, answered=True))
            lost = {number for _, value in answers if value is not None for number in value[1]}
            if any(problem == "no room" for problem, _ in answers):
                raise NoRoom
        finally:
            self._lost.update(lost)

    def _leave(self, numbers: list[int]) -> None:
        for number in numbers:
            self._leaving.pop(number, None)
            if self._begun > self._ended:
                self._leaving[number] = self._begun

    def _ask(self, operation: str, *argument: Any) -> list[Any]:
        return [value for _, value in self._collect(self._send(operation, *argument, answered=True))]

    def _send(self, operation: str, *argument: Any, answered: bool = False) -> int:
        self._sent += 1
        for worker in self._workers:
            worker.send(self._sent, (answered, operation, argument, self._begun, self._ended))
        return self._sent

    def _collect(self, number: int) -> list[tuple[str, Any]]:
        answers = [worker.answer(number) for worker in self._workers]
        for worker, (problem, _) in zip(self._workers, answers, strict=True):
            if problem not in ("", "no room"):
                raise RuntimeError(f"[vtensor.vllm] the worker of rank {worker.rank}: {problem}")
        return answers

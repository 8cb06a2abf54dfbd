"""Processes that run the commands of a test; one that reads what the test shows it.

Each is forked from a server that has imported torch and nothing else, so to vtensor it is one of
its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import zlib
from collections.abc import Callable
from multiprocessing.connection import Client
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, Self

import torch

import vtensor
from support import eventually, simcuda_library
from vtensor import VTensor, _core, sharing, testing  # noqa: F401 - for expressions

HANDLES = {"descriptors": 1, "fabric": 9}  # types of handles that the simulated device takes
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])
PATIENCE = 60


def read_over(library: str) -> None:
    """Readers of a simulated device use this library from now on."""
    os.environ["SIMCUDA_GRANULARITY"] = "4096"
    sharing.cuda_library = library


def limit_descriptors(more: int) -> None:
    """This process may open so many descriptors more than it has."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + more, hard))


def rows(pool: vtensor.Pool, n: int = 0, capacity: int = 4096, **options: Any) -> VTensor:
    """Two rows of `n` positions of 256 bytes."""
    t = vtensor.empty(2, 0, 64, grow_dim=1, capacity=capacity, pool=pool, **options)
    return t.append(torch.randn(2, n, 64))


def opened(t: VTensor) -> tuple[int, int]:
    """Descriptors of the memory of `t` and of its range, which the caller closes."""
    files = _core.TensorCore.open_for_readers(t._core, t)
    memory, of_range = map(os.dup, files.descriptors)
    return memory, of_range


def read(*descriptors: int, words: int = 2) -> _core.ReaderCore:
    """A reader in this process, down in the core, of what :func:`opened` has given."""
    files = _core.ReaderFiles()
    for descriptor in descriptors:
        files.take(descriptor)
    return _core.ReaderCore(files, words, str(simcuda_library() or ""))


def receive(t: VTensor) -> _core.ReaderCore:
    return read(*opened(t))


def checksum(t: torch.Tensor) -> int:
    return zlib.crc32(t.contiguous().numpy().tobytes())


def named_memory() -> set[str]:
    """Files in /dev/shm, but for those that other tests make meanwhile: shared budgets, semaphores."""
    others = (f"vtensor-{os.geteuid()}-", "sem.", "torch_", "psm_", "vllm")
    return {
        name for name in os.listdir("/dev/shm") if not name.startswith(others) or str(os.getpid()) in name
    }


def write_and_die(address: str, library: str, handles: int) -> None:
    """A process that hands over a tensor, and is killed once it was synced."""
    os.environ |= {"SIMCUDA_GRANULARITY": "4096", "SIMCUDA_HANDLE_TYPES": str(handles)}
    if library:
        pool = testing.simulated_cuda_pool(library, page_size=4096, shareable=True)
    else:
        pool = vtensor.Pool("cpu", shareable=True)
    t = vtensor.empty(100, 8, grow_dim=0, capacity=1000, pool=pool).fill_(7)
    descriptors = opened(t)
    with Client(address, "AF_UNIX", authkey=b"x") as pipe:
        pipe.send(t._core.phase)
        for descriptor in descriptors:
            send_handle(pipe, descriptor, None)
        pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


class Helper:
    """A process that calls ``make(*arguments)``, and then the function that it returns with each command."""

    patience: float | None = 60

    def __init__(self, make: Callable[..., Callable], *arguments: object, context: Any = CONTEXT) -> None:
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=_answer, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, *command: object) -> None:
        self._ours.send(command)

    def hear(self) -> Any:
        """What came of the oldest command that was not heard of; its error is raised."""
        if not self._ours.poll(self.patience):
            raise TimeoutError
        answer = self._ours.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __call__(self, *command: object) -> Any:
        self.tell(*command)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)

    def stop(self) -> None:
        """Until SIGCONT. Returns once no thread of it runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        eventually(lambda: all(" T " in (task / "stat").read_text() for task in tasks.iterdir()))

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.send(None)
        self.process.join(PATIENCE)
        self._ours.close()


def _answer(pipe: Any, make: Callable[..., Callable], arguments: tuple[object, ...]) -> None:
    # The kernel continues what is stopped in the tests' process group when the shell that began them ends.
    os.setpgid(0, 0)
    do = make(*arguments)
    with contextlib.suppress(EOFError):
        while True:
            try:
                if (command := pipe.recv()) is None:
                    return
                pipe.send(do(*command))
            except EOFError:
                raise
            except Exception as error:  # an answer; also of what was received
                pipe.send(error)


class ReaderProcess(Helper):
    """Each method runs in the process, and returns what came of it, or an error's class and text."""

    def __init__(self, context: Any = CONTEXT) -> None:
        super().__init__(_reading, str(simcuda_library() or ""), context=context)

    def receive(self, what: object, name: str = "r") -> Any:
        """Sends ``what``. The process calls it ``name``."""
        return self("receive", name, what)

    def sync(self, name: str = "r") -> Any:
        return self.evaluate(f"{name}.sync()")

    def length(self, name: str = "r") -> Any:
        return self.evaluate(f"{name}.length")

    def read(self, name: str = "r") -> Any:
        """A copy of what it shows: of a tensor, or of a view that :meth:`keep` kept."""
        return self.evaluate(f"{name}.clone()")

    def checksum(self, name: str = "r") -> Any:
        """Syncs, and returns whether anything is new, the length and a checksum of all bytes."""
        return self.evaluate(f"({name}.sync(), {name}.length, checksum({name}))")

    def layer(self, layer: int, slot: int, length: int, name: str = "r") -> Any:
        return self.evaluate(f"[t[{slot}, :{length}].clone() for t in {name}[{layer}]]")

    def lengths(self, name: str = "r") -> Any:
        return self.evaluate(f"{name}.lengths")

    def keep(self, view: str, name: str = "r") -> Any:
        """Keeps an alias of a tensor as ``view``."""
        return self("keep", name, view)

    def evaluate(self, expression: str, **values: object) -> Any:
        return self("evaluate", expression, values)

    def close(self, name: str = "r") -> Any:
        return self("close", name)

    def hear(self) -> Any:
        try:
            return super().hear()
        except TimeoutError:
            raise
        except Exception as error:
            return type(error).__name__, str(error)


def _reading(library: str) -> Callable:
    torch.set_num_threads(1)
    read_over(library)
    held: dict[str, Any] = {}

    def do(command: str, name: str, *arguments: Any) -> Any:
        if command == "receive":
            (held[name],) = arguments
            return type(held[name]).__name__
        if command == "evaluate":
            return eval(name, globals() | held, arguments[0])
        if command == "keep":
            held[arguments[0]] = held[name].alias()
            return None
        return held.pop(name).close()

    return do

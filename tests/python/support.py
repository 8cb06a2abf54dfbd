"""What several test files need: tensors of a few pages, exact bytes, kernel mappings, subprocesses."""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import vtensor
from vtensor.testing.model import bytes_of

HERE = Path(__file__).resolve().parent
# Pools with the options that users get: look-ahead and reuse.
DEFAULT_POOLS = os.environ.get("VTENSOR_POOLS") == "default"
# More cases of each kind, as `make check` has it.
THOROUGH = os.environ.get("VTENSOR_TESTS") == "thorough"
# What takes minutes.
SOAK = os.environ.get("VTENSOR_HYPOTHESIS") == "soak"
ROOT = HERE.parent.parent

# "[operation] what was asked, what there is: what to do"
SHAPE_OF_A_MESSAGE = re.compile(r"^\[[\w. ]+\] \S.*: \S.*", re.DOTALL)

# Positions to a page in the tensors that `quarter` makes.
PER_PAGE = 4


def simcuda_library() -> Path | None:
    """The simulated libcuda, or None where it is not built."""
    named = os.environ.get("VTENSOR_SIMCUDA")
    path = Path(named) if named else ROOT / "build" / "tests" / "libsimcuda.so"
    return path if path.exists() else None


def quarter(pool, length=0, *, rows=(), capacity=64, dtype=torch.uint8, make=vtensor.empty, **kw):
    """A tensor of `length` positions of a quarter page each, in each of `rows` (a shape) rows."""
    item = pool.page_size // PER_PAGE // dtype.itemsize
    sizes = (*rows, length, item)
    return make(*sizes, grow_dim=len(rows), capacity=capacity, dtype=dtype, pool=pool, **kw)


def filled(pool, length, value=1, **kw):
    """As `quarter`, every element `value`."""
    t = quarter(pool, length, **kw)
    t.fill_(value)
    return t


def leave_spare(pool: vtensor.Pool, pages: int) -> None:
    """Leaves so many free pages with memory: those of a tensor that is gone, none of them cached."""
    nbytes = pages * pool.page_size
    with vtensor.empty(0, grow_dim=0, capacity=nbytes, dtype=torch.uint8, pool=pool) as t:
        t.extend(nbytes).shrink(nbytes, front=True)
        pool.wait_idle()


class Rival:
    """A tensor that wants memory of a pool, for random programs: one at a time."""

    def __init__(self, pool: vtensor.Pool, most: int) -> None:
        self.pool, self.most = pool, most  # pages
        self.tensor: vtensor.VTensor | None = None

    def take(self, pages: int, byte: int) -> bool:
        """Another tensor instead of the last. False where memory is short."""
        self.close()
        capacity = self.most * self.pool.page_size
        self.tensor = vtensor.empty(0, grow_dim=0, capacity=capacity, dtype=torch.uint8, pool=self.pool)
        try:
            self.tensor.extend(pages * self.pool.page_size).fill_(byte)
        except vtensor.OutOfPages:
            return False
        return True

    def close(self) -> None:
        if self.tensor is not None:
            self.tensor.close()


def ramp(t) -> torch.Tensor:
    """A plain tensor of t's shape and dtype whose bytes differ from place to place, NaN-free."""
    n = t.numel() * t.element_size()
    data = (torch.arange(n, dtype=torch.int64) * 7 % 113 + 1).to(torch.uint8)
    return data.view(t.dtype).reshape(t.shape) if n else torch.empty(t.shape, dtype=t.dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))


def calls(pool) -> dict[str, int]:
    """The driver calls made by callers so far, by name."""
    return dict(pool.stats().driver_calls["caller"])


def calls_since(pool, before: dict[str, int]) -> dict[str, int]:
    now = calls(pool)
    return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}


def all_calls(pool) -> int:
    """How many driver calls were made so far."""
    return sum(sum(made.values()) for made in pool.stats().driver_calls.values())


def mapper_calls(pool) -> dict[str, int]:
    """The driver calls made by the pool's mapper so far, by name."""
    return dict(pool.stats().driver_calls["mapper"])


# Imports the module argv[1] beside each version of the package argv[2], whose import takes seconds, in forks.
_IMPORT_BESIDE = """
import importlib, os, sys
name, package, *versions = sys.argv[1:]
beside = importlib.import_module(package)
for version in versions:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    beside.__version__ = version
    try:
        importlib.import_module(name)
        print("imported", flush=True)
    except ImportError as error:
        print(error, flush=True)
    os._exit(0)
"""


def import_beside(name: str, package: str, versions: list[str], cwd: Path) -> list[str]:
    """What importing `name` says where each of these versions of `package` is installed."""
    return run_program(_IMPORT_BESIDE, name, package, *versions, cwd=cwd).check().out.splitlines()


def within(seconds: float, done):
    """What `done()` returns once that is true, or at the end of the time."""
    until = time.monotonic() + seconds
    while not (result := done()) and time.monotonic() < until:
        time.sleep(0.0005)
    return result


def eventually(done, seconds: float = 10.0):
    """What `done()` returns once that is true. Raises AssertionError if it is not within the time."""
    result = within(seconds, done)
    assert result, f"not within {seconds} s"
    return result


def sometimes(attempt, tries: int = 5) -> bool:
    """Whether one of a few attempts succeeds: for what holds unless the machine keeps a thread waiting."""
    return any(attempt() for _ in range(tries))


def beside(body, *arguments) -> Future:
    """What becomes of the call, which a thread of its own makes."""
    made: Future = Future()

    def run() -> None:
        try:
            made.set_result(body(*arguments))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return made


def run_together(*bodies, seconds=40.0):
    """Runs each in a thread of its own, started at one moment; raises the first error, or on a deadlock."""
    barrier = threading.Barrier(len(bodies))
    errors = []

    def run(body):
        try:
            barrier.wait(seconds)
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"{stuck} did not end within {seconds} s"
    if errors:
        raise errors[0]


def check_sums(pool):
    """I4 and I5 from what stats() says; returns the stats."""
    stats = pool.stats()
    assert (
        stats.pages_mapped
        == stats.pages_active + stats.pages_prefetched + stats.pages_cached + stats.pages_pinned
    ), stats
    assert stats.pages_used + stats.pages_free == stats.budget // stats.page_size, stats
    assert stats.pages_free >= 0 and 0 <= stats.pages_over <= stats.pages_private, stats
    return stats


def page_ids(t) -> list[int]:
    return [record.page_id for record in t.pages()]


def kernel_mappings() -> list[tuple[int, int, str]]:
    """(start, end, permissions) of every mapping of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, permissions = line.split()[:2]
        start, end = (int(x, 16) for x in extent.split("-"))
        found.append((start, end, permissions))
    return found


def mappings_within(start: int, end: int) -> list[tuple[int, int, str]]:
    return [m for m in kernel_mappings() if m[0] < end and start < m[1]]


def draws(n: int) -> int:
    """Examples that a random test draws: ``n`` in `make check`, a fifth of that in `make test`."""
    return n if THOROUGH else -(-n // 5)


def every(n: int) -> int:
    """Which of many cases a test tries: every ``n``-th in `make check`, a third of these in `make test`."""
    return n if THOROUGH else 3 * n


def resident() -> int:
    """Bytes of anonymous and shared memory that this process has, exactly.

    /proc/self/statm may be off by hundreds of KiB a core. Pages of libraries do not count: the first call of
    a function of torch may map 2 MiB of them.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return (kilobytes["Anonymous"] + kilobytes["Pss_Shmem"]) << 10


def memfd_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def memfds() -> int:
    """Open file descriptors that are memfds."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += "memfd:" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            pass
    return count


@dataclass(frozen=True)
class Finished:
    """How a snippet ended. `code` is None where it ran past its time, negative for a signal."""

    code: int | None
    out: str
    err: str

    def check(self) -> Finished:
        assert self.code == 0, f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        return self


def run_process(*command: object, timeout: float = 100.0, **options) -> Finished:
    """Runs a command as a process of its own, from its beginning to its end."""
    ended = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=timeout, **options
    )
    return Finished(ended.returncode, ended.stdout, ended.stderr)


_server: subprocess.Popen | None = None

_PRELUDE = f"""
import ctypes, faulthandler, gc, os, sys
faulthandler.enable()
sys.path.insert(0, {str(HERE)!r})
import torch, vtensor
from vtensor import testing
from support import *
"""


def run_snippet(code: str, *, timeout: float = 40.0, finalize: bool = False) -> Finished:
    """Runs `code` in a process of its own, with torch, vtensor and this module's names imported.

    The process is a child of a server that has imported torch only (snippet_server.py). With `finalize` its
    interpreter exits as others do, which takes a second once torch is imported; otherwise it leaves at once.
    """
    return _run(_PRELUDE + textwrap.dedent(code), timeout=timeout, finalize=finalize)


def run_program(
    code: str, *arguments: object, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> Finished:
    """Runs `code` as `python -c code arguments` does, but that torch and numpy are imported by then, which
    takes two seconds, and that it leaves without the end of the interpreter, which takes one."""
    argv = ["-c", *map(str, arguments)]
    return _run(textwrap.dedent(code), argv=argv, cwd=cwd, environment=environment, timeout=100)


# Each code as a module of its own, whose names go as those of `__main__` do.
_AS_MODULES = """
import types
names = dict(globals())
for name, code in {codes!r}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(names, __name__=name)
    exec(compile(code, name, "exec"), sys.modules[name].__dict__)
"""


def check_endings(codes: dict[str, str], *, setup: str = "", timeout: float = 40.0) -> None:
    """Runs the codes in one process, which is to end well and without a word. Where it does not, each runs
    again in one of its own, to name those at fault."""

    def end(codes: dict[str, str]) -> Finished | None:
        ended = run_snippet(setup + _AS_MODULES.format(codes=codes), finalize=True, timeout=timeout)
        return None if ended.code == 0 and not ended.err else ended

    if together := end(codes):
        alone = {name: ended for name, code in codes.items() if (ended := end({name: code}))}
        raise AssertionError(f"at fault alone: {list(alone) or 'none'}; together: {together}")


# `python -m vtensor`, up to what vtensor looks at to tell that it was started so.
_COMMAND = """
import runpy, sys
sys.orig_argv = ["python", "-m", "vtensor", *sys.argv[1:]]
runpy.run_module("vtensor", run_name="__main__", alter_sys=True)
"""


def run_command(*arguments: object, before: str = "", **options) -> Finished:
    """Runs `python -m vtensor arguments` as :func:`run_program` does, after the code `before`."""
    return run_program(before + _COMMAND, *arguments, **options)


def _run(
    code: str,
    *,
    argv: list[str] | None = None,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    timeout: float,
    finalize: bool = False,
) -> Finished:
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, str(HERE / "snippet_server.py")],
            # Output is held back as it is for users: else a closed pipe shows at another place.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(_server.stdin.close)
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = {
            "code": code,
            "argv": argv or ["-c"],
            "cwd": str(cwd or Path.cwd()),
            "environment": environment,
            "stdin": os.devnull,
            "stdout": out.name,
            "stderr": err.name,
            "timeout": timeout,
            "finalize": finalize,
        }
        _server.stdin.write(json.dumps(request) + "\n")
        _server.stdin.flush()
        answer = json.loads(_server.stdout.readline())
        return Finished(answer["code"], out.read(), err.read())


class SimcudaLeaks(ctypes.Structure):
    """What the simulated driver was not given back."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("handles", "mappings", "ranges", "contexts", "streams", "events", "objects")
    ]

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name, _ in self._fields_)

    def __repr__(self) -> str:
        return simcuda_control().simcuda_describe(ctypes.byref(self)).decode()


_u64, _int, _double = ctypes.c_uint64, ctypes.c_int, ctypes.c_double
SIGNATURES = {
    "simcuda_hold": ([_u64], _int),
    "simcuda_release": ([_u64], _int),
    "simcuda_late_events": ([_u64, _double], None),
    "simcuda_unseen_events": ([_u64], None),
    "simcuda_launch": ([_u64, _u64, _u64, _int], _int),
    "simcuda_occupy": ([_u64, _double], _int),
    "simcuda_take_memory": ([_int, ctypes.c_int64], _int),
    "simcuda_free_memory": ([_int], _u64),
    "simcuda_make_context": ([_int], _u64),
    "simcuda_make_stream": ([_int], _u64),
    "simcuda_destroy_stream": ([_u64], _int),
    "simcuda_pending": ([_u64], _u64),
    "simcuda_run": ([], None),
    "simcuda_illegal_accesses": ([], _u64),
    "simcuda_calls": ([ctypes.c_char_p], _u64),
    "simcuda_fail": ([ctypes.c_char_p, _u64, _u64, _int], _int),
    "simcuda_set_latency": ([ctypes.c_char_p, _double], _int),
    "simcuda_hold_calls": ([ctypes.c_char_p, _int], _int),
    "simcuda_reset": ([], None),
    "simcuda_configure": ([ctypes.c_char_p, _u64], _int),
    "cuStreamBeginCapture_v2": ([_u64, _int], _int),
    "cuStreamEndCapture": ([_u64, ctypes.POINTER(_u64)], _int),
    "cuGraphInstantiateWithFlags": ([ctypes.POINTER(_u64), _u64, _u64], _int),
    "cuGraphLaunch": ([_u64, _u64], _int),
    "cuGraphDestroy": ([_u64], _int),
    "cuGraphExecDestroy": ([_u64], _int),
    "cuDeviceGet": ([ctypes.POINTER(_int), _int], _int),
    "cuDevicePrimaryCtxRetain": ([ctypes.POINTER(_u64), _int], _int),
    "cuDevicePrimaryCtxRelease_v2": ([_int], _int),
    "cuCtxGetCurrent": ([ctypes.POINTER(_u64)], _int),
    "cuCtxSetCurrent": ([_u64], _int),
    "simcuda_disarm": ([], _u64),
    "simcuda_leaks": ([], SimcudaLeaks),
    "simcuda_describe": ([ctypes.POINTER(SimcudaLeaks)], ctypes.c_char_p),
    "simcuda_mapping_at": ([_u64, ctypes.POINTER(_int)], _u64),
}


@functools.cache
def simcuda_control() -> ctypes.CDLL:
    """The control interface of the simulated libcuda (tests/simcuda/simcuda.h), in this process."""
    library = ctypes.CDLL(str(simcuda_library()))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def simcuda_leaks() -> SimcudaLeaks:
    return simcuda_control().simcuda_leaks()


def received(what: Any) -> Any:
    """What arrives of an object of a shareable pool, here in the same process."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        ours.send(what)
        return theirs.recv()


def simcuda_disarm() -> int:
    """Forgets the refusals that were asked of the simulated libcuda; how many were still to come."""
    if simcuda_library() is None:
        return 0
    return simcuda_control().simcuda_disarm()


def open_pool(kind: str, pages: int = 64, page_size: int = 4096, **kw):
    """A pool of `pages` pages over the host ("host") or the simulated libcuda ("simcuda").

    The simulated device takes 4 KiB pages here, which real ones do not: all else is the same, and small
    pages make small tests. Without look-ahead, so that counts are exact at once, unless that is asked for or
    the tests run with the pools that users get.
    """
    from vtensor import testing

    if not DEFAULT_POOLS:
        kw.setdefault("prefetch", 0)

    if kind == "host":
        return vtensor.Pool("cpu", page_size=page_size, budget=pages * page_size, **kw)
    assert simcuda_control().simcuda_configure(b"granularity", 4096) == 0
    library = str(simcuda_library())
    return testing.simulated_cuda_pool(library, page_size=page_size, budget=pages * page_size, **kw)


class OnDevice(torch.Tensor):
    """A tensor of the host that tells shims otherwise: kernels on it run behind their callers' backs."""

    is_cpu = False


def on_a_device(t: torch.Tensor) -> torch.Tensor:
    return t.as_subclass(OnDevice)

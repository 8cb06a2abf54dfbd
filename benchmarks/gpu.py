"""The questions about a real GPU, answered with figures: ``make gpu``, or ``python -m benchmarks.gpu``.

Each question is a function, called in a process of its own with a bound on its time, and so is each case that
may break the device. They print what they find as JSON lines. The program that starts them shows these and
adds them to one file as they come, so a process that dies or hangs loses nothing.

Heads are those of Llama-3-8B: 32 of queries, 8 of keys and values, of 128, in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import faulthandler
import importlib
import importlib.util
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import machine
from .harness import interleave, quantile
from .report import number, today

try:
    from cuda.bindings import driver as cuda
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: the driver is asked through it: pip install cuda-bindings") from missing

MIB, PAGE = 1 << 20, 2 << 20
QUERY_HEADS, HEADS, DIM, BF16 = 32, 8, 128, torch.bfloat16
PER_PAGE = PAGE // (HEADS * DIM * 2)  # positions of a row in a page: 1,024
OUT_OF_TIME = "the time was over"  # why something was skipped
NO_ACCESS, READ_ONLY, READ_WRITE = 0, 1, 3  # CUmemAccess_flags
HANDLE_TYPES = {"none": 0, "a POSIX descriptor": 1, "fabric": 8}  # CUmemAllocationHandleType

Work = Callable[[], object]
Answer = tuple[Any, ...]  # of cuda-bindings: a code, 0 for CUDA_SUCCESS, and what the call made
Finding = dict[str, Any]
Line = dict[str, Any]
Times = dict[str, list[float]]  # microseconds by what was called

# --- Processes, and what they find

COMMAND = [sys.executable, "-m", "benchmarks.gpu"]
PATIENCE = 1.0  # times the seconds that a process may take; where tests run, others may need the cores
quick, deadline = False, math.inf


class Question(NamedTuple):
    ask: Callable[[], None]
    seconds: int  # the most it may take; most take less
    text: str
    while_building: bool  # it needs no vtensor and measures nothing, so a compiler may run beside it


QUESTIONS: dict[int, Question] = {}


def question(number: int, seconds: int, text: str, while_building: bool = False) -> Callable[[Any], Any]:
    def add(ask: Callable[[], None]) -> Callable[[], None]:
        QUESTIONS[number] = Question(ask, seconds, text, while_building)
        return ask

    return add


def find(kind: str, **finding: Any) -> None:
    """Kinds: figure, fact, skipped, call, error."""
    sys.stdout.write(json.dumps({"kind": kind, **finding}) + "\n")
    sys.stdout.flush()


def fact(name: str, value: Any) -> None:
    """A count, a yes or no, an error message."""
    find("fact", name=name, value=value)


def spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    quantiles = {"median": 0.5, "p10": 0.1, "p90": 0.9, "p99": 0.99}
    return {name: quantile(ordered, q) for name, q in quantiles.items()} | {"n": len(ordered)}


def figure(name: str, values: Iterable[float], unit: str = "us", method: str = "host clock") -> None:
    find("figure", name=name, unit=unit, method=method, **spread(values))


def ratio(
    name: str, ours: Sequence[float], base: Sequence[float], control: Sequence[float], method: str
) -> None:
    """Finds ours / base by round, beside the same of a second copy of the base."""
    of = [spread(a / b for a, b in zip(side, base, strict=True)) for side in (ours, control)]
    find("figure", name=name, unit="x", method=method, **of[0], control=of[1])


def pick(full: Any, small: Any) -> Any:
    return small if quick else full


def rounds(full: int, small: int, seconds: float) -> Iterator[int]:
    """Counts rounds, at least two, until they are done or have taken `seconds` (or all that is left)."""
    end = min(time.time() + seconds, deadline - 2)
    for done in range(pick(full, small)):
        if done >= 2 and time.time() > end:
            return
        yield done


def run_apart(
    name: str, arguments: Sequence[str], seconds: float, found: Callable[[Finding], object]
) -> int | None:
    """Calls the function of this name in a process; its exit code, or None if it was killed after `seconds`.
    A question has a process group, which is killed as a whole: its cases are processes too."""
    is_question = name in {question.ask.__name__ for question in QUESTIONS.values()}
    options = ["--seconds", str(seconds), *(["--quick"] if quick else [])]
    process = subprocess.Popen(
        [*COMMAND, *options, "--apart", name, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=is_question,
    )
    late = threading.Event()

    def kill() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL) if is_question else process.kill()

    timer = threading.Timer(seconds + 3, kill)
    timer.start()
    try:
        for line in process.stdout or ():
            if line.startswith('{"kind"'):
                found(json.loads(line))
        code = process.wait(10)
        return None if late.is_set() else code
    finally:
        timer.cancel()
        if process.poll() is None:
            kill()


class End(NamedTuple):
    """How a case ended, and what it had found until then."""

    code: int | None  # negative for a signal, None where it ran past its time
    findings: list[Finding]

    @property
    def facts(self) -> dict[str, Any]:
        return {found["name"]: found["value"] for found in self.findings if found["kind"] == "fact"}

    @property
    def text(self) -> str:
        error = "".join(f" ({found['text']})" for found in self.findings if found["kind"] == "error")
        how = "hung, and was killed" if self.code is None else f"exited with {self.code}"
        return (f"was ended by {signal.Signals(-self.code).name}" if (self.code or 0) < 0 else how) + error


def apart(work: Callable[..., object], *arguments: str, seconds: float) -> End:
    """Does the work of a case in a process that may die or hang."""
    found: list[Finding] = []
    seconds = max(1.0, min(PATIENCE * seconds, deadline - time.time() - 1))
    return End(run_apart(work.__name__, arguments, seconds, found.append), found)


def tell(case: str, end: End) -> None:
    for name, value in [*end.facts.items(), ("the process", end.text)]:
        fact(f"{case}: {name}", value)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def error_of(work: Work) -> str:
    """The first line of what it raises, or "none"."""
    try:
        work()
    except Exception as error:
        return first_line(error)
    return "none"


# --- The first GPU: through torch, in functions for which tests put stand-ins, and through cuda-bindings

DEVICE = torch.device("cuda", 0)
new_stream: Callable[[], Any] = torch.cuda.Stream
synchronize: Callable[[], None] = torch.cuda.synchronize


def describe() -> dict[str, Any]:
    """The machine; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    found, driver = torch.cuda.get_device_properties(0), Path("/proc/driver/nvidia/version")
    return {
        **machine.describe("cuda"),
        "gpu_memory_gib": round(found.total_memory / 2**30),
        "gpu_processors": found.multi_processor_count,
        "gpu_l2_mib": getattr(found, "L2_cache_size", 0) >> 20,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
    }


def pool(**options: Any) -> Any:
    import vtensor

    return vtensor.Pool("cuda", **options)


def launch(stream: Any, work: Work) -> None:
    with torch.cuda.stream(stream):
        work()


def mark(stream: Any) -> Any:
    """An event behind what was launched: ``query()``, ``synchronize()``, ``a.elapsed_time(b)`` in ms."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def spin(stream: Any, seconds: float) -> None:
    """Keeps the stream busy for about so long, with a kernel that touches no memory."""
    launch(stream, lambda: torch.cuda._sleep(int(seconds * 1.7e9)))  # cycles, at the clock of an H100


def new_flag() -> torch.Tensor:
    """A 32-bit zero in pinned host memory, at the same address for host and GPU."""
    return torch.zeros(1, dtype=torch.int32).pin_memory()


def hold(stream: Any, flag: torch.Tensor) -> None:
    """Has the stream wait until the flag is 1 or more."""
    at_least = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    must(cuda.cuStreamWaitValue32(stream.cuda_stream, flag.data_ptr(), 1, at_least))


def captured(work: Work, warmup: int = 3) -> Work:
    """Captures `work` in a CUDA graph; what replays it."""
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(warmup):
        launch(stream, work)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def torch_memory(forget: bool = False) -> tuple[int, int]:
    """The most bytes that torch's allocator has given out, and those free on the device. With `forget` it
    gives its cache back, and the peak counts anew."""
    if forget:
        synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[0]


class Refused(Exception):
    """A driver call that had to succeed answered with an error."""


def name_of(answer: Answer) -> str:
    """ "CUDA_ERROR_INVALID_VALUE"."""
    return str(cuda.CUresult(answer[0]).name)


def must(answer: Answer) -> int:
    """The first of what the call made, or 0. Raises Refused unless it succeeded."""
    code, *made = answer
    if code != 0:
        raise Refused(f"the driver answered {name_of(answer)} ({int(code)})")
    return int(made[0]) if made else 0


@cache
def retain_context() -> None:
    """Makes the device's primary context current in this thread, unless this process has done so."""
    must(cuda.cuInit(0))
    must(cuda.cuCtxSetCurrent(must(cuda.cuDevicePrimaryCtxRetain(0))))


@cache
def properties(handle_type: int, rdma: bool) -> Any:
    retain_context()
    wanted = cuda.CUmemAllocationProp()
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = cuda.CUmemAllocationHandleType(handle_type)
    wanted.location.type, wanted.location.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    wanted.allocFlags.gpuDirectRDMACapable = int(rdma)
    return wanted


def granularity() -> int:
    minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return must(cuda.cuMemGetAllocationGranularity(properties(0, False), minimum))


@cache
def has_rdma() -> bool:
    """Whether memory is made with the GPUDirect RDMA flag, as vtensor's own driver does."""
    retain_context()
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    return bool(must(cuda.cuDeviceGetAttribute(attribute, 0)))


def create(size: int, handle_type: int = 0, rdma: bool | None = None) -> Answer:
    return cuda.cuMemCreate(size, properties(handle_type, has_rdma() if rdma is None else rdma), 0)


def reserve(size: int, alignment: int = 0) -> Answer:
    retain_context()
    return cuda.cuMemAddressReserve(size, alignment, 0, 0)


def map_at(address: int, size: int, handle: int) -> Answer:
    return cuda.cuMemMap(address, size, 0, handle, 0)


@cache
def access(flags: int) -> list[Any]:
    wanted = cuda.CUmemAccessDesc()
    wanted.location.type, wanted.location.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    wanted.flags = cuda.CUmemAccess_flags(flags)
    return [wanted]


def set_access(address: int, size: int, flags: int = READ_WRITE) -> Answer:
    return cuda.cuMemSetAccess(address, size, access(flags), 1)


class Pages:
    """A range of `slots` pages and `count` handles, of which nothing is mapped at first. At the end of the
    `with` whatever is still mapped is unmapped; wait for kernels before."""

    def __init__(self, slots: int, count: int, size: int = PAGE) -> None:
        self.size, self.slots = size, slots
        self.mapped: set[int] = set()
        self.address = must(reserve(slots * size, size & -size))
        self.handles = [must(create(size)) for _ in range(count)]

    def at(self, slot: int) -> int:
        return self.address + slot * self.size

    def map(self, slot: int, handle: int) -> Answer:
        """Maps handle number `handle` there, not accessible yet."""
        answer = map_at(self.at(slot), self.size, self.handles[handle])
        if answer[0] == 0:
            self.mapped.add(slot)
        return answer

    def put(self, slot: int, handle: int, flags: int = READ_WRITE) -> Answer:
        must(self.map(slot, handle))
        must(answer := set_access(self.at(slot), self.size, flags))
        return answer

    def put_all(self) -> Pages:
        """Handle i at slot i, all accessible by one call."""
        for slot in range(len(self.handles)):
            must(self.map(slot, slot))
        must(set_access(self.address, len(self.handles) * self.size))
        return self

    def unmap(self, slot: int, count: int = 1) -> Answer:
        answer = cuda.cuMemUnmap(self.at(slot), count * self.size)
        if answer[0] == 0:
            self.mapped.difference_update(range(slot, slot + count))
        return answer

    def tensor(self, dtype: torch.dtype, slot: int = 0, count: int = 1) -> torch.Tensor:
        """Pages from `slot` on, mapped or not: ``[count, elements of a page]``."""
        return tensor_at(self.at(slot), (count, self.size // dtype.itemsize), dtype)

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *exc: object) -> None:
        for slot in sorted(self.mapped):
            self.unmap(slot)
        for handle in self.handles:
            cuda.cuMemRelease(handle)
        cuda.cuMemAddressFree(self.address, self.slots * self.size)


class _Tensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0.x, which torch takes in every release."""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8)),
        *(("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p)),
        *(("offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    ]


_kept: list[object] = []  # torch reads them for as long as a storage lives; a run makes a few hundred
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor over addresses, mapped or not, which the caller keeps."""
    sizes = (ctypes.c_int64 * 2)(math.prod(shape) * dtype.itemsize, 1)
    kind, at = 2 if DEVICE.type == "cuda" else 1, ctypes.addressof(sizes)  # kDLCUDA, kDLCPU
    tensor = _Tensor(address, kind, DEVICE.index or 0, 1, 1, 8, 1, at, at + 8)
    _kept.append((tensor, sizes))
    return torch.from_dlpack(_capsule(ctypes.addressof(tensor), b"dltensor", None)).view(dtype).view(*shape)


def timed(taken: Times, name: str, call: Callable[..., Answer], *arguments: Any) -> int:
    """What the call made, or 0; a refusal raises."""
    start = time.perf_counter_ns()
    answer = call(*arguments)
    taken[name].append((time.perf_counter_ns() - start) / 1e3)
    return must(answer)


# --- 0. The driver's answers, as lines that the simulated libcuda is held to. A line is one call: {"case":
# ..., "call": "cuMemUnmap", "range": 0, "offset": 0, "size": 2097152, "answer":
# "CUDA_ERROR_INVALID_VALUE"}. Ranges and handles are numbered in the order in which the case made them, so
# that any driver can play the lines again.

# The words of a case: the call, and its arguments with what they are where the case does not give them.
CALLS: dict[str, tuple[str, dict[str, float]]] = {
    "reserve": ("cuMemAddressReserve", {"size": 4, "alignment": 0}),
    "create": ("cuMemCreate", {"size": 1}),
    "map": ("cuMemMap", {"offset": 0, "size": 1, "handle": 0, "handle_offset": 0, "range": 0}),
    "access": ("cuMemSetAccess", {"offset": 0, "size": 1, "access": 3, "range": 0}),
    "unmap": ("cuMemUnmap", {"offset": 0, "size": 1, "range": 0}),
    "release": ("cuMemRelease", {"handle": 0}),
    "free": ("cuMemAddressFree", {"size": 4, "offset": 0, "range": 0}),
    "fill": ("cuMemsetD8", {"offset": 0, "size": 1, "range": 0}),
    "copy": ("cuMemcpyDtoD", {"offset": 0, "from_offset": 0, "size": 1, "range": 0}),
    "wait": ("cuCtxSynchronize", {}),
}
ARGUMENTS = dict(CALLS.values())
IN_GRANULES = {"size", "alignment", "offset", "handle_offset", "from_offset"}
MAPPED = "reserve; create; map; access"
TWO_GRANULES = "reserve; create 2; map 0 2"
TWO_PAGES = "reserve; create; create; map; map 1 1 1"
CASES = {
    "a page's life": f"{MAPPED}; fill; wait; unmap; release; free",
    "release while mapped": f"{MAPPED}; release; fill; wait; unmap; free",
    "one handle at two addresses": "reserve; create; map 0; map 1; access 0; access 1 1 1; unmap 0",
    "set-access once for several pages": f"{TWO_PAGES}; access 0 2; fill 0 2; wait; unmap 0 2",
    "set-access from read-write to read-only and back": f"{MAPPED}; access 0 1 1; access 0 1 0; access",
    "set-access where nothing is mapped": "reserve; access",
    "set-access over mapped and unmapped": "reserve; create; map; access 0 2; access",
    "set-access on part of a page": f"{TWO_GRANULES}; access 0 1; access 1 1; access 0 2",
    "set-access from the middle of one page to the middle of the next":
        "reserve; create 2; create 2; map 0 2; map 2 2 1; access 1 2; access 0 4",
    "set-access of size 0": f"{MAPPED}; access 0 0",
    "unmap of several pages": f"{TWO_PAGES}; unmap 0 2",
    "unmap before set-access": "reserve; create; map; unmap",
    "unmap twice": f"{MAPPED}; unmap; unmap",
    "unmap where nothing was mapped": "reserve; unmap",
    "unmap of part of a page": f"{TWO_GRANULES}; unmap 0 1; unmap 1 1; unmap 0 2",
    "unmap of a page and part of the next":
        "reserve; create; create 2; map; map 1 2 1; unmap 0 2; unmap 0 3",
    "unmap over a hole": "reserve; create; create; map; map 2 1 1; unmap 0 3; unmap 0; unmap 2",
    "unmap of a page and addresses behind it": f"{MAPPED}; unmap 0 2; unmap",
    "unmap of size 0": f"{MAPPED}; unmap 0 0",
    "map over what is mapped": f"{MAPPED}; create; map 0 1 1",
    "map half over what is mapped": f"{TWO_GRANULES}; create 2; map 1 2 1",
    "map again after unmap": f"{MAPPED}; unmap; map; access; fill; wait",
    "map of part of a handle": "reserve; create 2; map 0 1; map 0 2",
    "map at an offset into the handle": "reserve; create 2; map 0 1 0 1; map 0 2",
    "map of more than the handle": "reserve; create; map 0 2",
    "map of size 0": "reserve; create; map 0 0",
    "map at no multiple of the granularity": "reserve; create; map 0.5",
    "map past the end of the range": "reserve 1; create 2; map 0 2",
    "free with the wrong size": "reserve; free 2; free 8; free 4",
    "free from the middle": "reserve; free 2 2; free 4",
    "free twice": "reserve; free; free",
    "create of size 0": "create 0",
    "create of half a granule": "create 0.5",
    "reserve of size 0": "reserve 0",
    "reserve of half a granule": "reserve 0.5",
    "reserve with an alignment": "reserve 4 16; create; map; access",
    "reserve with an alignment of three granules": "reserve 3 3",
    # Those that may end their process, or leave its context in error. Releasing what was released is not
    # among them: the reference calls it undefined.
    "free while mapped": f"{MAPPED}; free; unmap; free",
    "map of a handle that was released and is mapped elsewhere": f"{MAPPED}; release; map 1",
    "copy from behind what is mapped": f"{MAPPED}; copy 0 1 1; wait",
    "fill over the end of what is mapped": f"{MAPPED}; fill 0.5 1; wait",
    "fill of what is read-only": "reserve; create; map; access 0 1 1; fill; wait",
}  # fmt: skip
SAFE, RISKY = list(CASES)[:-5], list(CASES)[-5:]


def lines_of(case: str, granule: int) -> Iterator[Line]:
    """The calls of a case, with sizes in bytes and without answers."""
    for step in CASES[case].split("; "):
        word, *values = step.split()
        call, arguments = CALLS[word]
        given = arguments | dict(zip(arguments, map(float, values), strict=False))
        yield {
            "case": case,
            "call": call,
            **{name: int(value * (granule if name in IN_GRANULES else 1)) for name, value in given.items()},
        }


def play(lines: Iterable[Line]) -> Iterator[str]:
    """Makes the calls of one case. The names of the answers, call by call; at its end it gives back what is
    left."""
    ranges: list[int] = []  # addresses; 0 where it was refused
    handles: list[int] = []
    left: list[tuple[Any, ...]] = []  # calls that give back what is left, last made first
    try:
        for line in lines:
            call, size = line["call"], line.get("size", 0)
            base = ranges[line["range"]] if "range" in line else 0
            at, handle = base + line.get("offset", 0), handles[line["handle"]] if "handle" in line else 0
            arguments = {
                "cuMemAddressReserve": (size, line.get("alignment"), 0, 0),
                "cuMemCreate": (size, properties(0, has_rdma()), 0),
                "cuMemMap": (at, size, line.get("handle_offset"), handle, 0),
                "cuMemSetAccess": (at, size, access(line.get("access", 0)), 1),
                "cuMemRelease": (handle,),
                "cuMemsetD8": (at, 1, size),
                "cuMemcpyDtoD": (at, base + line.get("from_offset", 0), size),
                "cuCtxSynchronize": (),
            }.get(call, (at, size))
            answer = getattr(cuda, call)(*arguments)
            made = int(answer[1]) if answer[0] == 0 and len(answer) > 1 else 0
            if call == "cuMemAddressReserve":
                ranges.append(made)
            elif call == "cuMemCreate":
                handles.append(made)
            undo = {
                "cuMemAddressReserve": ("cuMemAddressFree", made, size),
                "cuMemCreate": ("cuMemRelease", made),
                "cuMemMap": ("cuMemUnmap", at, size),
            }.get(call)
            if answer[0] == 0 and undo:
                left.insert(0, undo)
            elif answer[0] == 0 and (call, *arguments) in left:
                left.remove((call, *arguments))
            yield name_of(answer)
    finally:
        for name, *arguments_ in left:  # what was unmapped in parts by the case is refused
            getattr(cuda, name)(*arguments_)


def differences(lines: Iterable[Line]) -> list[str]:
    """Plays recorded lines; the first call of each case that is answered otherwise than it was there."""
    cases: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        cases[line["case"]].append(line)
    found = []
    for case, calls in cases.items():
        for line, answer in zip(calls, play(calls), strict=False):
            if answer != line["answer"]:
                shown = ", ".join(f"{name}={line[name]}" for name in ARGUMENTS[line["call"]])
                found.append(f"{case}: {line['call']}({shown}) answered {line['answer']}, {answer} here")
                break
    return found


def answered(cases: Iterable[str]) -> Iterator[Line]:
    """The lines of the cases with their answers, up to a case that leaves the device in error."""
    for case in cases:
        lines = list(lines_of(case, granularity()))
        for line, answer in zip(lines, play(lines), strict=True):
            yield {**line, "answer": answer}
        if cuda.cuCtxSynchronize()[0] != 0:
            return


def play_case(case: str) -> None:
    for line in answered([case]):
        find("call", **line)


@question(0, 40, "What does the driver answer to VMM calls, wrong ones too?", while_building=True)
def record() -> None:
    fact("granularity", granularity())
    for line in answered(SAFE):
        find("call", **line)
    with ThreadPoolExecutor(len(RISKY)) as together:  # most of their time goes to starting
        ends = list(together.map(lambda case: apart(play_case, case, seconds=30), RISKY))
    for case, end in zip(RISKY, ends, strict=True):
        for found in end.findings:
            find(**found)
        fact(f"{case}: the process", end.text)


# --- 8. Faults on purpose, each in a process of its own: what error they give, and whether the parent lives


def write_through_read_only() -> None:
    pages = Pages(2, 1)
    pages.put(0, 0)
    fact("set-access to read-only", name_of(pages.put(1, 0, READ_ONLY)))
    pages.tensor(torch.uint8).fill_(7)
    synchronize()
    alias = pages.tensor(torch.uint8, 1)
    fact("the alias reads", int(alias.max()))
    fault(lambda: alias.fill_(1))


def read_past_end() -> None:
    seen = Pages(4, 1).put_all().tensor(torch.uint8, 0, 4)
    seen[0].fill_(1)
    synchronize()
    fault(lambda: seen.sum())


def unmap_beneath_kernel() -> None:
    pages, stream = Pages(64, 64).put_all(), new_stream()
    seen = pages.tensor(torch.uint8, 0, 64).fill_(1)
    synchronize()

    def unmap_then_wait() -> None:
        spin(stream, 0.05)
        launch(stream, lambda: [seen.add_(1) for _ in range(20)])
        fact("cuMemUnmap", name_of(pages.unmap(0, 64)))

    fault(unmap_then_wait)


def fault(work: Work) -> None:
    """Does what faults, and says what can still be done afterwards."""
    fact("begun", True)
    fact("error", error_of(lambda: (work(), synchronize())))
    fact("a kernel afterwards", error_of(lambda: int(torch.ones(4, device=DEVICE).sum())))
    fact("a VMM call afterwards", name_of(reserve(PAGE)))


@question(8, 45, "A write through a read-only alias, a read past the end?", while_building=True)
def faults() -> None:
    own = torch.arange(1 << 20, device=DEVICE)
    expected = int(own.sum())

    def see_that_all_is_as_before() -> None:
        with Pages(1, 1).put_all() as pages:
            right = int(pages.tensor(torch.uint8).fill_(3).max()) == 3 and int(own.sum()) == expected
            synchronize()
        if not right:
            raise ValueError("WRONG contents")

    for work in (write_through_read_only, read_past_end, unmap_beneath_kernel):
        case = work.__name__.replace("_", " ")
        tell(case, apart(work, seconds=15))
        fact(f"{case}: the parent's error", error_of(see_that_all_is_as_before))


# --- 11. Triton asks cuPointerGetAttribute(DEVICE_POINTER) of every tensor that it launches a kernel over,
# and raises where the answer is no; so do torch.compile and FlexAttention. The first page of a KVCache's
# layer is not mapped while slot 0 is free, or once its window passed it.


def pointer_answers() -> dict[str, Answer]:
    asked = partial(cuda.cuPointerGetAttribute, cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    with Pages(6, 4) as pages:
        pages.put(0, 0)
        pages.put(1, 1, READ_ONLY)
        pages.put(2, 2)
        must(set_access(pages.at(2), PAGE, NO_ACCESS))
        must(pages.map(3, 3))
        must(pages.map(4, 0))
        must(pages.unmap(4))
        answers = {
            "mapped": asked(pages.at(0)),
            "mapped, inside a page": asked(pages.at(0) + PAGE // 2),
            "mapped read-only": asked(pages.at(1)),
            "mapped, and its access taken away": asked(pages.at(2)),
            "mapped, and never given access": asked(pages.at(3)),
            "reserved, and was mapped before": asked(pages.at(4)),
            "reserved": asked(pages.at(5)),
        }
    return {**answers, "no longer reserved": asked(pages.address)}


@question(11, 25, "Which addresses may a Triton kernel be given?", while_building=True)
def pointers() -> None:
    for address, answer in pointer_answers().items():
        fact(f"DEVICE_POINTER of an address that is {address}", name_of(answer))
    if importlib.util.find_spec("triton") is None or DEVICE.type != "cuda":
        find("skipped", name="Triton kernels", reason="they need Triton and a GPU")
        return
    for slot, state in (("1", "is"), ("0", "is not")):
        end = apart(triton_reads, slot, seconds=20)
        tell(f"a Triton kernel over a tensor whose first page {state} mapped", end)


def triton_reads(slot: str) -> None:
    """A Triton kernel that is given the page at `slot` of two, and reads in the second one only."""
    global tl
    import triton
    import triton.language as tl

    @triton.jit
    def read_one(source, offset, out):  # type: ignore[no-untyped-def]
        tl.store(out, tl.load(source + offset))

    with Pages(2, 1) as pages:
        pages.put(1, 0)
        second, given = pages.tensor(torch.int32, 1)[0].fill_(42), pages.tensor(torch.int32, int(slot))[0]
        out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        synchronize()
        offset = (second.data_ptr() - given.data_ptr()) // 4
        fact("Triton's error", error_of(lambda: read_one[(1,)](given, offset, out)))
        fact("it reads, of 42", int(out))


# --- 1, 3 and 10: the same calls with nothing running, beside kernels on other memory, and while a stream
# waits


def calls_on(pages: Pages) -> dict[str, tuple[Callable[[], Answer], Work]]:
    """Each call, and what makes it possible again. Slots 0 to 3 are mapped, 4 to 7 are not."""
    size = pages.size
    handles, ranges = [must(create(size))], [must(reserve(size, size))]  # one of each is there to give back

    def making(made: list[int], call: Callable[..., Answer], *arguments: int) -> Answer:
        answer = call(*arguments)
        made.append(must(answer))
        return answer

    def release() -> Answer:
        return cuda.cuMemRelease(handles.pop())

    def free() -> Answer:
        return cuda.cuMemAddressFree(ranges.pop(), size)

    def map_again() -> None:
        pages.put(1, 1)
        pages.tensor(torch.uint8, 1).fill_(1)
        synchronize()

    new_handle, new_range = (
        partial(making, handles, create, size),
        partial(making, ranges, reserve, size, size),
    )
    third = pages.at(2), size
    return {
        "cuDeviceGetCount": (cuda.cuDeviceGetCount, lambda: None),
        "cuMemGetInfo": (cuda.cuMemGetInfo, lambda: None),
        "reserve": (new_range, free),
        "address-free": (free, new_range),
        "create": (new_handle, release),
        "release, and the memory goes": (release, new_handle),
        "map": (lambda: pages.map(5, 0), lambda: pages.unmap(5)),
        "map and set-access": (lambda: pages.put(5, 0), lambda: pages.unmap(5)),
        "set-access": (lambda: set_access(*third), lambda: None),
        "set-access to read-only": (lambda: set_access(*third, READ_ONLY), lambda: set_access(*third)),
        "unmap, handle kept": (lambda: pages.unmap(1), map_again),
    }


def page_s_life() -> list[str]:
    """Makes, maps and gives back a page, as far as the driver lets it; what each call answered."""
    answers: list[str] = []

    def went_well(call: str, answer: Answer) -> int:
        """What the call made, or 1; 0 where it was refused."""
        answers.append(f"{call} {name_of(answer)}")
        return 0 if answer[0] != 0 else must(answer) or 1

    address, handle = went_well("reserve", reserve(PAGE)), went_well("create", create(PAGE))
    if address and handle and went_well("map", map_at(address, PAGE, handle)):
        went_well("set-access", set_access(address, PAGE))
        went_well("unmap", cuda.cuMemUnmap(address, PAGE))
    if handle:
        went_well("release", cuda.cuMemRelease(handle))
    if address:
        went_well("address-free", cuda.cuMemAddressFree(address, PAGE))
    return answers


@question(1, 40, "What does every VMM call cost; what do merging and kept handles save?")
def calls() -> None:
    fact("handles are made with the GPUDirect RDMA flag", has_rdma())
    with ThreadPoolExecutor(1) as other:
        fact("VMM calls in a thread without a context", ", ".join(other.submit(page_s_life).result(30)))
    count = pick(64, 2)
    for fresh in (False, True):
        with Pages(count, count).put_all() as pages:
            seen = pages.tensor(torch.uint8, 0, count)
            if fresh:
                stale = int((seen != 0).any(dim=1).sum())
                fact("fresh handles after written ones were released", f"{stale} of {count} not all zero")
            seen.fill_(255)
            synchronize()
    for size in [mib * MIB for mib in pick((2, 4, 8, 16, 32), (2, 4))]:
        taken: Times = defaultdict(list)
        with Pages(8, 4, size).put_all() as pages:
            for done in rounds(200, 3, seconds=2):
                for name, (call, restore) in calls_on(pages).items():
                    timed(taken, name, call)
                    restore()
                if done == 0:
                    taken.clear()  # a warm-up
        for name, values in taken.items():
            figure(f"{name}, {size // MIB} MiB", values)
        merged_calls(size)


def merged_calls(size: int) -> None:
    """One set-access, and one unmap, over n pages, against n of them."""
    for count in pick((8, 64), (2,)):
        spent: Times = defaultdict(list)
        with Pages(count, count, size) as pages:
            for _ in rounds(60, 2, seconds=1):
                for step in (count, 1):
                    for slot in range(count):
                        must(pages.map(slot, slot))
                    for name, call in (("set-access", set_access), ("unmap", cuda.cuMemUnmap)):
                        start = time.perf_counter_ns()
                        for slot in range(0, count, step):
                            must(call(pages.at(slot), step * size))
                        spent[f"{name} {step}"].append((time.perf_counter_ns() - start) / 1e3)
                    pages.mapped.clear()
        for call_name in ("set-access", "unmap"):
            one, each = spent[f"{call_name} {count}"], spent[f"{call_name} 1"]
            what = f"one {call_name} over {count} pages of {size // MIB} MiB"
            figure(what, one)
            gains = [a / b for a, b in zip(each, one, strict=True)]
            figure(f"gain of {what}", gains, "x", "host clock; n calls / one, of the same round")


class Kernel(NamedTuple):
    name: str
    launch: Work
    is_right: Callable[[], bool]  # of what the last launch wrote; waits for it


def noise(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(shape, dtype=BF16, device=DEVICE, generator=draw) for shape in shapes]


def kernels() -> list[Kernel]:
    """One bound by memory bandwidth, and a matrix product."""
    values, side = torch.arange(pick(256 << 20, 1 << 20), dtype=torch.int32, device=DEVICE), pick(8192, 256)
    (a, b), copied = noise((side, side), (side, side)), torch.zeros_like(values)
    product = torch.empty_like(a)
    expected = torch.mm(a, b, out=product).clone()

    def is_right(written: torch.Tensor, wanted: torch.Tensor) -> bool:
        synchronize()
        right = torch.equal(written, wanted)
        written.zero_()
        synchronize()
        return right

    copying, multiplying = partial(copied.copy_, values), partial(torch.mm, a, b, out=product)
    return [
        Kernel(f"copy of {values.nbytes >> 20} MiB", copying, partial(is_right, copied, values)),
        Kernel(f"bf16 product {side}^3", multiplying, partial(is_right, product, expected)),
    ]


def waited(stream: Any, load: Work, call: Callable[[], Answer], times: Times) -> bool | None:
    """Whether a call beside a load returned after its end; None if the load was over before."""
    load()
    end = mark(stream)
    time.sleep(0.002)  # for the kernel to be running, and not only launched
    over_before = end.query()
    timed(times, "", call)
    over = None if over_before else end.query()
    synchronize()
    return over


@question(3, 25, "Which driver calls wait for running kernels?")
def waiting() -> None:
    stream, product = new_stream(), kernels()[1]
    loads: dict[str, Work] = {
        "a kernel that only spins": lambda: spin(stream, pick(0.02, 0.03)),
        product.name: lambda: [launch(stream, product.launch) for _ in range(pick(20, 3))],
    }
    with Pages(8, 4).put_all() as pages:
        pages.tensor(torch.uint8, 0, 4).fill_(1)
        for load_name, load in loads.items():
            load()  # once, so that the kernel is loaded
            synchronize()
            for name, (call, restore) in calls_on(pages).items():
                times: Times = defaultdict(list)
                found = []
                for _ in rounds(15, 2, seconds=1):
                    found.append(waited(stream, load, call, times))
                    restore()
                figure(f"{name}, beside {load_name}", times[""])
                fact(f"{name} returned after the end of {load_name}", verdict(found))


def verdict(found: list[bool | None]) -> str:
    of = [waits for waits in found if waits is not None]
    return f"{sum(of)} of {len(of)}: {'it WAITS' if 2 * sum(of) > len(of) or not of else 'it does not wait'}"


# --- 10. May the GPU itself wait for a mapping? A stream waits for a flag, and a kernel behind it touches a
# page that is mapped only then. What a worker might do meanwhile is tried, each in a process of its own. A
# call that waits for the stream could never return: a watchdog sets the flag, and only a call that it
# rescued counts as a deadlock.

WATCHDOG_SECONDS = 2.0
RESCUED = "DEADLOCK, until the watchdog set the flag"
CALLS_WHILE_WAITING = ("map and set-access", "create", "release, and the memory goes", "unmap, handle kept")


@question(10, 55, "May the GPU itself wait for a mapping (cuStreamWaitValue32)?")
def stream_wait() -> None:
    for name in CALLS_WHILE_WAITING:
        end = apart(while_waiting, name, seconds=12)
        wrong = end.facts.get("wrong elements")
        text = (
            f"no deadlock, {wrong} wrong elements" if end.code == 0 else f"not tried to its end: {end.text}"
        )
        fact(f"{name}, while a stream waits for the flag", RESCUED if RESCUED in end.facts else text)


def while_waiting(name: str) -> None:
    stream, numbers = new_stream(), torch.zeros(16, dtype=torch.int32, device=DEVICE)
    launch(stream, lambda: numbers.fill_(1))  # a kernel first loaded while a stream waits might wait for it
    hold(stream, new_flag().fill_(1))
    synchronize()
    taken: Times = defaultdict(list)
    wrong = 0
    for done in rounds(30, 3, seconds=4):
        with Pages(8, 4).put_all() as pages:
            flag, over = new_flag(), pages.tensor(torch.int32, 6)
            hold(stream, flag)
            launch(stream, lambda over=over, done=done: over.fill_(done + 1))
            end, returned = mark(stream), threading.Event()

            def watch(flag: torch.Tensor = flag, returned: threading.Event = returned) -> None:
                if not returned.wait(WATCHDOG_SECONDS):
                    fact(RESCUED, True)  # first: what follows may end the process
                    flag.fill_(1)

            threading.Thread(target=watch, daemon=True).start()
            call, restore = calls_on(pages)[name]
            timed(taken, name, call)
            if 6 not in pages.mapped:
                pages.put(6, 0)
            returned.set()
            flag.fill_(1)
            end.synchronize()
            wrong += int((over != done + 1).sum())
            synchronize()
            restore()
    figure(f"{name}, while a stream waits for the flag", taken[name])
    fact("wrong elements", wrong)


# --- 2. Mapping fresh addresses beside running kernels: right results, and the cost to kernel and call.
# Each round runs the same launches three times: alone, alone again (the control), and with the host mapping
# pages all the while, never at an address that was mapped before.


def map_pages(taken: Times, until: Any, most: int) -> tuple[int, int]:
    """Maps fresh pages one by one until the event has passed or `most` are mapped, and writes through each.
    How many it mapped, and how many of them show another's contents."""
    count = 0
    with Pages(most, most) as pages:
        while count < most and not until.query():
            timed(taken, "map", pages.map, count, count)
            timed(taken, "set-access", set_access, pages.at(count), PAGE)
            count += 1
        until.synchronize()  # the check below must not slow it down
        return count, wrong_pages(pages, count)


def wrong_pages(pages: Pages, count: int) -> int:
    """Writes a number of its own to each page, and counts those that show another."""
    if count == 0:
        return 0
    seen, slot = pages.tensor(torch.int64, 0, count), torch.arange(count, device=DEVICE)
    seen.copy_(slot.unsqueeze(1).expand_as(seen))
    synchronize()
    return int((seen != slot.unsqueeze(1)).any(dim=1).sum())


@question(2, 35, "Fresh mapping beside kernels: is it right, what does it cost?")
def beside_kernels() -> None:
    launches, most, order = pick(40, 3), pick(1024, 10), ["alone", "again", "mapping"]
    for kernel in kernels():
        stream, shuffled, wrong = new_stream(), random.Random(0), 0
        taken: Times = defaultdict(list)
        medians: dict[str, list[float]] = defaultdict(list)
        mapped = [0, 0]
        for done in rounds(12, 2, seconds=10):
            shuffled.shuffle(order)
            for name in order:
                marks = [mark(stream)]
                for _ in range(launches):
                    launch(stream, kernel.launch)
                    marks.append(mark(stream))
                if name == "mapping":
                    mapped = list(map(sum, zip(mapped, map_pages(taken, marks[-1], most), strict=True)))
                marks[-1].synchronize()
                times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))
                if done:  # the first loads the kernel
                    medians[name].append(times[len(times) // 2])
                wrong += not kernel.is_right()
        method = "CUDA events, median of each run; with mapping / alone, same round; control: alone / alone"
        ratio(f"{kernel.name} beside mapping", medians["mapping"], medians["alone"], medians["again"], method)
        figure(f"{kernel.name}, alone", medians["alone"], "ms", "CUDA events, median of each run")
        for call, microseconds in taken.items():
            figure(f"{call}, beside {kernel.name}", microseconds)
        fact(f"runs of {kernel.name} beside mapping with a wrong result", wrong)
        fact(f"pages mapped beside {kernel.name} with wrong contents", f"{mapped[1]} of {mapped[0]}")


# --- 12. The type of handle is chosen when memory is made


@question(12, 15, "What does cuMemCreate cost with a shareable handle type?")
def handle_types() -> None:
    taken: dict[str, list[float]] = defaultdict(list)
    for name, kind in HANDLE_TYPES.items():
        fact(f"cuMemCreate with {name}", name_of(answer := create(PAGE, kind, False)))
        if answer[0] == 0:
            must(cuda.cuMemRelease(answer[1]))
            taken[name] = []
    kinds = [*taken, "again"]
    for done in rounds(60, 3, seconds=8):
        for name in kinds:
            times: Times = defaultdict(list)
            for _ in range(pick(32, 2)):
                handle = timed(times, "", create, PAGE, HANDLE_TYPES.get(name, 0), False)
                must(cuda.cuMemRelease(handle))
            if done:  # the first is a warm-up
                taken[name].append(sum(times[""]) / len(times[""]))
    none, again = taken.pop("none"), taken.pop("again")
    figure("create, none", none)
    for name, ours in taken.items():
        ratio(
            f"create, {name} / none", ours, none, again, "host clock, means of a round; control: none again"
        )


# --- 7. A CUDA graph captured once, and replayed while the tensor grows beneath it. It holds one query's
# attention over the whole reservation, of which the length in a device tensor says how much is there. It
# gathers rows below that length only, so that what is not mapped is not read.


def attend_to(
    q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, length: torch.Tensor
) -> torch.Tensor:
    """[HEADS, DIM] of q over the first `length` rows of kv [capacity, 2, HEADS, DIM]; float32."""
    rows = kv.index_select(0, torch.minimum(positions, length - 1))
    k, v = rows[:, 0].float(), rows[:, 1].float()
    scores = (k * q).sum(-1) / DIM**0.5
    scores = scores.masked_fill((positions >= length).unsqueeze(1), float("-inf"))
    return (scores.softmax(0).unsqueeze(-1) * v).sum(0)


@question(7, 25, "Does a captured CUDA graph go on while the tensor grows beneath it?")
def graphs() -> None:
    import vtensor

    capacity, step = pick(24, 4) * PER_PAGE, pick(97, 500)
    shape = (capacity, 2, HEADS, DIM)
    source, q = noise(shape, (HEADS, DIM))
    q, positions = q.float(), torch.arange(capacity, device=DEVICE)
    length, result = torch.full((1,), 10, device=DEVICE), torch.empty(HEADS, DIM, device=DEVICE)
    own = pool(page_size=PAGE, budget=2 * source.nbytes + 8 * PAGE, prefetch=0)
    t = vtensor.empty(0, *shape[1:], grow_dim=0, capacity=capacity, dtype=BF16, pool=own).append(source[:10])
    full = tensor_at(t.address, shape, BF16)  # only what the graph gathers from it is mapped
    with vtensor.lease(t):
        replay = captured(lambda: result.copy_(attend_to(q, full, positions, length)))

    def replay_once() -> Answer:
        replay()
        synchronize()
        return (0,)

    wrong = crossings = 0
    taken: Times = defaultdict(list)
    while t.length + step <= capacity and time.time() < deadline - 4:
        before = t.nbytes_mapped
        timed(taken, "append", lambda: (0, t.append(source[t.length : t.length + step]).length))
        crossings += t.nbytes_mapped > before
        length.fill_(t.length)
        result.zero_()
        synchronize()
        timed(taken, "replay", replay_once)
        wrong += not torch.allclose(result, attend_to(q, source, positions, length), rtol=1e-4, atol=1e-5)
    figure(f"append of {step} positions between replays, no look-ahead", taken["append"])
    figure("replay over the growing tensor", taken["replay"], "us", "host clock, to the end of the replay")
    fact("replays", len(taken["replay"]))
    fact("pages mapped between replays, times", crossings)
    fact("replays with a wrong result, to 1e-4 of the same kernels over a plain tensor", wrong)
    answers: list[str] = []
    ended = error_of(lambda: (captured(lambda: answers.extend(page_s_life()), warmup=0)(), synchronize()))
    fact("VMM calls during a capture, mode global", ", ".join(answers))
    fact("the error of that capture", ended)


# --- 9. Torch operations that walk a whole storage, over a plain view of a tensor of several rows. The
# storage has holes between the rows (I3's exception), which fault on a GPU. Each runs in a process of its
# own.

OPERATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "clone, which reads the view only": lambda view: view.clone(),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda view: torch.save(view, io.BytesIO()),
    "untyped_storage().clone()": lambda view: view.untyped_storage().clone(),
}


@question(9, 35, "Deepcopy and save of a view whose storage has holes?")
def torch_copies() -> None:
    with ThreadPoolExecutor(len(OPERATIONS)) as together:
        ends = list(together.map(lambda case: apart(torch_copy, case, seconds=30), OPERATIONS))
    for case, end in zip(OPERATIONS, ends, strict=True):
        tell(case, end)


def torch_copy(case: str) -> None:
    import vtensor

    own = pool(page_size=PAGE, budget=64 * PAGE, prefetch=0)
    t = vtensor.empty(4, 300, HEADS, DIM, grow_dim=1, capacity=16384, dtype=BF16, pool=own).fill_(1)
    synchronize()
    view = t.alias()
    fact("bytes of the storage", view.untyped_storage().nbytes())
    fact("bytes mapped", t.nbytes_mapped)
    fact("begun", True)
    fact("error", error_of(lambda: (OPERATIONS[case](view), synchronize())))
    fact("error of growing the tensor afterwards", error_of(lambda: (t.extend(2000), synchronize())))


# --- 4. The same attention kernel over a VTensor and over plain memory of the same layout. Where memory
# lies decides some percent of such a time: every trial allocates anew, in an order that changes, and the
# control is a second plain allocation.

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]  # [B, S, H, D], causal


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def sdpa_by(backend: SDPBackend) -> Attention:
    def attend(*arguments: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(*arguments)

    return attend


def package(module: str) -> Attention:
    function = importlib.import_module(module).flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        result = function(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    return attend


def flex() -> Attention:
    """Without a mask: a causal one has to be made for each length, and is no part of what is compared."""
    importlib.import_module("triton")
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v, causal: compiled(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)


KERNELS: dict[str, Callable[[], Attention]] = {
    "torch SDPA, FlashAttention": lambda: sdpa_by(SDPBackend.FLASH_ATTENTION),
    "torch SDPA, cuDNN": lambda: sdpa_by(SDPBackend.CUDNN_ATTENTION),
    "FlashAttention 2": lambda: package("flash_attn"),
    "FlashAttention 3": lambda: package("flash_attn_interface"),
    "FlashAttention 4": lambda: package("flash_attn.cute"),
    "FlexAttention, compiled": flex,  # last: it compiles for half a minute
}


def event_time(work: Work) -> float:
    """Milliseconds of one launch, of ten in a row that wait in the stream when the first begins."""
    stream, count = new_stream(), pick(10, 1)
    synchronize()
    spin(stream, 1e-3)
    start = mark(stream)
    for _ in range(count):
        launch(stream, work)
    (end := mark(stream)).synchronize()
    return float(start.elapsed_time(end)) / count


@question(4, 90, "Attention over a VTensor against the same over plain memory?")
def attention() -> None:
    shapes = pick(
        {"decode, batch 16, 16k": (16, 16384, 1), "decode, batch 1, 128k": (1, 131072, 1)}
        | {"causal prefill, batch 1, 16k": (1, 16384, 16384)},
        {"decode, batch 1, 2k": (1, 2048, 1), "causal, batch 1, 2k": (1, 2048, 16)},
    )
    for name, make in KERNELS.items():
        try:
            attend = make()
            for shape_name in list(shapes)[: 1 if make is flex else None]:  # each shape is compiled for
                if time.time() > deadline - 5:
                    find("skipped", name=f"{name}, {shape_name}", reason=OUT_OF_TIME)
                else:
                    compare(f"{name}, {shape_name}", attend, *shapes[shape_name])
        except Exception as error:
            find("skipped", name=name, reason=first_line(error))


def compare(what: str, attend: Attention, batch: int, length: int, queries: int) -> None:
    import vtensor

    size = (batch, length, HEADS, DIM)
    q, *values = noise((batch, queries, QUERY_HEADS, DIM), size, size)
    causal, differing = queries > 1, 0
    medians: dict[str, list[float]] = defaultdict(list)
    for trial in rounds(4, 2, seconds=5):
        pools, pairs = [], {}
        names = ["plain", "control", *(f"VTensor of {mib} MiB pages" for mib in pick((2, 32), (2, 4)))]
        for name in random.Random(trial).sample(names, len(names)):
            if name.startswith("VTensor"):
                page = int(name.split()[2]) * MIB
                pools.append(pool(page_size=page, budget=2 * values[0].nbytes + 8 * page, prefetch=0))
                options = {"grow_dim": 1, "capacity": length, "dtype": BF16, "pool": pools[-1]}
                pairs[name] = [vtensor.empty(*size, **options).copy_(x) for x in values]
            else:
                pairs[name] = [x.clone() for x in values]
        expected = attend(q, *pairs["plain"], causal)
        differing += sum(int((attend(q, *pair, causal) != expected).sum()) for pair in pairs.values())
        samples = {
            name: partial(event_time, partial(attend, q, *pair, causal)) for name, pair in pairs.items()
        }
        for name, times in interleave(samples, pick(15, 2), warmup=1).items():
            medians[name].append(quantile(sorted(times), 0.5))
        synchronize()
        pairs.clear()
        samples.clear()
        for each in pools:
            each.close()
    plain, control = medians.pop("plain"), medians.pop("control")
    figure(f"{what}, plain", plain, "ms", "CUDA events, median of each trial")
    method = "CUDA events around 10 launches, interleaved; medians of trials with fresh allocations / plain"
    for name, ours in medians.items():
        ratio(f"{what}, {name}", ours, plain, control, method)
    fact(f"{what}: elements that differ", differing)


# --- 5. Layers that share a page: the kernel's time over group sizes. A group of G layers lies interleaved
# in one VTensor [batch, positions, G, heads, dim]; a layer is a strided view of it, so that a page holds 1
# / G as many positions of each. The baseline is a group of one, the control another of one.


@question(5, 30, "What does sharing a page between layers cost the kernel?")
def layer_groups() -> None:
    import vtensor

    batch, length = pick((8, 8192), (1, 1024))
    sizes = {"control": 1, **{f"group of {size}": size for size in pick((1, 2, 4, 8, 16, 32), (1, 2))}}
    own = pool(
        page_size=PAGE,
        budget=2 * batch * length * HEADS * DIM * 2 * sum(sizes.values()) + 64 * PAGE,
        prefetch=0,
    )
    options = {"grow_dim": 1, "capacity": length, "dtype": BF16, "pool": own}
    made = {
        name: [vtensor.empty(batch, length, sizes[name], HEADS, DIM, **options).normal_() for _ in "kv"]
        for name in random.Random(0).sample(list(sizes), len(sizes))
    }
    (q,) = noise((batch, 1, QUERY_HEADS, DIM))
    launched: dict[str, int] = defaultdict(int)

    def attend(name: str) -> None:
        layer = launched[name] % sizes[name]  # another each time, as a model goes through its layers
        launched[name] += 1
        sdpa(q, *(x[:, :, layer] for x in made[name]))

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        samples = {name: partial(event_time, partial(attend, name)) for name in sizes}
        taken = interleave(samples, pick(60, 2), warmup=pick(3, 1))
    synchronize()
    method = f"torch SDPA, FlashAttention; batch {batch}, {length} keys, 1 query; CUDA events, interleaved"
    one, control = taken.pop("group of 1"), taken.pop("control")
    figure("attention of one layer, group of 1", one, "ms", method)
    for name, times in taken.items():
        ratio(name, times, one, control, method)


# --- 6. A decode loop. Each step appends a position to K and V of every layer and attends over all of them;
# its time goes to the end of the device's work, as a loop that samples a token waits for it. Growth from 1k
# to 32k is sampled, in windows of steps around lengths at which a page ends.

LAYERS = 4  # of Llama's 32, so that batch 64 at 32k fits beside torch.cat's copies
AHEAD = {"VTensor, synchronous": 0, "VTensor with the worker": 1 << 30}  # bytes of look-ahead


class Grower:
    """K and V of a layer, that grow by one position at a time."""

    def __init__(self, how: str, filled: list[torch.Tensor], most: int, own: Any) -> None:
        self.how, self.length = how, filled[0].shape[1]
        self.tensors: list[Any] = []  # the VTensors, if any
        self.kv = [x.contiguous() for x in filled]
        if own is not None:
            import vtensor

            shape, options = (len(filled[0]), 0, HEADS, DIM), {"grow_dim": 1, "capacity": most, "dtype": BF16}
            self.kv = self.tensors = [vtensor.empty(*shape, **options, pool=own).append(x) for x in filled]
        elif how == "preallocated":
            self.kv = [x.new_zeros(len(x), most, HEADS, DIM) for x in filled]
            for buffer, x in zip(self.kv, filled, strict=True):
                buffer[:, : self.length].copy_(x)

    def append(self, new: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.how == "preallocated":
            for buffer, x in zip(self.kv, new, strict=True):
                buffer[:, self.length : self.length + 1].copy_(x)
            self.length += 1
            return [buffer[:, : self.length] for buffer in self.kv]
        if self.tensors:
            return [t.append(x) for t, x in zip(self.tensors, new, strict=True)]
        self.kv = [torch.cat(both, dim=1) for both in zip(self.kv, new, strict=True)]
        return self.kv


@question(6, 180, "Decoding: torch.cat, preallocated, VTensor, VTensor with the worker?")
def decode() -> None:
    fact("layers", f"{pick(LAYERS, 1)} of 32; tokens/s are those of these layers' attention")
    lengths, batches = pick((1024, 8192, 32768), (1024,)), pick((1, 4, 16, 64), (1,))
    # The largest last: it takes a third of the time.
    windows = sorted(((batch, length) for batch in batches for length in lengths), key=math.prod)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for batch, length in windows:
            window(batch, length)


def window(batch: int, length: int) -> None:
    """All growers around `length`, where a page ends, at this batch size."""
    steps, layers = pick(128, 6), pick(LAYERS, 1)
    what = f"batch {batch}, {length:,} positions"
    needed = 2 * layers * batch * (length + steps // 2) * HEADS * DIM * 2
    if time.time() > deadline - 6 - needed / 6e8:  # filling and mapping take most of it
        find("skipped", name=what, reason=OUT_OF_TIME)
        return
    row, one = (1, length - steps // 2, HEADS, DIM), (batch, 1, HEADS, DIM)
    *filled, new_k, new_v, q = noise(row, row, one, one, (batch, 1, QUERY_HEADS, DIM))
    outputs: dict[str, torch.Tensor] = {}
    names = ["torch.cat", "preallocated", *AHEAD]
    for name in random.Random(length + batch).sample(names, len(names)):
        peak, free = torch_memory(forget=True)
        budget, ahead = int(free * 0.85) // PAGE * PAGE, AHEAD.get(name)
        own = None if ahead is None else pool(page_size=PAGE, budget=budget, prefetch=ahead)
        try:
            filled_batch, most = (
                [x.expand(batch, -1, -1, -1) for x in filled],
                (length // PER_PAGE + 2) * PER_PAGE,
            )
            growers = [Grower(name, filled_batch, most, own) for _ in range(layers)]
            times, outputs[name] = run(growers, q, [new_k, new_v], steps)
            used = own.stats().pages_used * PAGE if own else torch_memory()[0] - peak
            figure(f"step of {name}, {what}", times, "ms", "host clock, to the end of the device's work")
            figure(f"step that begins a page, {name}, {what}", times[steps // 2 : steps // 2 + 1], "ms")
            fact(f"memory of {name}, {what}, times what the positions need", round(used / needed, 3))
        except Exception as error:
            find("skipped", name=f"{name}, {what}", reason=first_line(error))
        finally:
            growers = []
            synchronize()
            if own is not None:
                own.close()
    wrong = [n for n, x in outputs.items() if not torch.allclose(x, outputs[next(iter(outputs))], 2e-2, 2e-2)]
    fact(f"results that differ, {what}", wrong or "none")


def run(
    growers: list[Grower], q: torch.Tensor, new: list[torch.Tensor], steps: int
) -> tuple[list[float], torch.Tensor]:
    """Milliseconds of each step, without those that load kernels; and the last output."""
    import vtensor

    times, output = [], q
    tensors = [t for grower in growers for t in grower.tensors]
    for _ in range(steps):
        begun = time.perf_counter()
        with vtensor.lease(tensors) if tensors else contextlib.nullcontext():
            for grower in growers:
                output = sdpa(q, *grower.append(new))
        synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return times, output.clone()


# --- The program: it asks one question after the other

ORDER = (0, 8, 11, 3, 1, 10, 2, 12, 7, 9, 4, 6, 5)  # what is known soonest first, what takes longest last
RESULTS = Path(__file__).parent / "results"
LEAST_SECONDS = 8  # to import torch, start CUDA and find anything


def line_of(finding: Finding) -> str:
    """A finding as a line of text; empty for a call of the recording."""
    match finding["kind"]:
        case "call":
            return ""
        case "error":
            return f"FAILED: {finding['text']}"
        case "skipped":
            return f"{finding['name']}: skipped ({finding['reason']})"
        case "fact":
            return f"{finding['name']}: {finding['value']}"
    text = f"{finding['name']}: {number(finding['median'])} {finding['unit']}"
    text += f" (p10 {number(finding['p10'])}, p99 {number(finding['p99'])}, n {finding['n']})"
    if control := finding.get("control"):
        text += f", control {number(control['median'])} [{number(control['p10'])}, {number(control['p90'])}]"
    return text


def chosen(text: str) -> list[int]:
    early = {number for number, question in QUESTIONS.items() if question.while_building}
    named = {"first": early, "rest": set(QUESTIONS) - early}.get(text)
    numbers = named if named is not None else {int(part) for part in text.split(",")}
    if unknown := numbers - set(QUESTIONS):
        raise argparse.ArgumentTypeError(f"no question has the number {', '.join(map(str, unknown))}")
    return [number for number in ORDER if number in numbers]


def main(arguments: list[str] | None = None) -> int:
    """1 where a question failed or was not reached; no figure is judged."""
    global quick, deadline
    begun = time.time()
    numbers = ", ".join(f"{number} {question.ask.__name__}" for number, question in sorted(QUESTIONS.items()))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, epilog=numbers)
    only = "numbers of questions; or `first`, those that can be asked while vtensor is built, or `rest`"
    parser.add_argument("--only", type=chosen, default=list(ORDER), metavar="N,N", help=only)
    parser.add_argument("--minutes", type=float, default=8, help="all of it ends within these (default 8)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS), metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="small sizes, which measure nothing")
    parser.add_argument("--apart", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    quick = options.quick
    if options.apart:
        deadline = begun + options.seconds
        return in_process(*options.apart)
    if not (head := describe()):
        parser.error("torch finds no GPU here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # through the `finally`s
    options.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", head["gpu"].lower()).strip("-")
    path, failed, unanswered = options.out / f"{name}-{today()}.jsonl", False, []
    with path.open("a", buffering=1) as file:
        file.write(json.dumps({"kind": "run", "date": today(), "quick": quick, **head}) + "\n")
        for asked in options.only:
            seconds = min(PATIENCE * QUESTIONS[asked].seconds, begun + options.minutes * 60 - time.time() - 5)
            print(f"\n{asked}. {QUESTIONS[asked].text} (at most {seconds:.0f} s)", flush=True)
            found: list[Finding] = []

            def note(finding: Finding, asked: int = asked, found: list[Finding] = found) -> None:
                found.append(finding)
                file.write(json.dumps({"question": asked, **finding}) + "\n")
                if line := line_of(finding):
                    print(f"    {line}", flush=True)

            code: int | None = 1
            if seconds >= LEAST_SECONDS:
                code = run_apart(QUESTIONS[asked].ask.__name__, (), seconds, note)
                if code != 0:
                    how = f"ran past {seconds:.0f} s" if code is None else f"ended with {code}"
                    note({"kind": "error", "text": how})
            failed |= code != 0
            if code != 0 or any(finding.get("reason") == OUT_OF_TIME for finding in found):
                unanswered.append(str(asked))
    print(f"\n{time.time() - begun:.0f} s; written: {path}")
    if unanswered:
        print(f"Not answered in full; in a second call: scripts/gpu.sh --only {','.join(unanswered)}")
    return int(failed)


def in_process(name: str, *arguments: str) -> int:
    faulthandler.enable()
    code = 0
    try:
        globals()[name](*arguments)
    except Exception as error:
        find("error", text=first_line(error))
        code = 1
    os._exit(code)  # a device in error, or a stream that waits, would hold an orderly exit up


if __name__ == "__main__":
    sys.exit(main())

"""The questions about a real GPU, answered with figures: ``make gpu``, or ``python -m benchmarks.gpu``.

Each question is a function, called in a process of its own with a bound on its time, and so is each case that
may break the device. The program that starts them shows what they find and adds it to one file of JSON lines,
as it comes, so a process that dies or hangs loses nothing.

Heads are those of Llama-3-8B: 32 of queries, 8 of keys and values, of 128, in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import importlib.util
import io
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from . import machine
from .harness import clock, interleave, quantile
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
Call = Callable[..., Answer]
Finding = dict[str, Any]
Line = dict[str, Any]

# --- Processes, and what they find. They are forked, each before its parent asks the driver anything: CUDA
# does not outlive a fork.

FORK = multiprocessing.get_context("fork")
PATIENCE = 1.0  # times the seconds that a process may take; where tests run, others may need the cores
quick = False  # small sizes, which measure nothing
deadline = math.inf
tell: Callable[[Finding], object] = print  # sends a finding to the process that forked this one


def find(kind: str, **finding: Any) -> None:
    """Kinds: figure, fact, skipped, call, error; and at last, from :func:`apart`, end."""
    tell({"kind": kind, **finding})


def fact(name: str, value: Any) -> None:
    """A count, a yes or no, an error message."""
    find("fact", name=name, value=value)


def skip(name: str, reason: str) -> None:
    find("skipped", name=name, reason=reason)


def spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    quantiles = {"median": 0.5, "p10": 0.1, "p90": 0.9, "p99": 0.99}
    return {name: quantile(ordered, q) for name, q in quantiles.items()} | {"n": len(ordered)}


def figure(name: str, values: Iterable[float], unit: str = "us", method: str = "host clock") -> None:
    find("figure", name=name, unit=unit, method=method, **spread(values))


def figures(name: str, taken: Mapping[str, Sequence[float]]) -> None:
    """Of samples by their names, which stand for `{}` in the figures'."""
    for sample, values in taken.items():
        figure(name.format(sample), values)


def ratios(name: str, taken: Mapping[str, Sequence[float]], base: str, control: str, method: str) -> None:
    """Of each sample / base by round, beside the same of the control, a second copy of the base."""
    by_round = {each: spread(map(truediv, taken[each], taken[base])) for each in taken if each != base}
    of_control = by_round.pop(control)
    for sample, ratio in by_round.items():
        find("figure", name=name.format(sample), unit="x", method=method, **ratio, control=of_control)


def pick(full: Any, small: Any) -> Any:
    return small if quick else full


def rounds(full: int, small: int, seconds: float) -> Iterator[int]:
    """Counts rounds, at least two, until they are done or have taken `seconds` (or all that is left)."""
    end = min(time.time() + seconds, deadline - 2)
    for done in range(pick(full, small)):
        if done >= 2 and time.time() > end:
            return
        yield done


def bounded(seconds: float) -> float:
    return min(PATIENCE * seconds, deadline - time.time() - 1)


def apart(work: Work, seconds: float) -> Iterator[Finding]:
    """Begins the work in a process that may die, and ends by itself where it hangs. Gives what that finds, as
    it comes, and at last how it ended."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=in_process, args=(work, max(1.0, bounded(seconds)), theirs.send))
    process.start()
    theirs.close()
    return findings_of(process, ours)


def in_process(work: Work, seconds: float, teller: Callable[[Finding], object]) -> None:
    global deadline, tell
    deadline, tell = time.time() + seconds, teller
    faulthandler.enable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, chain=True)  # says where it hung
    signal.alarm(int(seconds) + 3)
    error = error_of(work)
    if error != "none":
        find("error", text=error)
    os._exit(error != "none")  # a device in error, or a stream that waits, would hold an orderly exit up


def findings_of(process: Any, pipe: Any) -> Iterator[Finding]:
    errors = ""
    try:
        with contextlib.suppress(EOFError, OSError):  # it has ended, be it in the middle of a finding
            while True:
                found = pipe.recv()
                errors += f" ({found['text']})" if found["kind"] == "error" else ""
                yield found
        process.join()
    finally:
        process.kill()
    code = process.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    yield {"kind": "end", "text": ("hung, and was killed" if code == -signal.SIGALRM else how) + errors}


def pass_on(name: str, findings: Iterable[Finding]) -> None:
    """Finds what a case has found. The name goes before those of facts."""
    for found in findings:
        match found["kind"]:
            case "call":
                find(**found)
            case "fact":
                fact(name + found["name"], found["value"])
            case "end":
                fact(f"{name}the process", found["text"])


def at_once(works: Mapping[str, Work]) -> None:
    """Each in a process; most of their time goes to starting."""
    started = {case: apart(work, seconds=30) for case, work in works.items()}
    for case, findings in started.items():
        pass_on(f"{case}: ", findings)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def error_of(*works: Work) -> str:
    """The first line of what they raise, or "none"."""
    try:
        for work in works:
            work()
    except Exception as error:
        return first_line(error)
    return "none"


# --- The first GPU: through torch, in functions for which tests put stand-ins, and through cuda-bindings

DEVICE = torch.device("cuda", 0)
LIBRARY = ""  # over which another process reads; empty: the libcuda of the system
new_stream: Callable[[], Any] = torch.cuda.Stream
synchronize: Work = torch.cuda.synchronize


def pool(budget: int, page_size: int = PAGE, prefetch: int = 0, **options: Any) -> Any:
    import vtensor

    return vtensor.Pool("cuda", budget=budget, page_size=page_size, prefetch=prefetch, **options)


def growable(own: Any, capacity: int, *shape: int, grow_dim: int = 1) -> Any:
    """A VTensor of that pool."""
    import vtensor

    return vtensor.empty(*shape, grow_dim=grow_dim, capacity=capacity, dtype=BF16, pool=own)


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


def hold(stream: Any, flag: torch.Tensor) -> None:
    """Has the stream wait until the flag is 1 or more."""
    at_least = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    must(cuda.cuStreamWaitValue32(stream.cuda_stream, flag.data_ptr(), 1, at_least))


def captured(work: Work) -> Work:
    """Captures `work` in a CUDA graph; what replays it."""
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


def name_of(answer: Answer) -> str:
    """ "CUDA_ERROR_INVALID_VALUE"."""
    return str(cuda.CUresult(answer[0]).name)


def must(answer: Answer) -> int:
    """The first of what a call made, or 0. Raises unless it succeeded."""
    code, *made = answer
    if code != 0:
        raise RuntimeError(f"the driver answered {name_of(answer)} ({int(code)})")
    return int(made[0]) if made else 0


def clocked(call: Call, *arguments: Any) -> float:
    """Microseconds of a call, which must succeed."""
    start = time.perf_counter_ns()
    answer = call(*arguments)
    taken = time.perf_counter_ns() - start
    must(answer)
    return taken / 1e3


@cache
def retain_context() -> None:
    """Makes the device's primary context current in this thread, unless this process has done so."""
    must(cuda.cuInit(0))
    must(cuda.cuCtxSetCurrent(must(cuda.cuDevicePrimaryCtxRetain(0))))


@cache
def has_rdma() -> bool:
    """Whether memory can be made for GPUDirect RDMA; then that of the recorded calls is."""
    retain_context()
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    return bool(must(cuda.cuDeviceGetAttribute(attribute, 0)))


def on_device(wanted: Any) -> Any:
    wanted.location.type, wanted.location.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    return wanted


@cache
def properties(handle_type: int = 0, rdma: bool = False) -> Any:
    retain_context()
    wanted = on_device(cuda.CUmemAllocationProp())
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = cuda.CUmemAllocationHandleType(handle_type)
    wanted.allocFlags.gpuDirectRDMACapable = int(rdma)
    return wanted


@cache
def access(flags: int) -> list[Any]:
    wanted = on_device(cuda.CUmemAccessDesc())
    wanted.flags = cuda.CUmemAccess_flags(flags)
    return [wanted]


def granularity() -> int:
    minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return must(cuda.cuMemGetAllocationGranularity(properties(), minimum))


def create(size: int, handle_type: int = 0) -> Answer:
    return cuda.cuMemCreate(size, properties(handle_type), 0)


def reserve(size: int, alignment: int = 0) -> Answer:
    retain_context()
    return cuda.cuMemAddressReserve(size, alignment, 0, 0)


def set_access(address: int, size: int, flags: int = READ_WRITE) -> Answer:
    return cuda.cuMemSetAccess(address, size, access(flags), 1)


class Pages:
    """A range of `slots` pages and `count` handles, of which nothing is mapped at first. At the end of the
    `with` all is given back; wait for kernels before."""

    def __init__(self, slots: int, count: int, size: int = PAGE) -> None:
        self.size, self.slots = size, slots
        self.address = must(reserve(slots * size, size & -size))
        self.handles = [must(create(size)) for _ in range(count)]

    def at(self, slot: int) -> int:
        return self.address + slot * self.size

    def map(self, slot: int, handle: int) -> Answer:
        """Maps handle number `handle` there, not accessible yet."""
        return cuda.cuMemMap(self.at(slot), self.size, 0, self.handles[handle], 0)

    def set_access(self, slot: int, flags: int = READ_WRITE, count: int = 1) -> Answer:
        return set_access(self.at(slot), count * self.size, flags)

    def put(self, slot: int, handle: int, flags: int = READ_WRITE) -> Answer:
        must(self.map(slot, handle))
        must(answer := self.set_access(slot, flags))
        return answer

    def put_all(self) -> Pages:
        """Handle i at slot i, all accessible by one call."""
        for slot in range(len(self.handles)):
            must(self.map(slot, slot))
        must(self.set_access(0, count=len(self.handles)))
        return self

    def unmap(self, slot: int, count: int = 1) -> Answer:
        return cuda.cuMemUnmap(self.at(slot), count * self.size)

    def tensor(self, dtype: torch.dtype, slot: int = 0, count: int = 1) -> torch.Tensor:
        """Pages from `slot` on, mapped or not: ``[count, elements of a page]``."""
        return tensor_at(self.at(slot), (count, self.size // dtype.itemsize), dtype)

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *exc: object) -> None:
        for slot in range(self.slots):
            self.unmap(slot)  # is refused where nothing is mapped
        for handle in self.handles:
            cuda.cuMemRelease(handle)
        cuda.cuMemAddressFree(self.address, self.slots * self.size)


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor over addresses, mapped or not, which the caller keeps."""
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, DEVICE, nbytes)
    return torch.empty(0, dtype=dtype, device=DEVICE).set_(storage, 0, shape)


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
    "free with the wrong size": "reserve; free 2; free 8; free 4",
    "free from the middle": "reserve; free 2 2; free 4",
    "free twice": "reserve; free; free",
    "create of size 0": "create 0",
    "create of half a granule": "create 0.5",
    "reserve of size 0": "reserve 0",
    "reserve of half a granule": "reserve 0.5",
    "reserve with an alignment": "reserve 4 16; create; map; access",
    "reserve with an alignment of three granules": "reserve 3 3",
    # Where memory is made for GPUDirect RDMA.
    "write access after the first mapping went": "reserve; create; map; map 1; unmap; access 1; map 2",
    "write access to two after the first mapping went":
        "reserve; create; map; map 1; map 2; unmap; access 1; access 2; map 3",
    "mapped again once no mapping is left":
        "reserve; create; map; map 1; unmap; access 1; unmap 1; map 2; access 2; map 3",
    "a fork is written to after its parent went, and forked":
        f"{MAPPED}; map 1; access 1 1 1; access 0 1 1; unmap; access 1; map 2",
    "a fork is mapped anew for writes after its parent went, and forked":
        f"{MAPPED}; map 1; access 1 1 1; access 0 1 1; unmap; unmap 1; map 1; access 1; map 2; access 2 1 1",
    "a fork is read after its parent went, and forked":
        f"{MAPPED}; map 1; access 1 1 1; access 0 1 1; unmap; map 2; access 2 1 1; access 1 1 1; map 3",
    # Those that may end their process, leave its context in error, or map what the next case reserves.
    # Releasing what was released is not among them: the reference calls it undefined.
    "map past the end of the range": "reserve 1; create 2; map 0 2",
    "free while mapped": f"{MAPPED}; free; unmap; free",
    "map of a handle that was released and is mapped elsewhere": f"{MAPPED}; release; map 1",
    "copy from behind what is mapped": f"{MAPPED}; copy 0 1 1; wait",
    "fill over the end of what is mapped": f"{MAPPED}; fill 0.5 1; wait",
    "fill of what is read-only": "reserve; create; map; access 0 1 1; fill; wait",
}  # fmt: skip
SAFE, RISKY = list(CASES)[:-6], list(CASES)[-6:]


def lines_of(case: str, granule: int) -> Iterator[Line]:
    """The calls of a case, with sizes in bytes and without answers."""
    for step in CASES[case].split("; "):
        word, *values = step.split()
        call, arguments = CALLS[word]
        given = arguments | dict(zip(arguments, map(float, values), strict=False))
        sizes = {name: int(value * (granule if name in IN_GRANULES else 1)) for name, value in given.items()}
        yield {"case": case, "call": call, **sizes}


def play(lines: Iterable[Line]) -> Iterator[str]:
    """Makes the calls of one case. The names of the answers, call by call."""
    ranges: list[int] = []  # addresses; 0 where it was refused
    handles: list[int] = []
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
        made = {"cuMemAddressReserve": ranges, "cuMemCreate": handles}.get(call, [])
        made.append(int(answer[1]) if answer[0] == 0 and len(answer) > 1 else 0)
        yield name_of(answer)


def answered(cases: Iterable[str]) -> Iterator[Line]:
    """The lines of the cases with their answers, up to a case that leaves the device in error."""
    for case in cases:
        lines = list(lines_of(case, granularity()))
        for line, answer in zip(lines, play(lines), strict=True):
            yield {**line, "answer": answer}
        if cuda.cuCtxSynchronize()[0] != 0:
            return


def play_cases(*cases: str) -> None:
    for line in answered(cases):
        find("call", **line)


def record() -> None:
    pass_on("", apart(lambda: (fact("granularity", granularity()), play_cases(*SAFE)), seconds=30))
    at_once({case: partial(play_cases, case) for case in RISKY})


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
    fault(seen.sum)


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
    fact("error", error_of(work, synchronize))
    fact("a kernel afterwards", error_of(lambda: int(torch.ones(4, device=DEVICE).sum())))
    fact("a VMM call afterwards", name_of(reserve(PAGE)))


def faults() -> None:
    def case_of(work: Work) -> tuple[str, Any, Iterator[Finding]]:
        gate = FORK.Event()
        name = work.__name__.replace("_", " ")
        return name, gate, apart(lambda: (gate.wait(), signal.alarm(15), work()), seconds=40)

    cases = [case_of(work) for work in (write_through_read_only, read_past_end, unmap_beneath_kernel)]
    own = torch.arange(1 << 20, device=DEVICE)
    expected = int(own.sum())

    def see_that_all_is_as_before() -> None:
        with Pages(1, 1).put_all() as pages:
            seen = int(pages.tensor(torch.uint8).fill_(3).max()), int(own.sum())
            assert seen == (3, expected), "WRONG contents"

    for name, gate, findings in cases:
        gate.set()
        pass_on(f"{name}: ", findings)
        fact(f"{name}: the parent's error", error_of(see_that_all_is_as_before))


# --- 11. Triton asks cuPointerGetAttribute(DEVICE_POINTER) of every tensor that it launches a kernel over,
# and raises where the answer is no; so do torch.compile and FlexAttention. The first page of a KVCache's
# layer is not mapped while slot 0 is free, or once its window passed it.


def pointer_answers() -> dict[str, Answer]:
    asked = partial(cuda.cuPointerGetAttribute, cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    with Pages(6, 4) as pages:
        pages.put(0, 0)
        pages.put(1, 1, READ_ONLY)
        pages.put(2, 2)
        must(pages.set_access(2, NO_ACCESS))
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


def pointers() -> None:
    if importlib.util.find_spec("triton") is None or DEVICE.type != "cuda":
        skip("Triton kernels", "they need Triton and a GPU")
    else:
        case = "a Triton kernel over a tensor whose first page {} mapped".format
        at_once({case("is"): partial(triton_reads, 1), case("is not"): partial(triton_reads, 0)})
    for address, answer in pointer_answers().items():
        fact(f"DEVICE_POINTER of an address that is {address}", name_of(answer))


def triton_reads(slot: int) -> None:
    """A Triton kernel that is given the page at `slot` of two, and reads in the second one only."""
    global tl
    import triton
    import triton.language as tl

    @triton.jit
    def read_one(source, offset, out):  # type: ignore[no-untyped-def]
        tl.store(out, tl.load(source + offset))

    with Pages(2, 1) as pages:
        pages.put(1, 0)
        second, given = pages.tensor(torch.int32, 1)[0].fill_(42), pages.tensor(torch.int32, slot)[0]
        out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        synchronize()
        offset = (second.data_ptr() - given.data_ptr()) // 4
        fact("Triton's error", error_of(lambda: read_one[(1,)](given, offset, out)))
        fact("it reads, of 42", int(out))


# --- 1, 3 and 10: the same calls with nothing running, beside kernels on other memory, and while a stream
# waits


def kept(made: list[int], call: Call, *arguments: Any) -> Answer:
    answer = call(*arguments)
    made.append(must(answer))
    return answer


def calls_on(pages: Pages) -> dict[str, tuple[Call, Work]]:
    """Each call, and what makes it possible again. Slots 0 to 3 are mapped, 4 to 7 are not."""
    size, ranges = pages.size, list[int]()
    new_handle = partial(kept, pages.handles, create, size)
    new_range = partial(kept, ranges, reserve, size, size)
    new_handle(), new_range()  # one of each is there to give back

    def release() -> Answer:
        return cuda.cuMemRelease(pages.handles.pop())

    def free() -> Answer:
        return cuda.cuMemAddressFree(ranges.pop(), size)

    def map_again() -> None:
        pages.put(1, 1)
        pages.tensor(torch.uint8, 1).fill_(1)
        synchronize()

    return {
        "cuDeviceGetCount": (cuda.cuDeviceGetCount, lambda: None),
        "cuMemGetInfo": (cuda.cuMemGetInfo, lambda: None),
        "reserve": (new_range, free),
        "address-free": (free, new_range),
        "create": (new_handle, release),
        "release, and the memory goes": (release, new_handle),
        "map": (lambda: pages.map(5, 0), lambda: pages.unmap(5)),
        "map and set-access": (lambda: pages.put(5, 0), lambda: pages.unmap(5)),
        "set-access": (lambda: pages.set_access(2), lambda: None),
        "set-access to read-only": (lambda: pages.set_access(2, READ_ONLY), lambda: pages.set_access(2)),
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
    if address and handle and went_well("map", cuda.cuMemMap(address, PAGE, 0, handle, 0)):
        went_well("set-access", set_access(address, PAGE))
        went_well("unmap", cuda.cuMemUnmap(address, PAGE))
    if handle:
        went_well("release", cuda.cuMemRelease(handle))
    if address:
        went_well("address-free", cuda.cuMemAddressFree(address, PAGE))
    return answers


def calls() -> None:
    retain_context()  # in this thread, and not first in the other
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

    def once(call: Call, restore: Work) -> float:
        taken = clocked(call)
        restore()
        return taken

    for mib in pick((2, 4, 8, 16, 32), (2, 4)):
        with Pages(8, 4, mib * MIB).put_all() as pages:
            samples = {name: partial(once, *pair) for name, pair in calls_on(pages).items()}
            figures(f"{{}}, {mib} MiB", interleave(samples, rounds(200, 3, seconds=2)))
        for count in pick((8, 64), (2,)):
            merged_calls(mib, count)


def merged_calls(mib: int, count: int) -> None:
    """One set-access, and one unmap, over `count` pages, against as many of them."""
    spent = defaultdict[tuple[str, int], list[float]](list)
    with Pages(count, count, mib * MIB) as pages:
        for _ in rounds(60, 2, seconds=1):
            for step in (count, 1):
                for slot in range(count):
                    must(pages.map(slot, slot))
                for name, call in (("set-access", set_access), ("unmap", cuda.cuMemUnmap)):
                    start = time.perf_counter_ns()
                    for slot in range(0, count, step):
                        must(call(pages.at(slot), step * pages.size))
                    spent[name, step].append((time.perf_counter_ns() - start) / 1e3)
    for name in ("set-access", "unmap"):
        what = f"one {name} over {count} pages of {mib} MiB"
        figure(what, spent[name, count])
        gains = map(truediv, spent[name, 1], spent[name, count])
        figure(f"gain of {what}", gains, "x", "host clock; n calls / one, of the same round")


class Kernel(NamedTuple):
    name: str
    launch: Work
    written: torch.Tensor
    wanted: torch.Tensor

    def is_right(self) -> bool:
        """Of what the last launch wrote; waits for it."""
        synchronize()
        right = torch.equal(self.written, self.wanted)
        self.written.zero_()
        synchronize()
        return right


def noise(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(shape, dtype=BF16, device=DEVICE, generator=draw) for shape in shapes]


def kernels() -> list[Kernel]:
    """One bound by memory bandwidth, and a matrix product."""
    values, side = torch.arange(pick(256 << 20, 1 << 20), dtype=torch.int32, device=DEVICE), pick(8192, 256)
    (a, b), copied = noise((side, side), (side, side)), torch.zeros_like(values)
    product = torch.mm(a, b)
    multiply = partial(torch.mm, a, b, out=product)
    synchronize()  # they run in other streams
    return [
        Kernel(f"copy of {values.nbytes >> 20} MiB", partial(copied.copy_, values), copied, values),
        Kernel(f"bf16 product {side}^3", multiply, product, product.clone()),
    ]


def waited(stream: Any, load: Work, call: Call) -> tuple[float, bool | None]:
    """Microseconds of a call beside a load, and whether it returned after the load's end; None if the load
    was over before."""
    load()
    end = mark(stream)
    time.sleep(0.002)  # for the kernel to be running, and not only launched
    over_before = end.query()
    taken = clocked(call)
    over = None if over_before else end.query()
    synchronize()
    return taken, over


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
                found = []
                for _ in rounds(15, 2, seconds=1):
                    found.append(waited(stream, load, call))
                    restore()
                times, waits = zip(*found, strict=True)
                figure(f"{name}, beside {load_name}", times)
                fact(f"{name} returned after the end of {load_name}", verdict(waits))


def verdict(found: Iterable[bool | None]) -> str:
    of = [waits for waits in found if waits is not None]
    return f"{sum(of)} of {len(of)}: {'it WAITS' if 2 * sum(of) > len(of) or not of else 'it does not wait'}"


# --- 10. May the GPU itself wait for a mapping? A stream waits for a flag, and a kernel behind it touches a
# page that is mapped only then. What a worker might do meanwhile is tried, each in a process of its own. A
# call that waits for the stream could never return: a watchdog sets the flag, and only a call that it
# rescued counts as a deadlock.

WATCHDOG_SECONDS = 2.0
RESCUED = "DEADLOCK, until the watchdog set the flag"
CALLS_WHILE_WAITING = ("map and set-access", "create", "release, and the memory goes", "unmap, handle kept")


def stream_wait() -> None:
    for name in CALLS_WHILE_WAITING:
        *findings, end = apart(partial(while_waiting, name), seconds=12)
        facts = {found["name"]: found["value"] for found in findings if found["kind"] == "fact"}
        text = f"no deadlock, {facts.get('wrong elements')} wrong elements"
        if end["text"] != "exited with 0":
            text = f"not tried to its end: {end['text']}"
        fact(f"{name}, while a stream waits for the flag", RESCUED if RESCUED in facts else text)


def while_waiting(name: str) -> None:
    stream, numbers = new_stream(), torch.zeros(16, dtype=torch.int32, device=DEVICE)
    flag = torch.ones(1, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")  # one address for host and GPU
    launch(stream, lambda: numbers.fill_(1))  # a kernel first loaded while a stream waits might wait for it
    hold(stream, flag)
    synchronize()
    wrong = 0

    def watch(returned: threading.Event) -> None:
        if not returned.wait(WATCHDOG_SECONDS):
            fact(RESCUED, True)  # first: what follows may end the process
            flag.fill_(1)

    for done in rounds(30, 3, seconds=4):
        with Pages(8, 4).put_all() as pages:
            call, restore = calls_on(pages)[name]
            over, returned = pages.tensor(torch.int32, 6), threading.Event()
            flag.zero_()
            hold(stream, flag)
            launch(stream, partial(over.fill_, done + 1))
            threading.Thread(target=watch, args=(returned,), daemon=True).start()
            must(call())
            pages.put(6, 0)
            returned.set()
            flag.fill_(1)
            synchronize()
            wrong += int((over != done + 1).sum())
            restore()
    fact("wrong elements", wrong)


# --- 2. Mapping fresh addresses beside running kernels: right results, and the cost to kernel and call.
# Each round runs the same launches three times: alone, alone again (the control), and with the host mapping
# pages all the while, never at an address that was mapped before.


def map_pages(taken: dict[str, list[float]], until: Any, most: int) -> Counter[str]:
    """Maps fresh pages one by one until the event has passed or `most` are mapped, and writes through each.
    How many it mapped, and how many of them show another's contents."""
    count = 0
    with Pages(most, most) as pages:
        while count < most and not until.query():
            taken["map"].append(clocked(pages.map, count, count))
            taken["set-access"].append(clocked(pages.set_access, count))
            count += 1
        until.synchronize()  # the check below must not slow it down
        return Counter(pages=count, wrong_pages=wrong_pages(pages, count))


def wrong_pages(pages: Pages, count: int) -> int:
    """Writes a number of its own to each page, and counts those that show another."""
    if count == 0:
        return 0
    seen, slot = pages.tensor(torch.int64, 0, count), torch.arange(count, device=DEVICE)
    seen.copy_(slot.unsqueeze(1).expand_as(seen))
    synchronize()
    return int((seen != slot.unsqueeze(1)).any(dim=1).sum())


def beside_kernels() -> None:
    for kernel in kernels():
        beside(kernel)


def beside(kernel: Kernel) -> None:
    stream, taken, counted = new_stream(), defaultdict[str, list[float]](list), Counter[str]()

    def run(with_mapping: bool) -> float:
        """Milliseconds of a launch: the median of many in a row."""
        marks = [mark(stream)]
        for _ in range(pick(40, 3)):
            launch(stream, kernel.launch)
            marks.append(mark(stream))
        if with_mapping:
            counted.update(map_pages(taken, marks[-1], pick(1024, 10)))
        marks[-1].synchronize()
        counted["wrong results"] += not kernel.is_right()
        return median(a.elapsed_time(b) for a, b in pairwise(marks))

    samples = {name: partial(run, name == "mapping") for name in ("alone", "again", "mapping")}
    medians = interleave(samples, rounds(12, 2, seconds=10))
    method = "CUDA events, median of each run; with mapping / alone, same round; control: alone / alone"
    ratios(f"{kernel.name} beside {{}}", medians, "alone", "again", method)
    figure(f"{kernel.name}, alone", medians["alone"], "ms", "CUDA events, median of each run")
    figures(f"{{}}, beside {kernel.name}", taken)
    fact(f"runs of {kernel.name} beside mapping with a wrong result", counted["wrong results"])
    wrong = f"{counted['wrong_pages']} of {counted['pages']}"
    fact(f"pages mapped beside {kernel.name} with wrong contents", wrong)


# --- 12. The type of handle is chosen when memory is made


def handle_types() -> None:
    handles: list[int] = []

    def creations(kind: int) -> float:
        """Microseconds of one, the mean of some."""
        taken = 0.0
        for _ in range(count := pick(32, 2)):
            taken += clocked(kept, handles, create, PAGE, kind)
            must(cuda.cuMemRelease(handles.pop()))
        return taken / count

    samples = {"again": partial(creations, 0)}
    for name, kind in HANDLE_TYPES.items():
        answer = create(PAGE, kind)
        fact(f"cuMemCreate with {name}", name_of(answer))
        if answer[0] == 0:
            must(cuda.cuMemRelease(answer[1]))
            samples[name] = partial(creations, kind)
    taken = interleave(samples, rounds(60, 3, seconds=8))
    figure("create, none", taken["none"])
    method = "host clock, means of a round; control: none again"
    ratios("create, {} / none", taken, "none", "again", method)


# --- 7. A CUDA graph captured once, and replayed while the tensor grows beneath it. It holds one query's
# attention over the whole reservation, of which the length in a device tensor says how much is there. It
# gathers rows below that length only, so that what is not mapped is not read.


def attend_to(q: torch.Tensor, kv: torch.Tensor, length: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[HEADS, DIM] of q over the first `length` rows of kv [capacity, 2, HEADS, DIM]; float32."""
    positions = torch.arange(len(kv), device=DEVICE)
    k, v = kv.index_select(0, torch.minimum(positions, length - 1)).float().unbind(1)
    scores = (k * q).sum(-1) / DIM**0.5
    scores = scores.masked_fill((positions >= length).unsqueeze(1), float("-inf"))
    return out.copy_((scores.softmax(0).unsqueeze(-1) * v).sum(0))


def graphs() -> None:
    import vtensor

    capacity, step = pick(24, 4) * PER_PAGE, pick(97, 500)
    shape = (capacity, 2, HEADS, DIM)
    source, q = noise(shape, (HEADS, DIM))
    q, length = q.float(), torch.full((1,), 10, device=DEVICE)
    result, expected = torch.empty_like(q), torch.empty_like(q)
    own = pool(2 * source.nbytes + 8 * PAGE)
    t = growable(own, capacity, 0, *shape[1:], grow_dim=0).append(source[:10])
    full = tensor_at(t.address, shape, BF16)  # only what the graph gathers from it is mapped
    with vtensor.lease(t):
        attend_to(q, full, length, result)  # once, so that its kernels are loaded
        synchronize()
        replay = captured(lambda: attend_to(q, full, length, result))
    appends, replays = [], []
    wrong = crossings = 0
    while t.length + step <= capacity and time.time() < deadline - 4:
        before, new = t.nbytes_mapped, source[t.length : t.length + step]
        appends.append(1e6 * clock(partial(t.append, new)))
        crossings += t.nbytes_mapped > before
        length.fill_(t.length)
        result.zero_()
        synchronize()
        replays.append(1e6 * clock(replay, synchronize))
        wrong += not torch.allclose(result, attend_to(q, source, length, expected), rtol=1e-4, atol=1e-5)
    figure(f"append of {step} positions between replays, no look-ahead", appends)
    figure("replay over the growing tensor", replays, method="host clock, to the end of the replay")
    fact("replays", len(replays))
    fact("pages mapped between replays, times", crossings)
    fact("replays with a wrong result, to 1e-4 of the same kernels over a plain tensor", wrong)
    answers: list[str] = []
    ended = error_of(lambda: captured(lambda: answers.extend(page_s_life()))(), synchronize)
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


def torch_copies() -> None:
    at_once({case: partial(torch_copy, operation) for case, operation in OPERATIONS.items()})


def torch_copy(operation: Callable[[torch.Tensor], object]) -> None:
    t = growable(pool(64 * PAGE), 16384, 4, 300, HEADS, DIM).fill_(1)
    synchronize()
    view = t.alias()
    fact("bytes of the storage", view.untyped_storage().nbytes())
    fact("bytes mapped", t.nbytes_mapped)
    fact("begun", True)
    fact("error", error_of(lambda: operation(view), synchronize))
    fact("error of growing the tensor afterwards", error_of(lambda: t.extend(2000), synchronize))


# --- 4. The same attention kernel over a VTensor and over plain memory of the same layout. Where memory
# lies decides some percent of such a time: every trial allocates anew, in an order that changes, and the
# control is a second plain allocation.

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]  # [B, S, H, D], causal


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


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
    "torch SDPA, FlashAttention": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)(sdpa),
    "torch SDPA, cuDNN": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(sdpa),
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
                    skip(f"{name}, {shape_name}", OUT_OF_TIME)
                else:
                    compare(f"{name}, {shape_name}", attend, *shapes[shape_name])
        except Exception as error:
            skip(name, first_line(error))


def compare(what: str, attend: Attention, batch: int, length: int, queries: int) -> None:
    size = (batch, length, HEADS, DIM)
    q, *values = noise((batch, queries, QUERY_HEADS, DIM), size, size)
    page_sizes = {f"VTensor of {mib} MiB pages": mib * MIB for mib in pick((2, 32), (2, 4))}
    names = ["plain", "control", *page_sizes]
    differing, medians = 0, defaultdict[str, list[float]](list)
    for trial in rounds(4, 2, seconds=5):
        with contextlib.ExitStack() as pools:
            pairs = {}
            for name in random.Random(trial).sample(names, len(names)):
                if page := page_sizes.get(name):
                    own = pools.enter_context(pool(2 * values[0].nbytes + 8 * page, page_size=page))
                    pairs[name] = [growable(own, length, *size).copy_(x) for x in values]
                else:
                    pairs[name] = [x.clone() for x in values]
            works = {name: partial(attend, q, *pair, queries > 1) for name, pair in pairs.items()}
            expected = works["plain"]()
            differing += sum(int((work() != expected).sum()) for work in works.values())
            samples = {name: partial(event_time, work) for name, work in works.items()}
            for name, times in interleave(samples, pick(15, 2)).items():
                medians[name].append(median(times))
            synchronize()
    figure(f"{what}, plain", medians["plain"], "ms", "CUDA events, median of each trial")
    method = "CUDA events around 10 launches, interleaved; medians of trials with fresh allocations / plain"
    ratios(f"{what}, {{}}", medians, "plain", "control", method)
    fact(f"{what}: elements that differ", differing)


# --- 5. Layers that share a page: the kernel's time over group sizes. A group of G layers lies interleaved
# in one VTensor [batch, positions, G, heads, dim]; a layer is a strided view of it, so that a page holds 1
# / G as many positions of each. The baseline is a group of one, the control another of one.


def layer_groups() -> None:
    batch, length = pick((8, 8192), (1, 1024))
    sizes = {"control": 1, **{f"group of {size}": size for size in pick((1, 2, 4, 8, 16, 32), (1, 2))}}
    own = pool(2 * batch * length * HEADS * DIM * 2 * sum(sizes.values()) + 64 * PAGE)
    made = {
        name: [growable(own, length, batch, length, sizes[name], HEADS, DIM).normal_() for _ in "kv"]
        for name in random.Random(0).sample(list(sizes), len(sizes))
    }
    (q,) = noise((batch, 1, QUERY_HEADS, DIM))
    launched = Counter[str]()

    def attend(name: str) -> None:
        layer = launched[name] % sizes[name]  # another each time, as a model goes through its layers
        launched[name] += 1
        sdpa(q, *(x[:, :, layer] for x in made[name]))

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        samples = {name: partial(event_time, partial(attend, name)) for name in sizes}
        taken = interleave(samples, pick(60, 2), warmup=pick(3, 1))
    synchronize()
    method = f"torch SDPA, FlashAttention; batch {batch}, {length} keys, 1 query; CUDA events, interleaved"
    figure("attention of one layer, group of 1", taken["group of 1"], "ms", method)
    ratios("{}", taken, "group of 1", "control", method)


# --- 6. A decode loop. Each step appends a position to K and V of every layer and attends over all of them;
# its time goes to the end of the device's work, as a loop that samples a token waits for it. Growth from 1k
# to 32k is sampled, in windows of steps around lengths at which a page ends.

LAYERS = 4  # of Llama's 32, so that batch 64 at 32k fits beside torch.cat's copies
AHEAD = {"VTensor, synchronous": 0, "VTensor with the worker": 1 << 30}  # bytes of look-ahead
WAYS = ("torch.cat", "preallocated", *AHEAD)


def append(name: str, kv: list[Any], new: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    """K and V of a layer, with a new position of both, which is number `at`."""
    pairs = list(zip(kv, new, strict=True))
    if name in AHEAD:
        return [t.append(x) for t, x in pairs]
    if name == "torch.cat":
        kv[:] = [torch.cat(pair, dim=1) for pair in pairs]
        return kv
    for buffer, x in pairs:
        buffer[:, at : at + 1].copy_(x)
    return [buffer[:, : at + 1] for buffer in kv]


def decode() -> None:
    fact("layers", f"{pick(LAYERS, 1)} of 32; tokens/s are those of these layers' attention")
    lengths, batches = pick((1024, 8192, 32768), (1024,)), pick((1, 4, 16, 64), (1,))
    # The largest last: it takes a third of the time.
    windows = sorted(((batch, length) for batch in batches for length in lengths), key=math.prod)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for batch, length in windows:
            window(batch, length)


def window(batch: int, length: int) -> None:
    """Each way to grow, around `length`, where a page ends, at this batch size."""
    needed = 2 * pick(LAYERS, 1) * batch * (length + pick(128, 6) // 2) * HEADS * DIM * 2
    what = f"batch {batch}, {length:,} positions"
    if time.time() > deadline - 6 - needed / 6e8:  # filling and mapping take most of it
        return skip(what, OUT_OF_TIME)
    outputs: dict[str, torch.Tensor] = {}
    for name in random.Random(length + batch).sample(WAYS, len(WAYS)):
        try:
            outputs[name] = grow(name, batch, length, what, needed)
        except Exception as error:
            skip(f"{name}, {what}", first_line(error))
    wrong = [n for n, x in outputs.items() if not torch.allclose(x, outputs[next(iter(outputs))], 2e-2, 2e-2)]
    fact(f"results that differ, {what}", wrong or "none")


def grow(name: str, batch: int, length: int, what: str, needed: int) -> torch.Tensor:
    """The output of the last step."""
    import vtensor

    steps, layers = pick(128, 6), range(pick(LAYERS, 1))
    first, most = length - steps // 2, (length // PER_PAGE + 2) * PER_PAGE
    row, one = (1, first, HEADS, DIM), (batch, 1, HEADS, DIM)
    k, v, *new, q = noise(row, row, one, one, (batch, 1, QUERY_HEADS, DIM))
    filled = [x.expand(batch, -1, -1, -1) for x in (k, v)]
    peak, free = torch_memory(forget=True)
    with contextlib.ExitStack() as pools:
        own = None
        if name in AHEAD:
            own = pools.enter_context(pool(int(free * 0.85) // PAGE * PAGE, prefetch=AHEAD[name]))
            kvs = [[growable(own, most, batch, 0, HEADS, DIM).append(x) for x in filled] for _ in layers]
        elif name == "torch.cat":
            kvs = [[x.contiguous() for x in filled] for _ in layers]
        else:
            kvs = [[pad(x, (0, 0, 0, 0, 0, most - first)) for x in filled] for _ in layers]
        output = q

        def step(at: int) -> None:
            nonlocal output
            with vtensor.lease([t for kv in kvs for t in kv]) if own else contextlib.nullcontext():
                for kv in kvs:
                    output = sdpa(q, *append(name, kv, new, first + at))

        times = [1e3 * clock(partial(step, at), synchronize) for at in range(steps)]
        used = own.stats().pages_used * PAGE if own else torch_memory()[0] - peak
        figure(f"step of {name}, {what}", times, "ms", "host clock, to the end of the device's work")
        figure(f"step that begins a page, {name}, {what}", times[steps // 2 : steps // 2 + 1], "ms")
        fact(f"memory of {name}, {what}, times what the positions need", round(used / needed, 3))
        return output


# --- 13. Another process, which waits in a pipe, reads what is on the device


def readers() -> None:
    from .sharing import Holder, checksum

    count = pick(1 << 29, 4 << 20)
    with pool(4 * count + 64 * PAGE, shareable=True) as own:
        fact("how pages go to another process", own.stats().sharing)
        t = growable(own, count + 64 * PAGE, count, grow_dim=0).normal_()
        holder = Holder(multiprocessing.get_context("spawn"), LIBRARY)

        def hand_over() -> float:
            taken = holder.give(t)
            holder.tell("drop")
            return 1e3 * taken

        hand_over()  # for the first, that process makes a context
        taken = [hand_over() for _ in rounds(20, 2, seconds=5)]
        what = f"handing {t.nbytes >> 20:,} MiB to a waiting process"
        figure(what, taken, "ms", "host clock, to its arrival there")
        holder.give(t)
        figure("sync, nothing new", [1e6 * holder.tell("sync") for _ in rounds(1000, 3, seconds=3)])
        taken = []
        for _ in rounds(50, 3, seconds=5):
            t.extend(PAGE // t.itemsize)
            taken.append(1e6 * holder.tell("sync"))
        figure("sync, one new page", taken)
        t.normal_()
        synchronize()
        fact("a copy read there is equal", holder.tell("checksum") == checksum(t))
        holder.end()


# --- The program: it asks one question after the other


class Question(NamedTuple):
    ask: Work
    seconds: int  # the most it may take; most take less
    text: str
    while_building: bool = False  # it needs no vtensor and measures nothing, so a compiler may run beside it


# What is known soonest first, what takes longest last.
QUESTIONS = {
    0: Question(record, 40, "What does the driver answer to VMM calls, wrong ones too?", True),
    8: Question(faults, 45, "A write through a read-only alias, a read past the end?", True),
    11: Question(pointers, 25, "Which addresses may a Triton kernel be given?", True),
    3: Question(waiting, 25, "Which driver calls wait for running kernels?"),
    1: Question(calls, 40, "What does every VMM call cost; what do merging and kept handles save?"),
    10: Question(stream_wait, 55, "May the GPU itself wait for a mapping (cuStreamWaitValue32)?"),
    2: Question(beside_kernels, 35, "Fresh mapping beside kernels: is it right, what does it cost?"),
    12: Question(handle_types, 15, "What does cuMemCreate cost with a shareable handle type?"),
    7: Question(graphs, 25, "Does a captured CUDA graph go on while the tensor grows beneath it?"),
    13: Question(readers, 40, "Another process reads a growing tensor: what do handing over and sync cost?"),
    9: Question(torch_copies, 35, "Deepcopy and save of a view whose storage has holes?"),
    4: Question(attention, 90, "Attention over a VTensor against the same over plain memory?"),
    6: Question(decode, 180, "Decoding: torch.cat, preallocated, VTensor, VTensor with the worker?"),
    5: Question(layer_groups, 30, "What does sharing a page between layers cost the kernel?"),
}
RESULTS = Path(__file__).parent / "results"
LEAST_SECONDS = 8  # to start CUDA and find anything


def describe() -> None:
    """Finds the machine, if it has a GPU."""
    if torch.cuda.is_available():
        find("run", date=today(), quick=quick, **machine.describe("cuda"))


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
    return [number for number in QUESTIONS if number in numbers]


def asked(number: int) -> Iterator[Finding]:
    """What is found; at last an error, unless the question was asked to its end."""
    question = QUESTIONS[number]
    seconds = bounded(question.seconds)
    print(f"\n{number}. {question.text} (at most {seconds:.0f} s)", flush=True)
    if seconds < LEAST_SECONDS:
        yield {"kind": "error", "text": OUT_OF_TIME}
        return
    for found in apart(question.ask, question.seconds):
        if found["kind"] != "end":
            yield found
        elif found["text"] != "exited with 0":
            yield {"kind": "error", "text": f"the process {found['text']}"}


def main(arguments: list[str] | None = None) -> int:
    """1 where a question failed or was not reached; no figure is judged."""
    global deadline
    begun = time.time()
    numbers = ", ".join(f"{number} {question.ask.__name__}" for number, question in sorted(QUESTIONS.items()))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, epilog=numbers)
    only = "numbers of questions; or `first`, those that can be asked while vtensor is built, or `rest`"
    parser.add_argument("--only", type=chosen, default=list(QUESTIONS), metavar="N,N", help=only)
    parser.add_argument("--minutes", type=float, default=8, help="all of it ends within these (default 8)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    head, *_ = apart(describe, seconds=60)
    if head["kind"] != "run":
        parser.error("torch finds no GPU here")
    deadline = begun + options.minutes * 60 - 4
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # through the `finally`s
    options.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", head["gpu"].lower()).strip("-")
    path, failed, unanswered = options.out / f"{name}-{today()}.jsonl", False, []
    with path.open("a", buffering=1) as file:
        file.write(json.dumps(head) + "\n")
        for number in options.only:
            lacks = False
            for found in asked(number):
                file.write(json.dumps({"question": number, **found}) + "\n")
                if line := line_of(found):
                    print(f"    {line}", flush=True)
                failed |= found["kind"] == "error"
                lacks |= found["kind"] == "error" or found.get("reason") == OUT_OF_TIME
            unanswered += [str(number)] if lacks else []
    print(f"\n{time.time() - begun:.0f} s; written: {path}")
    if unanswered:
        print(f"Not answered in full; in a second call: scripts/gpu.sh --only {','.join(unanswered)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

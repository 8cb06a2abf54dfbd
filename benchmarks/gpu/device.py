"""Streams, events and graphs: of the GPU, or their stand-ins for a rehearsal without one.

A stand-in stream is a thread that does what is launched into it in order, so that a rehearsal overlaps the
work as the real thing does. It is a test double: its times are no GPU's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .driver import Driver

Work = Callable[[], object]


class CudaDevice:
    """The first GPU, through torch."""

    rehearsal = False
    torch_device = torch.device("cuda", 0)

    def __init__(self) -> None:
        torch.cuda.init()
        torch.zeros(1, device=self.torch_device)  # the primary context is current in this thread from here on
        self._cycles_a_second = 0.0

    def open_driver(self) -> Driver:
        return Driver()

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def launch(self, stream: Any, work: Work) -> None:
        with torch.cuda.stream(stream):
            work()

    def mark(self, stream: Any) -> Any:
        """An event behind what was launched: ``query()``, ``synchronize()``, ``a.elapsed_time(b)`` in ms."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def spin(self, stream: Any, seconds: float) -> None:
        """Keeps the stream busy with a kernel that touches no memory."""
        if not self._cycles_a_second:
            self._cycles_a_second = self._measured_cycles_a_second()
        cycles = int(seconds * self._cycles_a_second)
        self.launch(stream, lambda: torch.cuda._sleep(cycles))

    def _measured_cycles_a_second(self) -> float:
        """Measured until it stays the same: an idle GPU runs slowly, and its clock takes time to rise."""
        stream, cycles = self.stream(), 50_000_000
        rates = [0.0]
        while len(rates) < 20 and (len(rates) < 4 or abs(rates[-1] / rates[-2] - 1) > 0.02):
            start = self.mark(stream)
            self.launch(stream, lambda: torch.cuda._sleep(cycles))
            end = self.mark(stream)
            end.synchronize()
            rates.append(cycles / (start.elapsed_time(end) / 1e3))
        return rates[-1]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def flag(self) -> torch.Tensor:
        """A 32-bit zero in pinned host memory, at the same address for host and GPU."""
        return torch.zeros(1, dtype=torch.int32).pin_memory()

    def hold(self, driver: Driver, stream: Any, flag: torch.Tensor) -> int:
        """Has the stream wait until the flag is 1 or more; the driver's answer."""
        return driver.wait_for_flag(stream.cuda_stream, flag.data_ptr())

    def capture(self, work: Work) -> Work:
        """Captures `work` in a CUDA graph; what replays it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def allocated(self) -> int:
        """Bytes that torch's allocator has given out."""
        return torch.cuda.memory_allocated()

    def peak_allocated(self) -> int:
        """The most that it had given out since the last call."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def forget(self) -> None:
        """Has torch give its cache back to the device."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class _StandInEvent:
    def __init__(self) -> None:
        self._passed = threading.Event()
        self._at = 0.0

    def happen(self) -> None:
        self._at = time.perf_counter()
        self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        if not self._passed.wait(60):
            raise TimeoutError("[rehearsal] a stand-in stream stood still for 60 s")

    def elapsed_time(self, end: _StandInEvent) -> float:
        return (end._at - self._at) * 1e3


class _StandInStream:
    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            self._work.get()()

    def put(self, work: Work) -> None:
        self._work.put(work)


class StandIn:
    """CPU tensors, threads for streams, and the simulated libcuda in the place of the real one."""

    rehearsal = True
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        torch.set_num_threads(1)  # what is tested is not how fast it runs, and others may need the cores
        self._streams: list[_StandInStream] = []

    def open_driver(self) -> Driver:
        driver = Driver()
        driver.must(driver.retain_context())
        return driver

    def stream(self) -> Any:
        self._streams.append(_StandInStream())
        return self._streams[-1]

    def launch(self, stream: Any, work: Work) -> None:
        stream.put(work)

    def mark(self, stream: Any) -> Any:
        event = _StandInEvent()
        stream.put(event.happen)
        return event

    def spin(self, stream: Any, seconds: float) -> None:
        stream.put(lambda: time.sleep(seconds))

    def synchronize(self) -> None:
        for stream in self._streams:
            self.mark(stream).synchronize()

    def flag(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def hold(self, driver: Driver, stream: Any, flag: torch.Tensor) -> int:
        def wait() -> None:
            while int(flag[0]) < 1:
                time.sleep(1e-4)

        stream.put(wait)
        return 0

    def capture(self, work: Work) -> Work:
        return work

    def allocated(self) -> int:
        return 0

    def peak_allocated(self) -> int:
        return 0

    def forget(self) -> None:
        pass


Device = CudaDevice | StandIn

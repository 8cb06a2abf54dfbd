"""The first GPU, through torch: streams, events, graphs, memory. Tests put a stand-in in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cuda

from benchmarks import machine

from .driver import must

Work = Callable[[], object]


class Device:
    name = torch.device("cuda", 0)

    def __init__(self) -> None:
        torch.zeros(1, device=self.name)  # the primary context is current in this thread from here on
        self._cycles_a_second = 0.0

    @staticmethod
    def describe() -> dict[str, Any]:
        """The machine; empty without a GPU."""
        if not torch.cuda.is_available():
            return {}
        properties = torch.cuda.get_device_properties(0)
        driver = Path("/proc/driver/nvidia/version")
        return {
            **machine.describe("cuda"),
            "gpu_memory_gib": round(properties.total_memory / 2**30),
            "gpu_processors": properties.multi_processor_count,
            "gpu_l2_mib": getattr(properties, "L2_cache_size", 0) >> 20,
            "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
        }

    def pool(self, **options: Any) -> Any:
        import vtensor

        return vtensor.Pool("cuda", **options)

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def current_stream(self) -> Any:
        return torch.cuda.current_stream()

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
        self._cycles_a_second = self._cycles_a_second or self._measured_cycles_a_second()
        cycles = int(seconds * self._cycles_a_second)
        self.launch(stream, lambda: torch.cuda._sleep(cycles))

    def _measured_cycles_a_second(self) -> float:
        """Measured until it stays the same: an idle GPU runs slowly, and its clock takes time to rise."""
        stream, cycles, rates = self.stream(), 50_000_000, [0.0]
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

    def hold(self, stream: Any, flag: torch.Tensor) -> None:
        """Has the stream wait until the flag is 1 or more."""
        at_least = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        must(cuda.cuStreamWaitValue32(stream.cuda_stream, flag.data_ptr(), 1, at_least))

    def capture(self, work: Work, warmup: int = 3) -> Work:
        """Captures `work` in a CUDA graph; what replays it."""
        stream = self.stream()
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(warmup):
            self.launch(stream, work)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def forget_peak(self) -> int:
        """Has torch give its cache back; bytes that its allocator has given out, from where the peak
        counts."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

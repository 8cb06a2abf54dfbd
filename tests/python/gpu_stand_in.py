"""``benchmarks.gpu`` without a GPU: the simulated libcuda, CPU tensors, and threads in the place of streams.

A test double: its times are no GPU's. Run as a program it asks the questions; ``LD_LIBRARY_PATH`` has the
simulated libcuda.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.gpu import __main__, session

Work = Callable[[], object]
NAME = "none: the simulated libcuda (test double)"


class Event:
    def __init__(self) -> None:
        self._passed, self._at = threading.Event(), 0.0

    def happen(self) -> None:
        self._at = time.perf_counter()
        self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        if not self._passed.wait(60):
            raise TimeoutError("a stand-in stream stood still for 60 s")

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


class StandIn:
    name = torch.device("cpu")

    def __init__(self) -> None:
        torch.set_num_threads(1)  # what is tested is not how fast it runs, and others may need the cores
        self._streams: list[queue.SimpleQueue[Work]] = []
        self._current = self.stream()

    @staticmethod
    def describe() -> dict[str, Any]:
        return {"gpu": NAME}

    def pool(self, **options: Any) -> Any:
        from vtensor import testing  # not where a question needs no vtensor: it takes a second

        return testing.simulated_cuda_pool(os.environ["VTENSOR_SIMCUDA"], **options)

    def stream(self) -> queue.SimpleQueue[Work]:
        """A thread that does what is put there in order, so that work overlaps as on a GPU."""
        work: queue.SimpleQueue[Work] = queue.SimpleQueue()

        def run() -> None:
            torch.set_num_threads(1)
            while True:
                work.get()()

        threading.Thread(target=run, daemon=True).start()
        self._streams.append(work)
        return work

    def current_stream(self) -> queue.SimpleQueue[Work]:
        return self._current

    def launch(self, stream: queue.SimpleQueue[Work], work: Work) -> None:
        stream.put(lambda: (time.sleep(0.005), work()))

    def mark(self, stream: queue.SimpleQueue[Work]) -> Event:
        event = Event()
        stream.put(event.happen)
        return event

    def spin(self, stream: queue.SimpleQueue[Work], seconds: float) -> None:
        stream.put(lambda: time.sleep(seconds))

    def synchronize(self) -> None:
        for stream in self._streams:
            self.mark(stream).synchronize()

    def flag(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def hold(self, stream: queue.SimpleQueue[Work], flag: torch.Tensor) -> None:
        def wait() -> None:
            while int(flag[0]) < 1:
                time.sleep(1e-4)

        stream.put(wait)

    def capture(self, work: Work, warmup: int = 3) -> Work:
        return work

    def free_memory(self) -> int:
        return 1 << 30

    def peak(self) -> int:
        return 0

    forget_peak = peak


# Also in the processes that it starts, which import this module as their main one.
session.make_device, session.patience = StandIn, 4.0

if __name__ == "__main__":
    sys.exit(__main__.main(["--quick", "--minutes", "20", *sys.argv[1:]]))

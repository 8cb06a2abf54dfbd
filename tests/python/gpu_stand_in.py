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

from benchmarks import gpu

Work = Callable[[], object]


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


class Stream(queue.SimpleQueue):
    """A thread that does what is put there in order, so that work overlaps as on a GPU."""

    made: list[Stream] = []

    def __init__(self) -> None:
        super().__init__()
        Stream.made.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            self.get()()


def launch(stream: Stream, work: Work) -> None:
    stream.put(lambda: (time.sleep(0.005), work()))


def mark(stream: Stream) -> Event:
    event = Event()
    stream.put(event.happen)
    return event


def synchronize() -> None:
    for stream in Stream.made:
        mark(stream).synchronize()


def hold(stream: Stream, flag: torch.Tensor) -> None:
    def wait() -> None:
        while int(flag[0]) < 1:
            time.sleep(1e-4)

    stream.put(wait)


def pool(budget: int, page_size: int = gpu.PAGE, prefetch: int = 0, **options: Any) -> Any:
    from vtensor import testing  # not where a question needs no vtensor: it takes a second

    options |= {"budget": budget, "page_size": page_size, "prefetch": prefetch}
    return testing.simulated_cuda_pool(os.environ["VTENSOR_SIMCUDA"], **options)


STAND_INS: dict[str, Any] = {
    "quick": True,
    "PATIENCE": 4.0,
    "DEVICE": torch.device("cpu"),
    "LIBRARY": os.environ.get("VTENSOR_SIMCUDA", ""),
    "describe": lambda: gpu.find("run", gpu="none: the simulated libcuda (test double)"),
    "new_stream": Stream,
    "launch": launch,
    "mark": mark,
    "synchronize": synchronize,
    "spin": lambda stream, seconds: stream.put(lambda: time.sleep(seconds)),
    "hold": hold,
    "pool": pool,
    "captured": lambda work: work,
    "torch_memory": lambda forget=False: (0, 1 << 30),
}


if __name__ == "__main__":
    torch.set_num_threads(1)  # what is tested is not how fast it runs, and others may need the cores
    vars(gpu).update(STAND_INS)
    sys.exit(gpu.main(["--minutes", "20", *sys.argv[1:]]))

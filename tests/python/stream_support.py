"""For tests of fences: streams of the simulated libcuda that tests hold back, and kernels in them."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator

from support import SIGNATURES, simcuda_control

NEVER = 2**64 - 1
ALL_STREAMS = 2**64 - 1
CAPTURE_RELAXED = 2

_u64 = ctypes.c_uint64


class SimulatedDevice:
    """The device side of a test: its streams, its kernels, and what it noticed of wrong accesses."""

    def __init__(self) -> None:
        library = simcuda_control()
        self._call: dict[str, Callable] = {name: getattr(library, name) for name in SIGNATURES}
        self._illegal_before = self.illegal_accesses()
        self._streams: list[int] = []

    def _done(self, name: str, *arguments) -> None:
        answer = self._call[name](*arguments)
        assert answer == 0, f"{name}{arguments} answered {answer}"

    # -- streams

    def stream(self, held: bool = False, blocking: bool = False, device: int = 0) -> int:
        with self.context(device):
            made = self._call["simcuda_make_stream"](int(blocking))
        self._streams.append(made)
        if held:
            self.hold(made)
        return made

    def foreign_stream(self) -> int:
        """A stream of another context of the device, as those of a green context are."""
        with self._current(self._call["simcuda_make_context"](0)):
            made = self._call["simcuda_make_stream"](0)
        self._streams.append(made)
        return made

    def destroy(self, stream: int) -> None:
        self._streams.remove(stream)
        self._done("simcuda_destroy_stream", stream)

    def hold(self, stream: int = ALL_STREAMS) -> None:
        self._done("simcuda_hold", stream)

    def release(self, stream: int = ALL_STREAMS) -> None:
        self._done("simcuda_release", stream)

    def pending(self, stream: int) -> int:
        """Items that a stream has not executed, once what may be executed was."""
        self._call["simcuda_run"]()
        return self._call["simcuda_pending"](stream)

    def late_events(self, queries: int = 0, milliseconds: float = 0) -> None:
        self._call["simcuda_late_events"](queries, milliseconds)

    def unseen_events(self, queries: int = 0) -> None:
        self._call["simcuda_unseen_events"](queries)

    def free_memory(self) -> int:
        return self._call["simcuda_free_memory"](0)

    def slow(self, call: str, microseconds: float) -> None:
        self._done("simcuda_set_latency", call.encode(), microseconds)

    @contextlib.contextmanager
    def calls_held(self, call: str) -> Iterator[None]:
        """Whoever makes the call meanwhile stays in it."""
        self._done("simcuda_hold_calls", call.encode(), 1)
        try:
            yield
        finally:
            self._done("simcuda_hold_calls", call.encode(), 0)

    def configure(self, setting: str, value: int) -> None:
        self._done("simcuda_configure", setting.encode(), value)

    def fail(self, call: str, skip: int = 0, refuse: int = 1, code: int = 999) -> None:
        self._done("simcuda_fail", call.encode(), skip, refuse, code)

    def calls(self, call: str) -> int:
        return self._call["simcuda_calls"](call.encode())

    # -- kernels

    def occupy(self, stream: int, milliseconds: float) -> None:
        """A kernel runs for so long from now on, which touches no memory that is looked at here."""
        self._done("simcuda_occupy", stream, milliseconds)

    def kernel(self, stream: int, tensor, start: int = 0, stop: int | None = None, writes: int = 0) -> None:
        """Launches a kernel over positions start to stop of each row; it writes that byte, or reads."""
        dim = getattr(tensor, "grow_dim", 0)
        for row in tensor.reshape(-1, *tensor.shape[dim:]) if dim else tensor[None]:
            part = row[start:stop]
            size = part.numel() * part.element_size()
            self._done("simcuda_launch", stream, part.data_ptr(), size, writes)

    def illegal_accesses(self) -> int:
        return self._call["simcuda_illegal_accesses"]() - getattr(self, "_illegal_before", 0)

    # -- graphs

    def begin_capture(self, stream: int) -> None:
        with self.context():
            self._done("cuStreamBeginCapture_v2", stream, CAPTURE_RELAXED)

    def end_capture(self, stream: int) -> int:
        graph = _u64()
        with self.context():
            self._done("cuStreamEndCapture", stream, ctypes.byref(graph))
        return graph.value

    def instantiate(self, graph: int) -> int:
        executable = _u64()
        with self.context():
            self._done("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
        return executable.value

    def replay(self, executable: int, stream: int) -> None:
        with self.context():
            self._done("cuGraphLaunch", executable, stream)

    def destroy_graph(self, graph: int) -> None:
        self._done("cuGraphDestroy", graph)

    def destroy_executable(self, executable: int) -> None:
        self._done("cuGraphExecDestroy", executable)

    @contextlib.contextmanager
    def context(self, device: int = 0) -> Iterator[None]:
        """The primary context of a device is current, as torch has it."""
        primary = _u64()
        self._done("cuDevicePrimaryCtxRetain", ctypes.byref(primary), device)
        try:
            with self._current(primary.value):
                yield
        finally:
            self._done("cuDevicePrimaryCtxRelease_v2", device)

    @contextlib.contextmanager
    def other_context(self) -> Iterator[None]:
        """Another context of the device is current than its primary one, as a green context may be."""
        with self._current(self._call["simcuda_make_context"](0)):
            yield

    @contextlib.contextmanager
    def _current(self, context: int) -> Iterator[None]:
        before = _u64()
        self._done("cuCtxGetCurrent", ctypes.byref(before))
        self._done("cuCtxSetCurrent", context)
        try:
            yield
        finally:
            self._done("cuCtxSetCurrent", before.value)

    def let_go(self) -> None:
        """Lets everything run that was held back, and each call take its usual time."""
        self.slow("*", 0)
        self.late_events()
        self.unseen_events()
        self.release()

    def end(self) -> int:
        """The same; destroys the streams, and starts anew where a test made the device fail. Returns how many
        kernels found their memory gone."""
        self.let_go()
        for stream in list(self._streams):
            self.destroy(stream)
        illegal = self.illegal_accesses()
        if illegal:
            self._call["simcuda_reset"]()
        return illegal


@contextlib.contextmanager
def busy_device(milliseconds: float = 0.3) -> Iterator[None]:
    """cuMemUnmap and cuMemSetAccess wait for the device, in which a kernel runs about half of the time."""
    device = SimulatedDevice()
    stream = device.stream()
    over = threading.Event()

    def launch() -> None:
        while not over.wait(2 * milliseconds / 1000):
            device.occupy(stream, milliseconds)

    launcher = threading.Thread(target=launch, daemon=True)
    device.configure("blocking", 1)
    launcher.start()
    try:
        yield
    finally:
        over.set()
        if not sys.is_finalizing():  # then Python 3.13 waits for ever for a daemon thread
            launcher.join()
        device.configure("blocking", 0)
        device.destroy(stream)

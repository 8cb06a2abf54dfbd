"""Slots of a KV cache copied to host memory and back, row after row, in the order of the layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vtensor import _core
from vtensor.errors import DriverError, OutOfPages

__all__ = ["Group", "HostCopy", "Part", "Swapper"]


class Part(NamedTuple):
    """Neighbouring bytes of one row of a slot."""

    layer: int  # the first that reads them
    on_device: torch.Tensor  # uint8
    on_host: torch.Tensor  # uint8, as many


class HostCopy:
    """What is held of a swapped slot, in host memory: its parts, and how many bytes they are.

    Args:
        rows: the first layer that reads it, and the bytes, of each row.
        pinned: page-locked memory, so that copies run beside kernels.
    """

    def __init__(self, rows: Sequence[tuple[int, torch.Tensor]], pinned: bool) -> None:
        sizes = [row.numel() for _, row in rows]
        try:
            whole = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise OutOfPages(
                f"[KVCache.swap_out] need {sum(sizes):,} bytes of {'page-locked ' * pinned}host memory, "
                f"which cannot be had ({error}): free some, or free the slot and compute it again"
            ) from None
        self.nbytes = whole.numel()
        self.rows = whole.split(sizes) if sizes else ()

    def parts(self, rows: Sequence[tuple[int, torch.Tensor]]) -> list[Part]:
        """To be copied from or to these rows, which may be those of another slot."""
        return [Part(layer, row, here) for (layer, row), here in zip(rows, self.rows, strict=True)]


@dataclass
class Group:
    """Slots that were swapped out together and begin with the same pages.

    Args:
        length: tokens whose pages are the same.
        head: their bytes.
        waiting: the slots that have not come back.
    """

    length: int
    head: HostCopy
    waiting: set[int]
    kept: _core.KeptPrefix | None = None  # their pages, once the first slot has them again


class _Transfer:
    """One slot's copies under way: which layers have arrived."""

    def __init__(self, layers: list[int]) -> None:
        self.layers = layers  # of the parts, ascending
        self.arrived = 0  # parts
        self.changed = threading.Condition()
        self.events: list[Any] = []  # CUDA events, one a part
        self.future: Future[None] | None = None

    def parts_of(self, layer: int) -> int:
        """Parts that have to be there before ``layer`` computes."""
        return sum(first <= layer for first in self.layers)


class Swapper:
    """Copies beside the caller: on a stream of its own on CUDA, in a thread of its own elsewhere."""

    def __init__(self, device: torch.device, populate: Callable[[int, int], None]) -> None:
        self._device = device
        self._populate = populate  # takes an address and bytes
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: dict[int, _Transfer] = {}

    @property
    def pinned(self) -> bool:
        return self._cuda

    @property
    def stream(self) -> Any:
        """The stream of the copies; None where a thread makes them."""
        return self._stream

    def copy_out(self, slot: int, parts: Sequence[Part], done: Callable[[], None]) -> None:
        """Starts copying to the host; ``done()`` is called behind the last, on CUDA at once, where the stream
        keeps the order."""
        self._start(slot, parts, [(part.on_host, part.on_device) for part in parts], done)

    def copy_in(self, slot: int, parts: Sequence[Part]) -> None:
        """Starts copying back, in the order of the layers."""
        parts = sorted(parts, key=lambda part: part.layer)
        pairs = [(part.on_device, part.on_host) for part in parts]
        self._start(slot, parts, pairs, lambda: None, [part.on_device for part in parts])

    def _start(
        self,
        slot: int,
        parts: Sequence[Part],
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        done: Callable[[], None],
        fresh: Sequence[torch.Tensor] = (),
    ) -> None:
        """``fresh`` is memory just mapped."""
        self.wait(slot)
        transfer = self._under_way[slot] = _Transfer([part.layer for part in parts])
        if self._cuda:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for to, source in pairs:
                    to.copy_(source, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(self._stream)
                    transfer.events.append(event)
            done()
            return

        def work() -> None:
            # Its page tables are filled ahead of the copies: faults in their midst take twice their time.
            ahead = threading.Thread(target=self._make_present, args=(fresh,))
            if fresh:
                ahead.start()
            try:
                for to, source in pairs:
                    to.copy_(source)
                    with transfer.changed:
                        transfer.arrived += 1
                        transfer.changed.notify_all()
            finally:
                if fresh:
                    ahead.join()  # also where a copy failed: who waits may close the cache next
            done()

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "vtensor-swap")
        transfer.future = self._thread.submit(work)

    def _make_present(self, fresh: Sequence[torch.Tensor]) -> None:
        with suppress(DriverError):  # then the copies meet it
            for row in fresh:
                self._populate(row.data_ptr(), row.numel())

    def wait(self, slot: int, layer: int | None = None) -> None:
        """Returns once what ``layer`` reads of the slot is there, or all of it; on CUDA, has the current
        stream wait for that instead. Raises what the copying met."""
        transfer = self._under_way.get(slot)
        if transfer is None:
            return
        parts = len(transfer.layers) if layer is None else transfer.parts_of(layer)
        if self._cuda:
            if parts:
                torch.cuda.current_stream(self._device).wait_event(transfer.events[parts - 1])
        else:
            future = transfer.future
            assert future is not None
            with transfer.changed:
                transfer.changed.wait_for(lambda: transfer.arrived >= parts or future.done())
            if layer is None or future.done():
                future.result()
        if layer is None:
            self._under_way.pop(slot, None)

    def wait_any(self, slots: Sequence[int]) -> bool:
        """Waits on the host for the oldest copy of these slots; False where none is under way."""
        for slot in self._under_way:
            if slot in slots:
                if self._cuda:
                    events = self._under_way[slot].events
                    if events:
                        events[-1].synchronize()
                    del self._under_way[slot]
                else:
                    self.wait(slot)
                return True
        return False

    def forget(self, slot: int) -> None:
        """Waits on the host until no copy of the slot is under way."""
        self.wait_any([slot])

    def close(self) -> None:
        """Waits for all copies."""
        while self.wait_any(list(self._under_way)):
            pass
        if self._thread is not None:
            self._thread.shutdown()

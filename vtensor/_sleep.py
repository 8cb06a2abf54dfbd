"""Pool.sleep and Pool.wake: memory that leaves and comes back while everything else about it stays.

The core unmaps pages, and maps others at their addresses later (csrc/policy/sleep.h). In between, the
contents are kept here, in host memory or in a file. The tags, and the three ways to treat contents, are those
of torch_memory_saver and of vLLM's sleep mode.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import torch

from vtensor import _core
from vtensor._progress import Progress
from vtensor._sleep_file import SleepFile
from vtensor._units import byte_text
from vtensor.errors import Closed, InvalidArgument

__all__ = ["Contents", "Image", "Sleeper", "fall_asleep", "forget", "kept_as", "wake"]

Part = _core.SleepPart  # `bytes` at an address, their `offset` among those of a sleep, and its number
Piece = tuple[int, int, int]  # address, offset, bytes
_AT_ONCE = 32 << 20  # bytes of a piece
_STAGED = 4 << 20  # bytes of a piece that is staged, unless a page is larger
_WORKERS = 3  # the kernel lets one write; the others read and check


class Sleeper(Protocol):
    """An object whose memory can leave."""

    def _fall_asleep(self, sleep: _core.SleepCore, discard: bool) -> None: ...

    def _wake(self, number: int) -> None:
        """Ends the sleep of this number."""


class Contents(Protocol):
    """A place that keeps the bytes of a sleep."""

    def keep(self, core: _core.PagePool, parts: list[Part], show: Callable[[str], None]) -> None: ...

    def bring_back(self, core: _core.PagePool, parts: list[Part], show: Callable[[str], None]) -> None: ...

    def drop(self) -> None: ...


class Image:
    """Objects of one tag that sleep and wake together. All images of one sleep share its contents."""

    def __init__(self, number: int, tag: str, sleepers: list[Sleeper], contents: Contents | None) -> None:
        self.number, self.tag, self.contents = number, tag, contents
        self.sleepers = [weakref.ref(sleeper) for sleeper in sleepers]


class HostContents:
    """Contents in host memory, pinned if the pages are on a device."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._bytes: torch.Tensor | None = None

    def keep(self, core: _core.PagePool, parts: list[Part], show: Callable[[str], None]) -> None:
        total = _total(parts)
        self._bytes = torch.empty(total, dtype=torch.uint8, pin_memory=self._pinned)
        for address, offset, nbytes in pieces(parts, _AT_ONCE):
            _core.read_pages(core, address, self._bytes.data_ptr() + offset, nbytes)
            show(f"Pool.sleep: {byte_text(offset)} of {byte_text(total)} kept in host memory")

    def bring_back(self, core: _core.PagePool, parts: list[Part], show: Callable[[str], None]) -> None:
        if (kept := self._bytes) is None:
            raise Closed("[Pool.wake] the pool was closed during the sleep, and its contents are gone")
        total = kept.numel()
        for address, offset, nbytes in pieces(parts, _AT_ONCE):
            _core.write_pages(core, address, kept.data_ptr() + offset, nbytes)
            show(f"Pool.wake: {byte_text(offset)} of {byte_text(total)} from host memory")

    def drop(self) -> None:
        self._bytes = None


class FileContents:
    """Contents in a file, which is written whole or not at all, and checked when it is read."""

    def __init__(self, path: Path, page_size: int, direct: bool) -> None:
        self._file = SleepFile(path, page_size)
        self._at_once = max(_STAGED, page_size)  # whole pages: each has a checksum
        self._direct = direct  # the pages are host memory: the file is written from them

    def keep(self, core: _core.PagePool, parts: list[Part], show: Callable[[str], None]) -> None:
        def keep_one(address: int, offset: int, nbytes: int, staging: int) -> None:
            if not self._direct:
                _core.read_pages(core, address, staging, nbytes)
            self._file.write(address if self._direct else staging, offset, nbytes)

        with self._file.writing(_total(parts)):
            self._each("Pool.sleep", keep_one, parts, show)

    def bring_back(self, core: _core.PagePool, parts: list[Part], show: Callable[[str], None]) -> None:
        def bring_one_back(address: int, offset: int, nbytes: int, staging: int) -> None:
            self._file.read(staging, offset, nbytes)
            _core.write_pages(core, address, staging, nbytes)

        with self._file.reading():
            self._each("Pool.wake", bring_one_back, parts, show)

    def drop(self) -> None:
        self._file.remove()

    def _each(
        self,
        operation: str,
        work: Callable[[int, int, int, int], None],
        parts: list[Part],
        show: Callable[[str], None],
    ) -> None:
        """Calls ``work`` for all pieces, on several threads, because a checksum takes as long as a copy. Each
        call has a buffer of a piece's size."""
        total = byte_text(_total(parts))
        free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(_WORKERS):
            free.put(torch.empty(self._at_once, dtype=torch.uint8))

        def work_on(piece: Piece) -> int:
            staging = free.get()
            try:
                work(*piece, staging.data_ptr())
            finally:
                free.put(staging)
            return piece[2]

        def shown(done: int) -> None:
            show(f"{operation}: {byte_text(done)} of {total}")

        with ThreadPoolExecutor(_WORKERS) as workers:
            deque(map(shown, accumulate(workers.map(work_on, pieces(parts, self._at_once)))), maxlen=0)


def _total(parts: list[Part]) -> int:
    return sum(part.bytes for part in parts)


def pieces(parts: list[Part], at_once: int) -> Iterator[Piece]:
    """Cuts parts into pieces; the clock is read after each."""
    for part in parts:
        for begin in range(0, part.bytes, at_once):
            yield part.at + begin, part.offset + begin, min(at_once, part.bytes - begin)


def kept_as(
    contents: str | os.PathLike[str], page_size: int, *, on_host: bool, pinned: bool
) -> Contents | None:
    """The place for contents, by the argument of Pool.sleep; None to discard them."""
    if not isinstance(contents, (str, os.PathLike)):
        raise InvalidArgument(f"[Pool.sleep] contents is {contents!r}: give 'discard', 'host' or a path")
    if contents == "discard":
        return None
    if contents == "host":
        return HostContents(pinned)
    return FileContents(Path(contents), page_size, on_host)


def fall_asleep(
    core: _core.PagePool, by_tag: dict[str, list[Sleeper]], contents: Contents | None, images: list[Image]
) -> int:
    """Takes the memory of sleepers, and adds an image of each tag to ``images``. Returns pages given back."""
    sleep = _core.SleepCore(core)
    asleep: list[Image] = []
    try:
        for tag, sleepers in by_tag.items():
            asleep.append(Image(sleep.next_number(), tag, sleepers, contents))
            for sleeper in sleepers:
                sleeper._fall_asleep(sleep, contents is None)
        sleep.begin()
        if contents is not None:
            with Progress() as show:
                contents.keep(core, sleep.parts(), show)
        images.extend(asleep)  # before the pages go, so that no contents are lost
        return sleep.finish()
    except BaseException:
        if not sleep.finished:
            sleep.give_up()
            forget(images, asleep)
            _wake_all(asleep)
        raise


def wake(core: _core.PagePool, images: list[Image], chosen: list[Image], discard: bool) -> None:
    """Gives ``chosen`` their memory back, with its contents unless ``discard``, and removes them from
    ``images``."""
    waking = _core.WakeCore(core, [image.number for image in chosen])
    try:
        if not discard:
            parts: dict[Contents, list[Part]] = {}
            kept_in = {image.number: image.contents for image in chosen}
            for part in waking.parts():
                if (contents := kept_in[part.sleep]) is not None:
                    parts.setdefault(contents, []).append(part)
            with Progress() as show:
                for contents, some in parts.items():
                    contents.bring_back(core, some, show)
        waking.finish()
    except BaseException:
        waking.give_up()  # without effect once waking is finished: the next call does the rest
        raise
    _wake_all(chosen)
    forget(images, chosen)


def _wake_all(images: list[Image]) -> None:
    for image in images:
        for sleeper in image.sleepers:
            if (awake := sleeper()) is not None:
                with contextlib.suppress(Closed):
                    awake._wake(image.number)


def forget(images: list[Image], gone: list[Image]) -> None:
    """Removes images, and contents that no other image needs."""
    left = [image for image in images if image not in gone]
    for contents in {image.contents for image in gone} - {image.contents for image in left}:
        if contents is not None:
            contents.drop()
    images[:] = left  # last: the next call drops what is still listed

"""Pool.sleep and Pool.wake: memory that leaves and comes back while everything else about it stays.

The core unmaps pages, maps others at their addresses later, and copies what they held (csrc/policy/sleep.h,
sleep_copy.h). The tags, and the ways to treat contents, are those of torch_memory_saver and of vLLM's sleep
mode.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import IO, Protocol

from vtensor import _core
from vtensor._progress import Progress
from vtensor._units import byte_text
from vtensor.errors import Closed, InvalidArgument

__all__ = ["Contents", "Image", "Sleeper", "contents_of", "fall_asleep", "forget", "wake"]


class Sleeper(Protocol):
    """An object whose memory can leave."""

    def _fall_asleep(self, sleep: _core.SleepCore, discard: bool) -> None: ...

    def _wake(self, number: int) -> None:
        """Ends the sleep of this number."""


class Image:
    """Objects of one tag that sleep and wake together. All images of one sleep share what keeps its bytes,
    which is gone with the last of them."""

    def __init__(self, number: int, tag: str, sleepers: list[Sleeper]) -> None:
        self.number, self.tag = number, tag
        self.kept: _core.SleepImage | None = None
        self.sleepers = [weakref.ref(sleeper) for sleeper in sleepers]


class Contents:
    """What becomes of the bytes: discarded, kept in host memory, or in a temporary file.

    The file has no name (``O_TMPFILE``, or unlinked at once): nothing else can open, replace or lose it, and
    the system takes it back whatever becomes of the process.
    """

    def __init__(self, *, discard: bool = False, folder: str | None = None) -> None:
        self.discard = discard
        self._folder = folder
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Contents:
        if self._folder is not None:
            with _in_words(f"a file cannot be made in {self._folder}"):
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()  # the image has a descriptor of its own

    def image(self, core: _core.PagePool, nbytes: int) -> _core.SleepImage:
        """A place for so many bytes, all of which are there."""
        if self._file is None:
            return _core.SleepImage.in_memory(core, nbytes)
        with _in_words(f"{nbytes} bytes cannot be had in {self._folder}"):
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        return _core.SleepImage.in_file(self._file.fileno())

    def settle(self) -> None:
        """Has the bytes on the disk: until then an error of the disk is seen by nobody."""
        if self._file is not None:
            with _in_words(f"the disk of {self._folder} does not take the bytes"):
                os.fdatasync(self._file.fileno())


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Refusals of the operating system, with what was refused."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"[Pool.sleep] {what} ({error.strerror}): nothing fell asleep; free space, or name another folder",
        ) from error


def contents_of(contents: object) -> Contents:
    """What the argument of :meth:`Pool.sleep` says."""
    choices = "give 'discard', 'host', or a folder that exists"
    if not isinstance(contents, (str, os.PathLike)):
        raise InvalidArgument(f"[Pool.sleep] contents is {contents!r}: {choices}")
    if contents == "discard":
        return Contents(discard=True)
    if contents == "host":
        return Contents()
    folder = os.fsdecode(contents)
    try:
        there = os.path.isdir(folder)
    except ValueError:  # a NUL, or what the file system's encoding lacks
        there = False
    if not there:
        raise InvalidArgument(f"[Pool.sleep] contents is {folder!r}, which is no folder: {choices}")
    return Contents(folder=os.path.abspath(folder))


def _copy(copy: _core.SleepCopy, doing: str) -> None:
    with Progress() as show:
        while (done := copy.step()) < copy.nbytes:
            show(f"{doing}: {byte_text(done)} of {byte_text(copy.nbytes)}")


def fall_asleep(
    core: _core.PagePool, by_tag: dict[str, list[Sleeper]], contents: Contents, images: list[Image]
) -> int:
    """Takes the memory of sleepers, and adds an image of each tag to ``images``. Returns pages given back."""
    sleep = _core.SleepCore(core)
    asleep: list[Image] = []
    try:
        with contents:
            for tag, sleepers in by_tag.items():
                asleep.append(Image(sleep.next_number(), tag, sleepers))
                for sleeper in sleepers:
                    sleeper._fall_asleep(sleep, contents.discard)
            sleep.begin()
            if sleep.nbytes and not contents.discard:
                kept = contents.image(core, sleep.nbytes)
                _copy(sleep.copy(kept), "Pool.sleep")
                contents.settle()
                for image in asleep:
                    image.kept = kept
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
    kept = {image.number: image.kept for image in chosen if image.kept is not None and not discard}
    try:
        _copy(waking.copy(kept), "Pool.wake")
        waking.finish(list(kept))
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
    """Removes images, and with the last one of a sleep what keeps its bytes."""
    images[:] = [image for image in images if image not in gone]

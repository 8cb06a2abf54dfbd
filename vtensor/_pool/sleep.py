"""Pool.sleep and Pool.wake: memory that leaves and comes back while everything else about it stays.

The core unmaps pages, maps others at their addresses later, and copies what they held (csrc/policy/sleep.h,
sleep_copy.h). The tags, and the ways to treat contents, are those of torch_memory_saver and of vLLM's sleep
mode.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol

from vtensor import _core
from vtensor._base.terminal import Progress
from vtensor._base.units import byte_text
from vtensor.errors import Closed, InvalidArgument


class Sleeper(Protocol):
    """An object whose memory can leave."""

    def _fall_asleep(self, sleep: _core.FallAsleep, discard: bool) -> None: ...

    def _wake(self) -> None:
        """After a sleep has ended, if only because another of its objects could not sleep."""


class Image:
    """Objects of one tag that sleep and wake together. All images of one sleep share what keeps its bytes,
    which is gone with the last of them."""

    def __init__(self, number: int, tag: str, sleepers: list[Sleeper]) -> None:
        self.number, self.tag = number, tag
        self.kept: _core.SleepImage | None = None
        self.sleepers = [weakref.ref(sleeper) for sleeper in sleepers]


def contents_of(contents: object) -> str | bytes:
    """The argument of :meth:`Pool.sleep`: ``"discard"``, ``"host"``, or the bytes of a folder's path."""
    choices = "give 'discard', 'host', or a folder that exists"
    if not isinstance(contents, (str, os.PathLike)):
        raise InvalidArgument(f"[Pool.sleep] contents is {contents!r}: {choices}")
    if contents in ("discard", "host"):
        return str(contents)
    try:
        folder = os.fsencode(contents)
        there = os.path.isdir(folder) and b"\0" not in folder
    except ValueError:  # what the file system's encoding lacks
        there = False
    if not there:
        raise InvalidArgument(
            f"[Pool.sleep] contents is {os.fspath(contents)!r}, which is no folder: {choices}"
        )
    return folder


def _copy(copy: _core.SleepCopy, doing: str) -> None:
    with Progress() as show:
        while (done := copy.step()) < copy.nbytes:
            show(f"{doing}: {byte_text(done)} of {byte_text(copy.nbytes)}")


def fall_asleep(
    core: _core.PagePool, by_tag: dict[str, list[Sleeper]], contents: str | bytes, images: list[Image]
) -> int:
    """Takes the memory of sleepers, and adds an image of each tag to ``images``. Returns pages given back."""
    sleep = _core.FallAsleep(core)
    asleep: list[Image] = []
    try:
        with sleep:
            for tag, sleepers in by_tag.items():
                asleep.append(Image(sleep.next_number(), tag, sleepers))
                for sleeper in sleepers:
                    with contextlib.suppress(Closed):  # by another thread, meanwhile
                        sleeper._fall_asleep(sleep, contents == "discard")
            numbers = sleep.numbers  # without those of tags that slept already
            sleep.begin()
            kept = None
            if sleep.nbytes and contents != "discard":
                if isinstance(contents, bytes):
                    kept = _core.SleepImage.in_folder(contents, sleep.nbytes)
                else:
                    kept = _core.SleepImage.in_memory(core, sleep.nbytes)
                _copy(sleep.copy(kept), "Pool.sleep")
            new = [image for image in asleep if image.number in numbers]
            for image in new:
                image.kept = kept
            images.extend(new)  # before the pages go, so that no contents are lost
            return sleep.finish()
    except BaseException:
        if not sleep.finished:
            forget(images, asleep)
            _wake_all(asleep)
        raise


def wake(core: _core.PagePool, images: list[Image], chosen: list[Image], discard: bool) -> None:
    """Gives ``chosen`` their memory back, with its contents unless ``discard``, and removes them from
    ``images``. Cut off behind ``finish``, it leaves the rest to the next call."""
    kept = {image.number: image.kept for image in chosen if image.kept is not None and not discard}
    with _core.WakeUp(core, [image.number for image in chosen]) as waking:
        _copy(waking.copy(kept), "Pool.wake")
        waking.finish(list(kept))
    _wake_all(chosen)
    forget(images, chosen)


def _wake_all(images: list[Image]) -> None:
    for image in images:
        for sleeper in image.sleepers:
            if (awake := sleeper()) is not None:
                with contextlib.suppress(Closed):
                    awake._wake()


def forget(images: list[Image], gone: list[Image]) -> None:
    """Removes images, and with the last one of a sleep what keeps its bytes."""
    images[:] = [image for image in images if image not in gone]

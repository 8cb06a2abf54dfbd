"""A file that keeps the contents of pages: written whole or not at all, and checked when it is read.

It has 4,096 bytes of header, the bytes, then a CRC-32 of each page. It is written in the same folder under
another name, and renamed once it is on the disk. An interruption (a full disk, ``kill -9``) leaves the file
that was there before.

A disk is slower than memory, so it is kept busy: space is taken before the first byte, writing to the disk
begins with the first bytes, and a thread gives the space of a removed file back.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

from vtensor.errors import VTensorError

__all__ = ["SleepFile"]

_HEADER = 4096
_FORMAT, _VERSION = "vtensor sleep", 1
_libc = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


class SleepFile:
    """A path, and the file that was written there.

    Raises OSError as the file system does, and VTensorError if the file is not the one that was written.
    """

    def __init__(self, path: Path, page_size: int) -> None:
        self.path = path
        self._page_size = page_size
        self._partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        self._header = b""
        self._descriptor = -1
        self._sums = array("I")  # the CRC-32 of each page

    @contextlib.contextmanager
    def writing(self, nbytes: int) -> Iterator[None]:
        """A context in which :meth:`write` writes. The file exists once the context ends without an
        exception."""
        header = {"format": _FORMAT, "version": _VERSION, "nbytes": nbytes, "id": os.urandom(16).hex()}
        self._header = json.dumps(header).encode().ljust(_HEADER)
        self._sums = array("I", bytes(4 * (nbytes // self._page_size)))
        try:
            with open(self._partial, "wb", buffering=0) as file:
                self._descriptor = file.fileno()
                sums = memoryview(self._sums).cast("B")
                os.posix_fallocate(self._descriptor, 0, _HEADER + nbytes + len(sums))
                _write(self._descriptor, memoryview(self._header), 0)
                yield
                _write(self._descriptor, sums, _HEADER + nbytes)
                os.fsync(self._descriptor)
            os.replace(self._partial, self.path)
            _sync_folder(self.path.parent)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                self._partial.unlink()
            if isinstance(error, OSError):
                raise OSError(
                    error.errno,
                    f"[Pool.sleep] {nbytes} bytes cannot be written to {self.path} ({error.strerror}): "
                    "nothing fell asleep; free space, or name another path",
                ) from error
            raise

    def write(self, address: int, offset: int, nbytes: int) -> None:
        """Writes whole pages. Any thread may call it."""
        view = _memory(address, nbytes)
        _write(self._descriptor, view, _HEADER + offset)
        begin, length = ctypes.c_int64(_HEADER + offset), ctypes.c_int64(nbytes)
        _libc.sync_file_range(self._descriptor, begin, length, _SYNC_FILE_RANGE_WRITE)  # a hint
        first = offset // self._page_size
        self._sums[first : first + nbytes // self._page_size] = self._sums_of(view)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which :meth:`read` reads."""
        try:
            file = open(self.path, "rb", buffering=0)
        except OSError as error:
            raise VTensorError(
                f"[Pool.wake] {self.path} cannot be read ({error.strerror}): all stays asleep; put the file "
                "back, or give the contents up with wake(discard=True)"
            ) from error
        with file:
            self._descriptor = file.fileno()
            size = os.fstat(self._descriptor).st_size
            expected = _HEADER + len(self._sums) * (self._page_size + self._sums.itemsize)
            if size != expected or os.pread(self._descriptor, _HEADER, 0) != self._header:
                raise self._changed("it is not the file that was written")
            yield

    def read(self, address: int, offset: int, nbytes: int) -> None:
        """Reads whole pages, and checks them. Any thread may call it."""
        view = _memory(address, nbytes)
        done = 0
        while done < nbytes:
            got = os.preadv(self._descriptor, [view[done:]], _HEADER + offset + done)
            if got == 0:
                raise self._changed("it is shorter than it was")
            done += got
        first = offset // self._page_size
        if self._sums_of(view) != self._sums[first : first + nbytes // self._page_size]:
            raise self._changed(f"some of the {nbytes} bytes from {offset} differ")

    def remove(self) -> None:
        """Removes the file, if it is the one that was written."""
        with contextlib.suppress(OSError):
            with open(self.path, "rb") as file:
                if not self._header or file.read(_HEADER) != self._header:
                    return
                self.path.unlink()
                last = os.fdopen(os.dup(file.fileno()))
            try:  # closing it gives the disk's space back: it takes about as long as writing took
                threading.Thread(target=last.close, name="vtensor-remove").start()
            except RuntimeError:  # no thread can be started
                last.close()

    def _sums_of(self, view: memoryview) -> array[int]:
        size = self._page_size
        return array("I", [zlib.crc32(view[i : i + size]) for i in range(0, len(view), size)])

    def _changed(self, how: str) -> VTensorError:
        return VTensorError(
            f"[Pool.wake] {self.path} has changed since the sleep: {how}; all stays asleep; put the file "
            "back, or give the contents up with wake(discard=True)"
        )


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

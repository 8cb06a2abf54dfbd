"""The limits of the system that affect vtensor, and how to raise them.

Sources: Linux's Documentation/admin-guide/sysctl/vm.rst (max_map_count, overcommit_memory) and cgroup-v2.rst,
getrlimit(2).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_ENOUGH_MAPPINGS = 262_144


@dataclass(frozen=True)
class Limit:
    """One limit of this process."""

    name: str
    value: int | None
    """In ``unit``; None if there is no limit."""
    unit: str
    meaning: str
    """What it limits in vtensor."""
    remedy: str
    """How to raise it; empty if there is nothing to do."""
    low: bool = False
    """Whether vtensor is likely to reach it."""
    used: int | None = None
    """The part of it in use now; None if that is unknown."""


def limits(root: Path = Path("/")) -> list[Limit]:
    """The limits of this process. ``root`` contains ``proc`` and ``sys``."""
    proc = root / "proc"
    mappings = _number(proc / "sys/vm/max_map_count")
    policy = _number(proc / "sys/vm/overcommit_memory") or 0
    memory, memory_used = _cgroup_memory(root)
    addresses = _resource(resource.RLIMIT_AS)
    file_size = _resource(resource.RLIMIT_FSIZE)
    descriptors = _resource(resource.RLIMIT_NOFILE)
    listed = [
        Limit(
            "vm.max_map_count",
            mappings,
            "mappings",
            "each run of host pages that are neighbours in the pool and in the tensor takes a mapping",
            "sudo sysctl -w vm.max_map_count=1048576, or page_size= of larger pages",
            low=mappings is not None and mappings < _ENOUGH_MAPPINGS,
            used=_or_none(lambda: len((proc / "self/maps").read_bytes().splitlines())),
        ),
        Limit(
            "cgroup memory",
            memory,
            "bytes",
            "host pages count against it, and exceeding it ends the process; budget= stays below",
            "raise memory.max of the cgroup, or --memory of the container",
            used=memory_used,
        ),
        Limit(
            "address space (ulimit -v)",
            addresses,
            "bytes",
            "reserved addresses count against it, though they cost no memory",
            "ulimit -v unlimited, or a lower capacity=",
            low=addresses is not None,
        ),
        Limit(
            "vm.overcommit_memory",
            policy,
            "",
            "2 also counts memory that is not used yet: shared pages that tensors may write to",
            "sudo sysctl -w vm.overcommit_memory=0" if policy == 2 else "",
            low=policy == 2,
        ),
        Limit(
            "descriptors (ulimit -n)",
            descriptors,
            "descriptors",
            "a host pool keeps one open",
            "ulimit -n 65536",
            low=descriptors is not None and descriptors < 256,
            used=_or_none(lambda: len(os.listdir(proc / "self/fd"))),
        ),
        Limit(
            "file size (ulimit -f)",
            file_size,
            "bytes",
            "the pages of a host pool are in a file in memory, which may not grow past it",
            "ulimit -f unlimited",
            low=file_size is not None,
        ),
        Limit(
            "locked memory (ulimit -l)",
            _resource(resource.RLIMIT_MEMLOCK),
            "bytes",
            "vtensor locks none; registering its pages for devices, as RDMA does, locks as much",
            "ulimit -l unlimited, or memlock in /etc/security/limits.conf",
        ),
    ]
    if not _or_none(lambda: _begins(proc / "self/pagemap")):
        listed.append(
            Limit(
                "/proc/self/pagemap",
                0,
                "entries",
                "it cannot be read: nothing says which pages writes have copied since a fork, so a fork "
                "counts in a host pool's budget as a copy would",
                "mount /proc, and let a sandbox allow reading it",
                low=True,
            )
        )
    return listed


def _begins(path: Path) -> bool:
    """Whether 8 bytes of a file can be read."""
    with path.open("rb", buffering=0) as file:
        return len(file.read(8)) == 8


def _resource(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _or_none(ask: Callable[[], T]) -> T | None:
    """What ``ask`` finds in a file; None if there is no such file, or it has a word such as "max"."""
    try:
        return ask()
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    return _or_none(lambda: int(path.read_text()))


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """The smallest memory limit among this process's cgroup and its ancestors, and the use of that cgroup."""
    found = [
        (limit, _number(folder / current))
        for folder, most, current in _cgroup_folders(root)
        if (limit := _number(folder / most)) is not None and limit < 2**62  # v1: huge if unlimited
    ]
    return min(found, key=lambda pair: pair[0], default=(None, None))


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the use) of the process's own cgroup and then of each ancestor."""
    for line in _or_none(lambda: (root / "proc/self/cgroup").read_text().splitlines()) or []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = mount / path.lstrip("/")
        yield from ((folder, *names) for folder in (own, *own.parents) if folder.is_relative_to(mount))

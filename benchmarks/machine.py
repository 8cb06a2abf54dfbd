"""The machine that figures come from: what explains them, and nothing that names it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe(device: str) -> dict[str, str | int]:
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "transparent_hugepages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        gpu, driver = torch.cuda.get_device_properties(0), Path("/proc/driver/nvidia/version")
        facts |= {
            "gpu": gpu.name,
            "gpu_memory_gib": round(gpu.total_memory / 2**30),
            "gpu_processors": gpu.multi_processor_count,
            "gpu_l2_mib": getattr(gpu, "L2_cache_size", 0) >> 20,
            "cuda": torch.version.cuda or "",
            "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
        }
    return facts


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _chosen(path: Path) -> str:
    """The bracketed word of a file such as "always [madvise] never"."""
    if not path.exists():
        return "unknown"
    text = path.read_text()
    return text[text.find("[") + 1 : text.find("]")]

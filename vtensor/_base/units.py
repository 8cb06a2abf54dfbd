"""Sizes in words."""

from __future__ import annotations

import re
from typing import TypeAlias

Bytes: TypeAlias = "float | str"
"""A byte count as callers give it: a whole number, or as in ``"40GiB"``."""

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(text: str) -> int | None:
    """Bytes of ``40GiB``, ``1.5 MiB``, ``4096``; None for anything else."""
    match = re.fullmatch(
        r"(\d{1,19}(?:\.\d{1,19})?)\s*([KMGT]iB)?", text.strip(), flags=re.IGNORECASE | re.ASCII
    )
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else None


def byte_text(nbytes: float) -> str:
    """``1,536`` as ``"1.5 KiB"``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while abs(nbytes) >= 1024 and power < len(units) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:,.1f}".removesuffix(".0") + f" {units[power]}"

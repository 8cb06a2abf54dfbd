"""Sizes in words."""

from __future__ import annotations


def byte_text(nbytes: float) -> str:
    """``1,536`` as ``"1.5 KiB"``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while abs(nbytes) >= 1024 and power < len(units) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:,.1f}".removesuffix(".0") + f" {units[power]}"

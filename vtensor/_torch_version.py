"""Refuses a torch older than pyproject.toml allows: the tests do not pass with it."""

from __future__ import annotations

import torch

_OLDEST = "2.10"


def _numbers(version: str) -> list[int]:
    """Its major and minor numbers."""
    return [int(part) for part in version.split(".")[:2]]


if _numbers(torch.__version__) < _numbers(_OLDEST):
    raise ImportError(
        f"[import vtensor] torch {torch.__version__} is installed, vtensor needs {_OLDEST} or newer: "
        f'pip install "torch>={_OLDEST}"'
    )

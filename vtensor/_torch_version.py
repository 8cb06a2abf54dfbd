"""Refuses a torch older than `dependencies` in pyproject.toml allows, which the tests do not pass with."""

from __future__ import annotations

import torch

_OLDEST = "2.10"


def _numbers(version: str) -> list[int]:
    """Major and minor of it."""
    return [int(part) for part in version.split(".")[:2]]


if _numbers(torch.__version__) < _numbers(_OLDEST):
    raise ImportError(
        f"[import vtensor] torch {torch.__version__} is installed, vtensor needs {_OLDEST} or newer: "
        f'pip install "torch>={_OLDEST}"'
    )

"""``python -m vtensor demo``: a real text, read and continued with each of Hugging Face's caches and ours."""

from __future__ import annotations

from .command import main

__all__ = ["main"]

"""Predictors of how many tokens requests will generate, to compare what promises are worth with each."""

from __future__ import annotations

from collections.abc import Callable

from vtensor.serving import LengthHistogram, LengthPredictor, Request

__all__ = ["PREDICTORS"]


class _Truth:
    """An upper bound: what the trace says."""

    def left(self, request: Request, generated: int) -> float:
        return request.max_new_tokens - generated

    def observe(self, request: Request, generated: int) -> None:
        pass


class _Bad:
    """Takes every request for one that has a thousand tokens to come, and so for one that can wait."""

    def left(self, request: Request, generated: int) -> float:
        return 1000.0

    def observe(self, request: Request, generated: int) -> None:
        pass


PREDICTORS: dict[str, Callable[[], LengthPredictor]] = {
    "histogram": LengthHistogram,
    "truth": _Truth,
    "bad": _Bad,
}

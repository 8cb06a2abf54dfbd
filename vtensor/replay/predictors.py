"""Predictors of the tokens that requests will generate, to compare promises with each of them."""

from __future__ import annotations

from collections.abc import Callable

from vtensor.serving import LengthHistogram, LengthPredictor, Request

__all__ = ["PREDICTORS"]


class _Truth:
    """An upper bound: the lengths of the trace."""

    def left(self, request: Request, generated: int) -> float:
        return request.max_new_tokens - generated

    def observe(self, request: Request, generated: int) -> None:
        pass


class _Bad:
    """Predicts a thousand tokens for every request, so that every request seems able to wait."""

    def left(self, request: Request, generated: int) -> float:
        return 1000.0

    def observe(self, request: Request, generated: int) -> None:
        pass


PREDICTORS: dict[str, Callable[[], LengthPredictor]] = {
    "histogram": LengthHistogram,
    "truth": _Truth,
    "bad": _Bad,
}

"""Changes of several layers that no refusal and no exception from outside leaves half made (I8, I17)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vtensor import InvalidArgument, VTensor, together

__all__ = ["BatchChange", "Choice", "finish", "reordered", "repeated", "selected", "twin_of"]

Choice = Callable[[int], list[int]]
"""Of so many sequences, those that are kept, in their new order."""


def reordered(beam_idx: torch.Tensor) -> Choice:
    """``beam_idx[i]`` as the i-th."""
    index: list[int] = beam_idx.tolist()

    def kept(batch: int) -> list[int]:
        if wrong := [i for i in index if not -batch <= i < batch]:
            raise InvalidArgument(
                f"[VTensorCache.reorder_cache] index {wrong[0]} is out of range for {batch} sequences: give "
                "one of them for each beam"
            )
        return [i % batch for i in index]

    return kept


def repeated(repeats: int) -> Choice:
    """Each of them ``repeats`` times."""
    return lambda batch: torch.arange(batch).repeat_interleave(repeats).tolist()


def selected(indices: torch.Tensor | Sequence[int] | slice) -> Choice:
    """Those at some positions, those with True, or those of a slice."""
    index = indices.cpu() if isinstance(indices, torch.Tensor) else indices
    return lambda batch: torch.arange(batch)[index].tolist()


class BatchChange:
    """Other sequences for some layers: planned layer by layer, which changes nothing, and then carried out in
    one step."""

    def __init__(self) -> None:
        self._tensors: list[VTensor] = []
        self._indices: list[list[int]] = []
        self._states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._leaving: list[VTensor] = []

    def reindex(self, owners: Sequence[VTensor], kept: list[int]) -> None:
        """Has each owner become what it is at ``kept``."""
        self._tensors += owners
        self._indices += [kept] * len(owners)

    def assign(self, layer: Any, states: dict[str, Any]) -> None:
        """Gives attributes of ``layer`` other values."""
        self._states.append((vars(layer), states))

    def close(self, owners: Sequence[VTensor]) -> None:
        """Closes owners, after all else."""
        self._leaving += owners

    def carry_out(self) -> None:
        """Raises what ``VTensor.reindex`` does, and nothing was changed then."""
        together.reindex(self._tensors, self._indices, self._states)
        for owner in self._leaving:
            owner.close()


def finish(step: Callable[[], object]) -> None:
    """Takes a step that ends the same however often it is begun: if an exception comes into it, it is taken
    once more before that goes on."""
    try:
        step()
    except BaseException:
        step()
        raise


def twin_of(layer: Any, kind: type | None = None) -> Any:
    """A layer of the same states, of class ``kind`` or its own: for operations that put new tensors in the
    place of a layer's."""
    twin: Any = object.__new__(type(layer) if kind is None else kind)
    twin.__dict__.update(
        (name, dict(value) if type(value) is dict else value) for name, value in vars(layer).items()
    )
    return twin

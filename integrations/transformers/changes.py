"""Changes of several layers that are complete or undone after any error or exception from outside (I8,
I17)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vtensor import InvalidArgument, VTensor, together

Choice = Callable[[int], list[int]]
"""A function from the number of sequences to the indices of those to keep, in their new order."""


def reordered(beam_idx: torch.Tensor) -> Choice:
    """Makes sequence ``beam_idx[i]`` the i-th."""
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
    """Repeats each sequence ``repeats`` times."""
    return lambda batch: torch.arange(batch, device="cpu").repeat_interleave(repeats).tolist()


def selected(indices: torch.Tensor | Sequence[int] | slice) -> Choice:
    """Keeps the sequences at some positions, those with True in a mask, or those of a slice."""
    index: Any = indices.cpu() if isinstance(indices, torch.Tensor) else indices
    if isinstance(index, tuple):  # which torch takes for an index of each dimension
        index = list(index)

    def kept(batch: int) -> list[int]:
        rows = torch.arange(batch, device="cpu")[index]
        if rows.ndim != 1:
            raise InvalidArgument(
                f"[VTensorCache.batch_select_indices] indices is {indices!r}: give positions, a bool for "
                "each sequence, or a slice"
            )
        return rows.tolist()

    return kept


class BatchChange:
    """A change of the sequences in several layers: planned layer by layer, then carried out in one step."""

    def __init__(self) -> None:
        self._tensors: list[VTensor] = []
        self._indices: list[list[int]] = []
        self._states: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.leaving: list[VTensor] = []

    def reindex(self, owners: Sequence[VTensor], kept: list[int]) -> None:
        """Plans to replace the sequences of each owner with those at the indices ``kept``."""
        self._tensors += owners
        self._indices += [kept] * len(owners)

    def assign(self, held: dict[Any, Any], states: dict[Any, Any], leaving: Sequence[VTensor] = ()) -> None:
        """Plans to update ``held`` with ``states``, and to close owners after everything else."""
        self._states.append((held, states))
        self.leaving += leaving

    def carry_out(self) -> None:
        """Makes all planned changes, or raises as ``VTensor.reindex`` does and changes nothing."""
        together.reindex(self._tensors, self._indices, self._states)
        for owner in self.leaving:
            owner.close()


def cut(owners: Sequence[VTensor], length: int) -> None:
    """Keeps at most the first ``length`` tokens of each."""
    for owner in owners:
        if owner.length > length:
            owner.truncate(length)


def finish(step: Callable[[], object]) -> None:
    """Runs an idempotent step. If an exception interrupts it, runs it again before raising the exception."""
    try:
        step()
    except BaseException:
        step()
        raise


def twin_of(layer: Any, kind: type | None = None) -> Any:
    """A layer with the same states, of class ``kind`` or its own, for operations that replace a layer's
    tensors."""
    twin: Any = object.__new__(type(layer) if kind is None else kind)
    twin.__dict__.update(
        (name, dict(value) if type(value) is dict else value) for name, value in vars(layer).items()
    )
    return twin

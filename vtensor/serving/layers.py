"""Prompts computed band by band, with K and V of few bands of layers in memory at a time (LayerKV, arXiv
2410.00428)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import ceil
from typing import Protocol, cast

from vtensor._arguments import integer
from vtensor.errors import InvalidArgument, OutOfPages
from vtensor.serving.plans import Walk, Work, slot_of

__all__ = ["LayerWalk", "Layering", "bands_that_stay", "resident_bands"]


_AT_ONCE = 3  # bands: one is computed, the one before it leaves, the one after it comes back
_WALKS = 64  # from one measurement to the next


class BandedCache(Protocol):
    """The calls of a cache that a walk uses, as :class:`vtensor.KVCache` with ``bands=`` documents them."""

    @property
    def bands(self) -> list[range]: ...

    @property
    def lengths(self) -> list[int]: ...

    def fits(
        self, lengths: Sequence[int], *, bands: Iterable[int] | None = None, wait: bool = False
    ) -> bool: ...

    def bands_away(self, slot: int) -> list[int]: ...

    def step(self, lengths: Sequence[int], *, bands: Iterable[int] | None = None) -> bool: ...

    def swap_out(self, slot: int | Sequence[int], *, bands: Iterable[int] | None = None) -> None: ...

    def swap_in(self, slot: int | Sequence[int], *, bands: Iterable[int] | None = None) -> bool: ...

    def wait(self, slot: int, layer: int | None = None) -> None: ...


def resident_bands(bands: int, compute_seconds: float, copy_seconds: float) -> int:
    """The fewest bands that have to stay in memory, so that the others leave while a prompt is computed.

    It is 0 if a band is copied faster than it is computed, as for most models. One of 8B in bf16 computes
    10,000 tokens a second at half of an A100's peak, and makes 1.3 GB of K and V of them; a host takes 25
    GB/s and more.

    Args:
        bands: bands of the cache.
        compute_seconds: time to compute a band of a prompt.
        copy_seconds: time to copy it to host memory.
    """
    if copy_seconds <= compute_seconds:
        return 0
    return ceil(bands * (1 - compute_seconds / copy_seconds))


def bands_that_stay(bands: int, resident: int) -> frozenset[int]:
    """The ``resident`` bands that stay, spread evenly with the last one among them, so that others leave in
    between."""
    return frozenset(bands * (i + 1) // resident - 1 for i in range(resident))


class Layering:
    """How a scheduler has prompts computed band by band if there is no room for all of their K and V.

    Args:
        resident: bands that stay in memory between the pieces of a prompt, and after it until others need
            the room; unless given, :func:`resident_bands` of the measured times.

    Raises InvalidArgument for a number below 0.
    """

    def __init__(self, resident: int | None = None) -> None:
        if resident is not None and integer("Layering", "resident", resident) < 0:
            raise InvalidArgument(f"[Layering] resident is {resident}: give at least 0 bands")
        self._given = resident
        self._walks = 0
        self.stay: frozenset[int] = frozenset()
        """The bands that stay."""

    def open(self, cache: object) -> None:
        """Sets the cache. Raises InvalidArgument for one without bands, or with no band that could leave."""
        bands = len(getattr(cache, "bands", ()))
        if bands < _AT_ONCE:
            raise InvalidArgument(
                f"[Scheduler] the cache has {bands} bands of layers: prompts are computed band by band with "
                f"at least {_AT_ONCE}, KVCache(..., bands={_AT_ONCE})"
            )
        if self._given is not None and self._given >= bands:
            raise InvalidArgument(
                f"[Scheduler] resident={self._given} of {bands} bands: some have to leave, lower it"
            )
        self._cache = cast(BandedCache, cache)
        self._bands = bands
        self.stay = bands_that_stay(bands, self._given or 0)

    def fits_walk(self, pieces: Iterable[tuple[int, Work]], wait: bool = False) -> bool:
        """Whether there is room for these pieces, in these slots, side by side: for the bands that stay, the
        one that is computed, the one that leaves, and the one that comes back. With ``wait``, it first waits
        until all that is on its way out has left."""
        lengths = [0] * len(self._cache.lengths)
        at_once = _AT_ONCE - 1
        for slot, piece in pieces:
            lengths[slot] = piece.stop
            if self._cache.bands_away(slot):
                at_once = _AT_ONCE
        bands = range(min(self._bands, at_once + len(self.stay)))
        return self._cache.fits(lengths, bands=bands, wait=wait)

    def tokens_at_once(self, tokens: int) -> int:
        """The tokens whose K and V in all layers take as much memory as ``tokens`` take in a walk's bands."""
        return ceil(tokens * (_AT_ONCE + len(self.stay)) / self._bands)

    def walk(self, pieces: Mapping[int, Work]) -> LayerWalk:
        measures = self._given is None and self._walks % _WALKS == 0  # then all of them leave
        self._walks += 1
        return LayerWalk(self._cache, list(pieces.values()), frozenset() if measures else self.stay)

    def holds(self, slot: int) -> bool:
        """Whether bands of a slot are in memory."""
        return len(self._cache.bands_away(slot)) < self._bands

    def send_away(self, slot: int) -> bool:
        """Moves the bands that stayed to host memory. False if there are none, or the host has no room."""
        away = self._cache.bands_away(slot)
        here = [band for band in range(self._bands) if band not in away]
        try:
            if here:
                self._cache.swap_out(slot, bands=here)
        except MemoryError:
            return False
        return bool(here)

    def fits(self, slot: int, length: int) -> bool:
        """Whether there is room for all bands of a slot at a length."""
        lengths = [0] * len(self._cache.lengths)
        lengths[slot] = length
        return self._cache.fits(lengths, bands=range(self._bands))

    def bring_back(self, slot: int) -> bool:
        """Gives all bands of a slot their pages back, and starts copying, the first layer first. False if
        memory is short."""
        away = self._cache.bands_away(slot)
        return not away or self._cache.swap_in(slot, bands=away)

    def measure(self, walk: Walk, seconds: float, clock: Callable[[], float]) -> None:
        """Now and then finds how many bands should stay, after an iteration of ``seconds``."""
        if self._given is not None or (self._walks - 1) % _WALKS != 0:
            return
        begun = clock()
        for sequence, _, _ in walk.work:
            if sequence.slot is not None:
                self._cache.wait(sequence.slot, self._cache.bands[-1][0])
        resident = resident_bands(self._bands, seconds / self._bands, clock() - begun)
        self.stay = bands_that_stay(self._bands, min(resident, self._bands - 1))


class LayerWalk:
    """The pieces of prompts that an iteration computes band by band.

    A band gets its memory when the first of its layers begins. It leaves for host memory when the next band
    begins, after its own computation. K and V of earlier pieces come back one band ahead. Each call may be
    repeated after an interruption.
    """

    def __init__(self, cache: BandedCache, work: Sequence[Work], stay: Collection[int]) -> None:
        self.work = list(work)
        self._cache, self._stay = cache, stay
        self._slots = [slot_of(sequence) for sequence, _, _ in work]
        self._band_of = [band for band, layers in enumerate(cache.bands) for _ in layers]
        self._bands = len(cache.bands)
        self._now = -1  # the band that is being computed

    @property
    def begun(self) -> bool:
        return self._now >= 0

    def enter(self, layer: int) -> None:
        """Makes a layer ready to be written and read: after the layer before it, and after
        ``cache.wait(slot, layer)``.

        Raises:
            InvalidArgument: layers are left out.
            OutOfPages: memory that the iteration was planned with has gone, or the host has none.
        """
        band = self._band_of[layer]
        if band == self._now:
            return
        if band != self._now + 1:
            raise InvalidArgument(
                f"[Plan.enter] layer {layer} is of band {band}, and band {self._now + 1} is next: call it "
                "for each layer, in their order"
            )
        self._leave(band - 1)
        lengths = self._cache.lengths
        for slot, (_, _, stop) in zip(self._slots, self.work, strict=True):
            lengths[slot] = stop
        if not self._bring_back(band) or not self._cache.step(lengths, bands=[band]):
            raise OutOfPages(
                f"[Plan.enter] memory for layer {layer} of {len(self._slots)} prompts has gone since it was "
                "planned: they are computed again"
            )
        self._now = band
        if band + 1 < self._bands:
            self._bring_back(band + 1)  # if it fails, the band comes back when it is entered

    def finish(self) -> None:
        """Has the last band leave. Raises InvalidArgument if layers were left out, OutOfPages if the host has
        no memory."""
        if self._now != self._bands - 1:
            raise InvalidArgument(
                "[Scheduler.complete] the plan has prompts that are computed layer by layer: call "
                "plan.enter(layer) before each layer"
            )
        self._leave(self._now)

    def _leave(self, band: int) -> None:
        if band >= 0 and band not in self._stay:
            here = [slot for slot in self._slots if band not in self._cache.bands_away(slot)]
            if here:
                self._cache.swap_out(here, bands=[band])

    def _bring_back(self, band: int) -> bool:
        away = [slot for slot in self._slots if band in self._cache.bands_away(slot)]
        return not away or self._cache.swap_in(away, bands=[band])

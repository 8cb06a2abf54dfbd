"""The requests whose prompts a scheduler has computed band by band, and those that came back from that."""

from __future__ import annotations

from collections import abc
from functools import partial

from vtensor.serving._books import Books, by_arrival
from vtensor.serving._commit import Change
from vtensor.serving.layers import Layering
from vtensor.serving.plans import Plan, Walk, Work, add_piece, next_piece, slot_of, target
from vtensor.serving.requests import SampleGroup, Status, TokenSequence

__all__ = ["Walks"]


class Walks:
    """Which pieces the next walk has, what stands in its way, and what the bands that stay behind it hold.

    Between two iterations a prompt that is computed band by band holds the bands that stay, and no other.

    Args:
        books: of the scheduler.
        layering: how prompts are walked. None: no prompt is, and nothing here does anything.
        token_budget: tokens computed in an iteration at most.
    """

    def __init__(self, books: Books, layering: Layering | None, token_budget: int) -> None:
        self.layering = layering
        self._books, self._token_budget = books, token_budget
        self._pieces: dict[int, Work] = {}  # of the walk that is being planned, by slot
        self._short: SampleGroup | None = None  # for whose next piece the last plan had no room
        self._refused = False  # a walk was cut off, as by a full host, and no request has ended since

    @property
    def due(self) -> list[TokenSequence]:
        """Sequences of running requests whose prompts are walked, in the order of arrival."""
        if self.layering is None:
            return []
        return [group.live[0] for group in self._books.running if group.layered]

    @property
    def parted(self) -> list[TokenSequence]:
        """Sequences some of whose bands may be in host memory."""
        if self.layering is None:
            return []
        queues = self._books.running + self._books.swapped
        return [group.live[0] for group in queues if group.layered]

    @property
    def admits(self) -> bool:
        """Whether others may join the walk. One that is refused takes those that decode beside it back with
        it: they come to an end first."""
        return self.layering is not None and not self._refused and self._short is None

    def holds_up(self, group: SampleGroup) -> bool:
        """Whether a request would overtake walked ones, or take the room that their next piece waits for."""
        if group.status is Status.WAITING and self.due:
            return True
        return self._short is not None and self._short.order < group.order

    # ------------------------------------------------------------------ planning

    def go_on(self, plan: Plan) -> bool:
        """Plans the next pieces. False where the iteration has nothing to compute for want of memory."""
        self._pieces, self._short = {}, None
        due = self.due
        for sequence in due:
            piece = next_piece(plan, sequence, sequence.computed, self._token_budget)
            # With nothing else to compute, a refusal would cost a request its place, or its life.
            if piece is None or not self.fits(piece, slot_of(sequence), wait=not plan.work):
                self._short = sequence.group
                break
            self.add(plan, piece)
        return not due or bool(plan.work) or self.send_away(due[0].group.order)

    def fits(self, piece: Work, slot: int, wait: bool = False) -> bool:
        """Whether there is room for a piece more, in this slot, in the walk that is planned."""
        assert self.layering is not None
        return self.layering.fits_walk([*self._pieces.items(), (slot, piece)], wait)

    def add(self, plan: Plan, piece: Work) -> None:
        self._pieces[slot_of(piece.sequence)] = piece
        add_piece(plan, piece)

    def walk(self) -> Walk | None:
        """The one that was planned."""
        return self.layering.walk(self._pieces) if self.layering is not None and self._pieces else None

    def room_beside(self, lengths: list[int], slot: int) -> list[int]:
        """Lengths that leave room for the next prompts to be walked, by that much more of a slot; as they are
        where there is no such prompt, or nobody who decodes and will make room."""
        books = self._books
        if self.layering is None or len(books.waiting) <= 1 or all(group.layered for group in books.running):
            return lengths
        wanted = lengths.copy()
        more = self.layering.tokens_at_once(self._token_budget)
        wanted[slot] = min(wanted[slot] + more, books.cache.max_len)
        return wanted

    # ------------------------------------------------------------------ bands that stay

    def holds(self, group: SampleGroup) -> bool:
        """Whether a running request has memory. One that is walked has that of the bands that stay, which the
        host may have no room for."""
        return not group.layered or (
            self.layering is not None and self.layering.holds(slot_of(group.live[0]))
        )

    def send_away(self, behind: int = -1) -> bool:
        """Moves to host memory the bands that stayed here of the latest request that has some, of those that
        arrived behind another. Whether there was one."""
        if self.layering is None or not self.layering.stay:
            return False
        held = [sequence for sequence in self.parted if sequence.group.order > behind]
        held.sort(key=lambda sequence: sequence.group.order, reverse=True)
        return any(self.layering.send_away(slot_of(sequence)) for sequence in held)

    def part_from_prefixes(self, group: SampleGroup) -> bool:
        """The same for one that comes back to bands that stayed: prefixes that some of its bands share can be
        given up once none does."""
        return self.layering is not None and group.layered and self.layering.send_away(slot_of(group.live[0]))

    # ------------------------------------------------------------------ what became of a walk

    def taken_back(self, walk: Walk) -> list[Change]:
        """The walk is not completed. Where it had begun its bands are in disorder: they are settled."""
        if not walk.begun:
            return []
        return [
            (self._books.changing.extend, [sequence.group for sequence, _, _ in walk.work]),
            (setattr, self._books, "settled", False),
            (setattr, self, "_refused", True),
        ]

    def computed(self, walk: Walk, ended: list[SampleGroup]) -> list[Change]:
        """Requests whose prompts are computed wait in host memory for room to decode."""
        books, changes = self._books, list[Change]()
        for sequence, _, stop in walk.work:
            group = sequence.group
            if sequence.slot is None or group in ended:
                continue
            changes.append((books.lengths.__setitem__, sequence.slot, stop))
            if stop == target(sequence):
                changes += [
                    (books.running.remove, group),
                    (books.swapped.append, group),
                    (setattr, group, "status", Status.SWAPPED),
                ]
        return [*changes, (partial(books.swapped.sort, key=by_arrival),)]

    def measure(self, walk: Walk, seconds: float, clock: abc.Callable[[], float]) -> None:
        if self.layering is not None:
            self.layering.measure(walk, seconds, clock)

    def one_has_ended(self) -> Change:
        return setattr, self, "_refused", False

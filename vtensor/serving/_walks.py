"""The requests whose prompts a scheduler computes band by band, and those that came back from that."""

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
    """The pieces of the next walk, what is in its way, and the bands that stay in memory after it.

    A walk computes pieces of prompts band by band. Between two iterations such a prompt has only the bands
    that stay.

    Args:
        books: the scheduler's records.
        layering: how prompts are walked. None: no prompt is, and nothing here has an effect.
        token_budget: the most tokens computed in an iteration.
    """

    def __init__(self, books: Books, layering: Layering | None, token_budget: int) -> None:
        self.layering = layering
        self._books, self._token_budget = books, token_budget
        self._pieces: dict[int, Work] = {}  # of the walk that is being planned, by slot
        self._short: SampleGroup | None = None  # the last plan had no room for its next piece
        self._refused = False  # a walk was interrupted, as by a full host, and no request has ended since

    @property
    def due(self) -> list[TokenSequence]:
        """Sequences of running requests whose prompts are walked, in the order of arrival."""
        if self.layering is None:
            return []
        return [group.live[0] for group in self._books.running if group.layered]

    @property
    def parted(self) -> list[TokenSequence]:
        """Sequences with bands that may be in host memory."""
        if self.layering is None:
            return []
        queues = self._books.running + self._books.swapped
        return [group.live[0] for group in queues if group.layered]

    @property
    def admits(self) -> bool:
        """Whether others may join the walk. A refused walk takes the requests that decode beside it back with
        it, so they end first."""
        return self.layering is not None and not self._refused and self._short is None

    def holds_up(self, group: SampleGroup) -> bool:
        """Whether a request would overtake walked ones, or take the room of their next piece."""
        if group.status is Status.WAITING and self.due:
            return True
        return self._short is not None and self._short.order < group.order

    # ------------------------------------------------------------------ planning

    def go_on(self, plan: Plan) -> bool:
        """Plans the next pieces. False if memory is so short that the iteration has nothing to compute."""
        self._pieces, self._short = {}, None
        due = self.due
        for sequence in due:
            piece = next_piece(plan, sequence, sequence.computed, self._token_budget)
            # With nothing else to compute, a refusal would make a request wait again, or fail.
            if piece is None or not self.fits(piece, slot_of(sequence), wait=not plan.work):
                self._short = sequence.group
                break
            self.add(plan, piece)
        return not due or bool(plan.work) or self.send_away(due[0].group.order)

    def fits(self, piece: Work, slot: int, wait: bool = False) -> bool:
        """Whether the planned walk has room for one more piece, in this slot."""
        assert self.layering is not None
        return self.layering.fits_walk([*self._pieces.items(), (slot, piece)], wait)

    def add(self, plan: Plan, piece: Work) -> None:
        self._pieces[slot_of(piece.sequence)] = piece
        add_piece(plan, piece)

    def walk(self) -> Walk | None:
        """The planned walk."""
        return self.layering.walk(self._pieces) if self.layering is not None and self._pieces else None

    def room_beside(self, lengths: list[int], slot: int) -> list[int]:
        """``lengths`` with room for the next prompts to walk, as more tokens of ``slot``. Unchanged if there
        is no such prompt, or no request that decodes and will make room."""
        books = self._books
        if self.layering is None or len(books.waiting) <= 1 or all(group.layered for group in books.running):
            return lengths
        wanted = lengths.copy()
        more = self.layering.tokens_at_once(self._token_budget)
        wanted[slot] = min(wanted[slot] + more, books.cache.max_len)
        return wanted

    # ------------------------------------------------------------------ bands that stay

    def holds(self, group: SampleGroup) -> bool:
        """Whether a running request has memory. A walked request has the bands that stay, for which the host
        may have no room."""
        return not group.layered or (
            self.layering is not None and self.layering.holds(slot_of(group.live[0]))
        )

    def send_away(self, behind: int = -1) -> bool:
        """Moves bands that stayed to host memory: those of the latest request that has some, among those that
        arrived after ``behind``. Returns whether there was one."""
        if self.layering is None or not self.layering.stay:
            return False
        held = [sequence for sequence in self.parted if sequence.group.order > behind]
        held.sort(key=lambda sequence: sequence.group.order, reverse=True)
        return any(self.layering.send_away(slot_of(sequence)) for sequence in held)

    def part_from_prefixes(self, group: SampleGroup) -> bool:
        """Moves the bands that stayed of a request that comes back to host memory: prefixes that its bands
        share can be given up once none shares them."""
        return self.layering is not None and group.layered and self.layering.send_away(slot_of(group.live[0]))

    # ------------------------------------------------------------------ what became of a walk

    def taken_back(self, walk: Walk) -> list[Change]:
        """Takes back a walk that was not completed. If it had begun, it settles the bands."""
        if not walk.begun:
            return []
        return [
            (self._books.changing.extend, [sequence.group for sequence, _, _ in walk.work]),
            (setattr, self._books, "settled", False),
            (setattr, self, "_refused", True),
        ]

    def computed(self, walk: Walk, ended: list[SampleGroup]) -> list[Change]:
        """Notes a completed walk: requests with computed prompts wait in host memory for room to decode."""
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

"""The queues of requests and the slots that they hold, kept in agreement with a cache.

An error of the cache or an exception from outside (I17) may interrupt any operation. So each change of the
books is prepared, calls of the cache included, and then made by one ``commit``. The next operation first
settles what was interrupted between the cache and the books.
"""

from __future__ import annotations

from bisect import bisect
from collections import abc
from contextlib import suppress
from operator import attrgetter

from vtensor.errors import InvalidArgument, NoFreeSlot, OutOfPages
from vtensor.kv import KVCache
from vtensor.serving._commit import Change, commit, sets
from vtensor.serving.plans import slot_of, target
from vtensor.serving.requests import SampleGroup, Status, TokenSequence
from vtensor.serving.slots import KVCacheManager

by_arrival = attrgetter("order")
_MOST = 4  # iterations for which an announced request waits until it is mapped


class Books:
    """A scheduler's records of its requests and their slots.

    Methods that return changes have already changed the cache; their caller commits the changes by
    :meth:`note`.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.waiting: list[SampleGroup] = []  # each queue in the order of arrival
        self.running: list[SampleGroup] = []
        self.swapped: list[SampleGroup] = []
        self._queues = {
            Status.WAITING: self.waiting,
            Status.RUNNING: self.running,
            Status.SWAPPED: self.swapped,
        }
        self.groups: dict[abc.Hashable, SampleGroup] = {}  # by id, and some that have just ended
        self.lengths = [0] * cache.max_batch
        self.settled = True  # books and cache agree; not while an operation changes them, or was interrupted
        self.changing: list[SampleGroup] = []  # an operation is changing their slots
        # The first waiting requests, which begin with the next iteration: the iterations since each was
        # announced. They have a slot already, and the mapper maps their prompts. None without look-ahead.
        self.announced: dict[SampleGroup, int] = {}
        self._ahead = cache if isinstance(cache, KVCache) and cache.lookahead > 0 else None
        self.unit = cache.stats().unit

    def held(self, request_id: abc.Hashable) -> SampleGroup | None:
        group = self.groups.get(request_id)
        return group if group is not None and group.status in self._queues else None

    def note(self, changes: list[Change]) -> None:
        """Commits changes, so that the books agree with the cache."""
        commit([*changes, (self.changing.clear,)])

    def forget(self, group: SampleGroup) -> None:
        """Gives up the id of a request that has ended."""
        self.groups.pop(group.request.id, None)

    def settle(self) -> None:
        """Settles an interrupted operation, if there was one: the requests whose slots it was changing are
        computed again, slots that no request has by the books are freed, and lengths are those of the
        cache."""
        if self.settled:
            return
        self.announced.clear()
        for group in self.changing:
            if group.status in (Status.RUNNING, Status.SWAPPED):
                commit(self.wait(group))
        for group in self.waiting:
            group.live[0].slot = None
        self.groups = {group.request.id: group for group in [*self.waiting, *self.running, *self.swapped]}
        held = {s.slot for group in self.running + self.swapped for s in group.holders}
        for slot in range(self.cache.max_batch):
            if slot not in held:
                with suppress(InvalidArgument):  # most are free already
                    self.cache.free(slot)
        lengths = [0] * self.cache.max_batch
        for group in self.running:
            for sequence in group.holders:
                lengths[slot_of(sequence)] = self.cache.length(slot_of(sequence))
        self.note(sets(self, lengths=lengths, settled=True))

    # ------------------------------------------------------------------ from queue to queue

    def move(self, group: SampleGroup, status: Status, reason: str = "") -> list[Change]:
        """Moves a request to the queue of a status, in order of arrival; of one that has ended, to none."""
        changes: list[Change] = [
            (self._queues[group.status].remove, group),
            (self.announced.pop, group, None),
            *sets(group, status=status, reason=reason),
        ]
        if status in self._queues:
            queue = self._queues[status]
            changes.append((queue.insert, bisect(queue, group.order, key=by_arrival), group))
        return changes

    def wait(self, group: SampleGroup) -> list[Change]:
        """Moves a request back to the waiting ones, with nothing computed."""
        changes = self.move(group, Status.WAITING)
        changes += sets(group, left_at=None, forked=len(group.live) == 1)
        for sequence in group.live:
            changes += sets(sequence, slot=None, computed=0, published=0)
        return changes

    def swap_out(self, group: SampleGroup) -> list[Change]:
        """Moves a request's slots to the host, and returns the changes to note: none if the host has no
        room."""
        self.changing.append(group)
        slots = [slot_of(sequence) for sequence in group.holders]
        try:
            self.cache.swap_out(slots)
        except MemoryError:
            return []
        empty = [(self.lengths.__setitem__, slot, 0) for slot in slots]
        return [*empty, *self.move(group, Status.SWAPPED)]

    # ------------------------------------------------------------------ announced requests

    def must_wait(self, group: SampleGroup, lengths: list[int]) -> bool:
        """Whether to announce a request that needs these lengths, or to announce it again: it is not mapped,
        and has not waited long enough."""
        if self._ahead is None or self.announced.get(group) == _MOST:
            return False
        return group not in self.announced or not self._ahead.prepare(lengths)

    def announce(self, group: SampleGroup, slot: int, covered: int) -> None:
        """Announces a waiting request that begins with the next iteration: its prompt is mapped before."""
        self.note(
            [
                (self.announced.__setitem__, group, self.announced.get(group, 0) + 1),
                (self.lengths.__setitem__, slot, covered),
                *sets(group.live[0], slot=slot),
            ]
        )

    def withdraw(self, group: SampleGroup, slot: int) -> None:
        """Frees the slot of a waiting request that cannot begin yet."""
        self.cache.free(slot)
        self.note(
            [
                (self.lengths.__setitem__, slot, 0),
                (self.announced.pop, group, None),
                *sets(group.live[0], slot=None),
            ]
        )

    def with_prompts(self, lengths: list[int]) -> list[int]:
        """A copy of ``lengths``, with the prompts of announced requests."""
        lengths = lengths.copy()
        for group in self.announced:
            lengths[slot_of(group.live[0])] = target(group.live[0])
        return lengths

    def look_ahead(self) -> None:
        """Has the mapper map what is known of the next iteration while this one is computed: one more token
        of each slot, and the prompts of announced requests if there is room for them too."""
        if self._ahead is None:
            return
        ahead = [length and length + 1 for length in self.lengths]
        self._ahead.prepare(ahead)
        if self.announced:
            self._ahead.prepare(self.with_prompts(ahead))

    # ------------------------------------------------------------------ slots

    def slot_for(self, group: SampleGroup) -> int | None:
        """The slot that a waiting request has already, or a free one that begins with the published part of
        its prompt."""
        sequence, request = group.live[0], group.request
        if sequence.slot is not None:
            return sequence.slot
        tokens = None if isinstance(request.prompt, int) else sequence.ids(0, target(sequence))
        expect = group.prompt_tokens + request.max_new_tokens
        try:
            if isinstance(self.cache, KVCache):  # a step for the slot comes before the first read
                return self.cache.alloc(tokens, salt=request.salt, expect=expect, deferred=True)
            return self.cache.alloc(tokens, salt=request.salt, expect=expect)
        except NoFreeSlot:  # the cache has lost slots to calls that it could not undo
            if self.running:
                return None
            raise

    def free(self, group: SampleGroup, sequences: list[TokenSequence]) -> list[Change]:
        """Frees slots, and returns the changes to note."""
        self.changing.append(group)
        changes: list[Change] = []
        for sequence in sequences:
            if sequence.slot is not None:
                self.cache.free(sequence.slot)
                changes += [*sets(sequence, slot=None), (self.lengths.__setitem__, sequence.slot, 0)]
        return changes

    def share(self, group: SampleGroup) -> None:
        """Publishes a computed prompt, and gives each sequence a slot that continues it."""
        if group.status is not Status.RUNNING:
            return  # it has ended since, or is computed again
        first, *others = group.live
        self.publish(first, first.computed)
        if group.forked:
            return
        self.changing.append(group)
        lengths = self.lengths.copy()
        changes = [*sets(group, forked=True), *sets(self, lengths=lengths)]
        for sequence, slot in zip(others, self.cache.fork(slot_of(first), len(others)), strict=True):
            lengths[slot] = lengths[slot_of(first)]
            changes += sets(sequence, slot=slot, computed=first.computed, published=first.published)
        self.note(changes)

    def reorder(self, group: SampleGroup, sources: abc.Sequence[int]) -> list[Change]:
        """Gives each live sequence of a request a slot that continues that of its source, an index."""
        live = group.live
        self.settled = False
        self.changing.append(group)
        before = [slot_of(sequence) for sequence in live]
        slots = self.cache.reorder(before, [before[source] for source in sources])
        lengths = self.lengths.copy()
        for slot in before:
            lengths[slot] = 0
        changes: list[Change] = []
        for sequence, source, slot in zip(live, sources, slots, strict=True):
            lengths[slot] = self.lengths[before[source]]
            of = live[source]
            changes += sets(sequence, slot=slot, computed=of.computed, published=of.published)
        return [*changes, *sets(self, lengths=lengths)]

    def end_sequences(self, group: SampleGroup, ended: list[TokenSequence]) -> list[Change]:
        """Publishes what ended sequences computed, and frees their slots."""
        self.changing.append(group)  # abandoned now, it would write published pages again
        first, live = group.live[0], [sequence for sequence in group.live if sequence not in ended]
        changes = sets(group, live=live)
        for sequence in ended:
            if sequence.slot is not None:
                self.publish(sequence, sequence.known)
        if group.forked or not live:
            return [*self.free(group, ended), *changes]
        changes += sets(group, forked=len(live) == 1)
        if first in ended and first.slot is not None:  # the next sequence takes the prompt's only slot
            prompt = sets(live[0], slot=first.slot, computed=group.prompt_tokens, published=first.published)
            changes += [*prompt, *sets(first, slot=None)]
        return changes

    def publish(self, sequence: TokenSequence, computed: int) -> None:
        """Puts a sequence's newly computed tokens into the cache's index."""
        request = sequence.group.request
        known = sequence.group.prompt_tokens + len(sequence.output)
        tokens = 0 if isinstance(request.prompt, int) else min(known, computed)
        if tokens - sequence.published >= self.unit:
            ids = sequence.ids(0, tokens)
            with suppress(OutOfPages):  # then later requests compute them again
                sequence.published = self.cache.publish(slot_of(sequence), ids, salt=request.salt)

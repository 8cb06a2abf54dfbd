"""Which request computes which tokens in the next iteration, and whose memory makes room for whom.

First come, first served. The rules are those of vLLM's paper (Kwon et al., SOSP 2023, section 4.5): the
latest arrival is preempted first, a request's sequences all together; a single sequence is computed again,
several that share are swapped out. Prompts are computed in pieces beside the decoding sequences, under one
budget of tokens (Sarathi-Serve, Agrawal et al., OSDI 2024). What fits is for the cache's ``step`` to say.

Any call may be cut off, by an error of the cache or by an exception from outside (I17). So each change of the
books is prepared, calls of the cache included, and then made by one ``commit``. What was cut off between the
cache and the books is settled when the next operation begins.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import abc
from contextlib import suppress
from itertools import repeat
from operator import attrgetter

from vtensor._arguments import number
from vtensor.errors import InvalidArgument, NoFreeSlot
from vtensor.serving._commit import Change, commit, each
from vtensor.serving.plans import Plan, SchedulerStats, Work, plan_sampling, slot_of, target
from vtensor.serving.requests import Request, SampleGroup, Status, TokenSequence, token_ids
from vtensor.serving.slots import KVCacheManager, check_fits, waits_for_others

__all__ = ["Scheduler"]


class Scheduler:
    """Plans iterations over a cache whose slots it owns.

    ::

        while scheduler.unfinished:
            plan = scheduler.plan()
            tokens = ...  # run the model over plan.work, choose a token for each of plan.sampled
            scheduler.complete(plan, tokens)

    Any call may raise, for an error of the cache or for Ctrl-C. No request, token or slot is lost with it; a
    request whose slots it was changing may be computed again. An iteration that is still :attr:`planned` can
    be completed by another call, or abandoned.

    Args:
        cache: a :class:`vtensor.KVCache`, or what has its calls. Nobody else may alloc or free in it.
        token_budget: tokens computed in an iteration at most; at least one for each slot.
        patience: seconds that a request waits, with nothing else running, for memory that other processes of
            a shared budget hold. Then it fails; one that would not fit even if they held none does at once.

    Raises InvalidArgument for a smaller budget, or a patience below 0. Calls come from one thread.
    """

    def __init__(self, cache: KVCacheManager, *, token_budget: int = 2048, patience: float = 60.0) -> None:
        if token_budget < cache.max_batch:
            raise InvalidArgument(
                f"[Scheduler] token_budget={token_budget} for {cache.max_batch} slots, each of which may "
                "decode a token in an iteration: raise it, or make the cache with fewer slots"
            )
        self.patience = number("Scheduler", "patience", patience)
        if not self.patience >= 0:
            raise InvalidArgument(f"[Scheduler] patience is {patience}: it must be at least 0 seconds")
        self.cache = cache
        self.token_budget = token_budget
        self.stats = SchedulerStats()
        self.waiting: list[SampleGroup] = []
        self.running: list[SampleGroup] = []
        self.swapped: list[SampleGroup] = []
        self.cancelled: list[SampleGroup] = []  # of which no plan has told yet
        self.planned: Plan | None = None
        """The iteration that is under way."""
        self.waits_for_others = False
        """The last plan is empty because other processes hold the memory: call again in a moment."""
        self._short_since: float | None = None  # when it first was, with no step granted since
        self._unit = cache.stats().unit
        self._lengths = [0] * cache.max_batch
        self._groups: dict[abc.Hashable, SampleGroup] = {}  # by id, and some that have just ended
        self._arrivals = 0
        self._refused = False  # memory was short, and no request has ended since
        self._prompts: list[SampleGroup] = []  # computed by the last iteration, to be shared before the next
        self._next = Plan()  # begins with the news of an iteration that was taken back, or cut off
        self._settled = True  # books and cache agree; not while an operation changes them, or was cut off
        self._changing: list[SampleGroup] = []  # whose slots an operation is changing

    @property
    def unfinished(self) -> int:
        """Requests that wait, run or are swapped out."""
        return len(self.waiting) + len(self.running) + len(self.swapped)

    def add(self, request: Request) -> SampleGroup:
        """Queues a request behind those that came before it.

        Raises InvalidArgument where its id is taken, or where no slot could ever hold it.
        """
        if not isinstance(request, Request):
            raise InvalidArgument(f"[Scheduler.add] {request!r} is no Request: make one")
        if self._held(request.id) is not None:
            raise InvalidArgument(
                f"[Scheduler.add] request {request.id!r} is there already: choose another id"
            )
        check_fits("Scheduler.add", request, self.cache)
        group = SampleGroup(request, self._arrivals)
        commit(
            [
                (self._groups.__setitem__, request.id, group),
                (self.waiting.append, group),
                (setattr, self, "_arrivals", group.order + 1),
            ]
        )
        return group

    def cancel(self, request_id: abc.Hashable) -> None:
        """Drops a request and frees what it holds. The next plan names it among its ``cancelled``.

        Raises:
            InvalidArgument: an unknown id; an iteration is under way.
            DriverError, TimedOut: of the cache. The request is still there.
        """
        if self.planned is not None:
            raise InvalidArgument("[Scheduler.cancel] an iteration is under way: complete it first")
        group = self._held(request_id)
        if group is None:
            raise InvalidArgument(f"[Scheduler.cancel] no request {request_id!r} waits, runs or is swapped")
        self._settle()
        self._settled = False
        changes = self._free(group, group.holders) + self._leave(group, Status.CANCELLED, "cancelled")
        self._note([*changes, (self.cancelled.append, group)])
        self._forget(group)
        self._settled = True

    def _held(self, request_id: abc.Hashable) -> SampleGroup | None:
        group = self._groups.get(request_id)
        return group if group is not None and group.status in _HELD else None

    # ------------------------------------------------------------------ planning

    def plan(self) -> Plan:
        """The next iteration; memory for it is mapped. Empty where nothing can be computed now: call again
        while there are ``unfinished`` requests.

        Raises:
            InvalidArgument: the last one is not complete.
            DriverError, OutOfPages, NoFreeSlot, TimedOut: of the cache. No iteration is under way.
        """
        if self.planned is not None:
            raise InvalidArgument("[Scheduler.plan] the last one is not complete: call complete() first")
        self._settle()
        self._settled = False
        plan = self._next
        plan.work, plan.sampled, plan.tokens, plan.cancelled = [], [], 0, self.cancelled
        self.waits_for_others = False
        for group in self._prompts:
            self._share(group)
        self._prompts = []
        self._advance(plan)
        if not plan.preempted:
            self._admit(plan)
        commit(
            [
                (setattr, self, "cancelled", []),
                (setattr, self, "planned", plan),
                (setattr, self, "_next", Plan()),
                (setattr, self, "_settled", True),
            ]
        )
        return plan

    def _advance(self, plan: Plan) -> None:
        """Gives the running requests their tokens, and takes the latest ones' memory where it is short."""
        while self.running:
            self._plan_running(plan)
            lengths = self._lengths.copy()
            for sequence, _, stop in plan.work:
                slot = slot_of(sequence)
                if lengths[slot] < stop:
                    lengths[slot] = stop
            if self.cache.step(lengths):
                self._lengths = lengths
                self._short_since = None
                for i, work in enumerate(plan.work):
                    plan_sampling(plan, i, work)
                return
            plan.work, plan.tokens = [], 0
            # Waiting for others it keeps nothing that they may wait for.
            if len(self.running) > 1 or self._may_wait(lengths):
                self._preempt(plan, self.running[-1])
            else:
                self._fail(plan, self.running[0])

    def _plan_running(self, plan: Plan) -> None:
        prompts: list[TokenSequence] = []
        work = plan.work
        for group in self.running:
            for sequence in group.holders:
                computed = sequence.computed
                if sequence.known - computed == 1:
                    work.append(Work(sequence, computed, computed + 1))
                else:
                    prompts.append(sequence)
        plan.tokens = len(work)
        for sequence in prompts:
            self._plan_piece(plan, sequence)

    def _plan_piece(self, plan: Plan, sequence: TokenSequence) -> None:
        """As much of what a sequence still has to compute as the budget leaves."""
        start = sequence.computed
        stop = min(target(sequence), start + self.token_budget - plan.tokens)
        if stop > start:
            plan.work.append(Work(sequence, start, stop))
            plan.tokens += stop - start

    def _admit(self, plan: Plan) -> None:
        """Lets requests in, in the order of arrival, until one does not fit: nobody overtakes it."""
        while self.waiting or self.swapped:
            if self._refused and self.running:
                return
            queue = min(
                (queue for queue in (self.waiting, self.swapped) if queue), key=lambda queue: queue[0].order
            )
            group = queue[0]
            came_back = queue is self.swapped
            if plan.tokens + len(group.holders) > self.token_budget:
                return
            if not came_back and len(group.live) > self._slots_free():
                return
            fits = self._bring_back(plan, group) if came_back else self._place(plan, group)
            if not fits and self.running:
                self._refused = True
            elif not fits and self.waits_for_others:
                return
            elif not fits:
                self._fail(plan, group)

    def _slots_free(self) -> int:
        """Those that no request has, or gets once its prompt is computed."""
        return self.cache.max_batch - sum(len(group.live) for group in self.running + self.swapped)

    def _place(self, plan: Plan, group: SampleGroup) -> bool:
        """Gives a waiting request a slot, and memory for all of its prompt: a piece of it would be lost again
        as soon as the next piece found no room."""
        sequence, request = group.live[0], group.request
        prompt = target(sequence)
        tokens = None if isinstance(request.prompt, int) else sequence.ids(0, prompt)
        try:
            expect = group.prompt_tokens + request.max_new_tokens
            slot = self.cache.alloc(tokens, salt=request.salt, expect=expect)
        except NoFreeSlot:  # the cache has lost some to calls that it could not undo
            if self.running:
                return False
            raise
        covered = self.cache.length(slot)
        lengths = self._lengths.copy()
        lengths[slot] = prompt
        # Asked first: a step that is refused has given up prefixes that later requests would have found. Who
        # waited for others comes back with room for more than it had, so that it gets on each time.
        wanted = lengths
        if self._short_since is not None:
            wanted = lengths.copy()
            wanted[slot] = min(prompt + self._unit, expect)
        asks = self.running or self._short_since is not None
        if (asks and not self.cache.fits(wanted)) or not self.cache.step(lengths):
            if not self.running:
                self._may_wait(wanted)
            self.cache.free(slot)
            return False
        changes: list[Change] = [
            (setattr, sequence, "slot", slot),
            (setattr, sequence, "computed", covered),
            (setattr, sequence, "published", covered),
            (setattr, self, "_lengths", lengths),
        ]
        if not group.admitted:
            stats = self.stats
            changes += [
                (setattr, group, "admitted", True),
                (plan.admitted.append, group),
                (setattr, stats, "admitted", stats.admitted + 1),
                (setattr, stats, "prompt_tokens", stats.prompt_tokens + group.prompt_tokens),
                (setattr, stats, "reused_tokens", stats.reused_tokens + covered),
            ]
        self._note([*changes, *self._run(group)])
        self._plan_piece(plan, sequence)
        plan_sampling(plan, len(plan.work) - 1, plan.work[-1])
        return True

    def _bring_back(self, plan: Plan, group: SampleGroup) -> bool:
        """Swaps a request in, with room for a token more of each sequence; or leaves it where it was."""
        lengths = self._lengths.copy()
        back = [slot_of(sequence) for sequence in group.holders]
        for sequence, slot in zip(group.holders, back, strict=True):
            lengths[slot] = max(self.cache.length(slot), sequence.computed + 1)
        if self.running and not self.cache.fits(lengths):
            return False
        self._changing.append(group)
        came_back = self.cache.swap_in(back)
        if not came_back or not self.cache.step(lengths):
            if came_back:
                self.cache.swap_out(back)
            if not self.running:
                self._may_wait(lengths)
            self._note([])
            return False
        self._note([(plan.swapped_in.extend, back), (setattr, self, "_lengths", lengths), *self._run(group)])
        for sequence in group.holders:
            plan.work.append(Work(sequence, sequence.computed, sequence.computed + 1))
            plan.tokens += 1
            plan_sampling(plan, len(plan.work) - 1, plan.work[-1])
        return True

    def _run(self, group: SampleGroup) -> list[Change]:
        return [
            (self._queue_of(group).remove, group),
            (self.running.append, group),
            (setattr, group, "status", Status.RUNNING),
        ]

    # ------------------------------------------------------------------ making room

    def _may_wait(self, lengths: list[int]) -> bool:
        """Whether a refused step is tried again later: nobody here is in its way, but other processes are."""
        self.waits_for_others = False
        if waits_for_others(self.cache, lengths):
            now = time.monotonic()
            if self._short_since is None:
                self._short_since = now
            self.waits_for_others = now - self._short_since < self.patience
        return self.waits_for_others

    def _preempt(self, plan: Plan, group: SampleGroup) -> None:
        stats, shared = self.stats, len(group.holders) > 1
        if shared and (changes := self._swap_out(group)):
            changes.append((setattr, stats, "swapped", stats.swapped + 1))
        else:
            if not shared:  # what is published need not be computed again, unless memory is short until then
                self._publish(group.live[0], group.live[0].computed)
            changes = [*self._free(group, group.holders), *self._wait(group)]
            changes.append((setattr, stats, "recomputed", stats.recomputed + 1))
        # Until somebody ends: it would be the first to go again.
        self._note([*changes, (plan.preempted.append, group), (setattr, self, "_refused", True)])

    def _swap_out(self, group: SampleGroup) -> list[Change]:
        """Moves its slots to the host, and says what is then to be noted: nothing where that has no room."""
        self._changing.append(group)
        slots = [slot_of(sequence) for sequence in group.holders]
        try:
            self.cache.swap_out(slots)
        except MemoryError:
            return []
        return [
            *((self._lengths.__setitem__, slot, 0) for slot in slots),
            (self._queue_of(group).remove, group),
            (self.swapped.insert, bisect(self.swapped, group.order, key=_order), group),
            (setattr, group, "status", Status.SWAPPED),
        ]

    def _wait(self, group: SampleGroup) -> list[Change]:
        """Back to the waiting, where its arrival puts it, with nothing computed."""
        changes: list[Change] = [
            (self._queue_of(group).remove, group),
            (self.waiting.insert, bisect(self.waiting, group.order, key=_order), group),
            (setattr, group, "status", Status.WAITING),
            (setattr, group, "forked", len(group.live) == 1),
        ]
        for sequence in group.live:
            changes += [(setattr, sequence, name, 0) for name in ("computed", "published")]
            changes.append((setattr, sequence, "slot", None))
        return changes

    def _fail(self, plan: Plan, group: SampleGroup) -> None:
        tokens = max(sequence.known for sequence in group.live)
        reason = (
            f"{tokens} tokens in {len(group.live)} sequences do not fit into the cache's memory with nothing "
            "else running: give its pool a larger budget, or ask for less"
        )
        if self._short_since is not None:
            reason += f"; other processes of the shared budget gave back too little in {self.patience:g} s"
        self._note(
            [
                *self._free(group, group.holders),
                *self._leave(group, Status.FAILED, reason),
                (plan.failed.append, group),
                (setattr, self.stats, "failed", self.stats.failed + 1),
            ]
        )
        self._forget(group)

    def _leave(self, group: SampleGroup, status: Status, reason: str = "") -> list[Change]:
        """The end of a request, whose slots are free."""
        return [
            (self._queue_of(group).remove, group),
            (setattr, group, "status", status),
            (setattr, group, "reason", reason),
            (setattr, self, "_refused", False),
            (setattr, self, "_short_since", None),
        ]

    def _free(self, group: SampleGroup, sequences: list[TokenSequence]) -> list[Change]:
        """Frees slots, and says what is then to be noted."""
        self._changing.append(group)
        changes: list[Change] = []
        for sequence in sequences:
            if sequence.slot is not None:
                self.cache.free(sequence.slot)
                changes.append((setattr, sequence, "slot", None))
                changes.append((self._lengths.__setitem__, sequence.slot, 0))
        return changes

    def _queue_of(self, group: SampleGroup) -> list[SampleGroup]:
        return (self.waiting, self.running, self.swapped)[_HELD.index(group.status)]

    # ------------------------------------------------------------------ keeping books and cache together

    def _note(self, changes: list[Change]) -> None:
        """Brings the books up to what was done to the cache."""
        commit([*changes, (self._changing.clear,)])

    def _forget(self, group: SampleGroup) -> None:
        """Gives up the id of a request that has ended."""
        self._groups.pop(group.request.id, None)

    def _settle(self) -> None:
        """After an operation that was cut off: the requests whose slots it was changing are computed again,
        slots that nobody has by the books are freed, and lengths are those of the cache."""
        if self._settled:
            return
        for group in self._changing:
            if group.status in (Status.RUNNING, Status.SWAPPED):
                commit(self._wait(group))
        self._groups = {group.request.id: group for group in [*self.waiting, *self.running, *self.swapped]}
        held = {s.slot for group in self.running + self.swapped for s in group.holders}
        for slot in range(self.cache.max_batch):
            if slot not in held:
                with suppress(InvalidArgument):  # most are free already
                    self.cache.free(slot)
        lengths = [0] * self.cache.max_batch
        for group in self.running:
            for sequence in group.holders:
                lengths[slot_of(sequence)] = self.cache.length(slot_of(sequence))
        self._note([(setattr, self, "_lengths", lengths), (setattr, self, "_settled", True)])

    # ------------------------------------------------------------------ completing

    def complete(self, plan: Plan, tokens: abc.Sequence[int | Exception] | None = None) -> list[SampleGroup]:
        """Takes note that the plan's tokens are computed, and of those that were chosen.

        Args:
            plan: the last one of ``plan()``.
            tokens: a token id for each of ``plan.sampled``, or the exception that there was instead: that
                request fails, and no other. None where only their number is known.

        Returns the requests that ended.

        Raises:
            InvalidArgument: another plan, another number of tokens, or no token ids; nothing was changed.
            DriverError, OutOfPages, TimedOut: of the cache. The iteration is still under way.
        """
        if plan is not self.planned:
            raise InvalidArgument("[Scheduler.complete] this is not the iteration that is under way")
        if tokens is not None and len(tokens) != len(plan.sampled):
            raise InvalidArgument(
                f"[Scheduler.complete] {len(tokens)} tokens, {len(plan.sampled)} sequences are due one"
            )
        chosen = None if tokens is None else token_ids("Scheduler.complete", tokens)
        self._settle()
        self._settled = False
        computed: list[TokenSequence] = []
        stops: list[int] = []
        prompts: list[SampleGroup] = []
        for sequence, start, stop in plan.work:
            if sequence.slot is not None:  # otherwise lost with an operation that was cut off
                computed.append(sequence)
                stops.append(stop)
                if start < sequence.group.prompt_tokens <= stop:
                    prompts.append(sequence.group)
        extended: list[TokenSequence] = []
        known: list[int] = []
        going: dict[SampleGroup, list[TokenSequence]] = {}
        errors: dict[SampleGroup, Exception] = {}
        for (_, sequence), token in zip(plan.sampled, chosen or repeat(None), strict=False):
            group = sequence.group
            if isinstance(token, Exception):
                errors.setdefault(group, token)
                continue
            n = sequence.known + 1
            extended.append(sequence)
            known.append(n)
            if n - group.prompt_tokens == group.request.max_new_tokens or token in group.request.stop:
                going.setdefault(group, []).append(sequence)
        changes = [
            each(setattr, computed, repeat("computed"), stops),
            each(setattr, extended, repeat("known"), known),
        ]
        if chosen is not None:
            ids = chosen if not errors else [token for token in chosen if not isinstance(token, Exception)]
            changes.append(each(list.append, [sequence.output for sequence in extended], ids))
        for group, error in errors.items():
            going.pop(group, None)
            changes += self._free(group, group.holders)
            changes += self._leave(group, Status.FAILED, f"{type(error).__name__}: {error}")
        ended_groups = list(errors)
        for group, sequences in going.items():
            changes += self._end_sequences(group, sequences)
            if len(sequences) == len(group.live):
                changes += self._leave(group, Status.FINISHED)
                ended_groups.append(group)
        self._note(
            [
                *changes,
                (setattr, self.stats, "computed_tokens", self.stats.computed_tokens + plan.tokens),
                (setattr, self.stats, "finished", self.stats.finished + len(ended_groups) - len(errors)),
                (setattr, self.stats, "failed", self.stats.failed + len(errors)),
                (setattr, self, "_prompts", prompts),
                (setattr, plan, "ended", ended_groups),
                (setattr, self, "planned", None),
            ]
        )
        for group in ended_groups:
            self._forget(group)
        self._settled = True
        return ended_groups

    def _end_sequences(self, group: SampleGroup, ended: list[TokenSequence]) -> list[Change]:
        """Publishes what they computed, and frees their slots."""
        self._changing.append(group)  # were it abandoned now, pages that are published would be written again
        first, live = group.live[0], [sequence for sequence in group.live if sequence not in ended]
        changes: list[Change] = [(setattr, group, "live", live), (setattr, self, "_refused", False)]
        for sequence in ended:
            if sequence.slot is not None:
                self._publish(sequence, sequence.known)
        if group.forked or not live:
            return [*self._free(group, ended), *changes]
        changes.append((setattr, group, "forked", len(live) == 1))
        if first in ended and first.slot is not None:  # the prompt's only slot goes on to the next
            changes += [
                (setattr, live[0], "slot", first.slot),
                (setattr, live[0], "computed", group.prompt_tokens),
                (setattr, live[0], "published", first.published),
                (setattr, first, "slot", None),
            ]
        return changes

    def abandon(self, plan: Plan) -> None:
        """Takes an iteration back that could not be computed: its tokens are planned again.

        Raises InvalidArgument for another plan than the last.
        """
        if plan is not self.planned:
            raise InvalidArgument("[Scheduler.abandon] this is not the iteration that is under way")
        news = Plan(admitted=plan.admitted, failed=plan.failed, swapped_in=plan.swapped_in)
        cancelled = (setattr, self, "cancelled", plan.cancelled + self.cancelled)
        commit([cancelled, (setattr, self, "_next", news), (setattr, self, "planned", None)])

    def reorder(self, request_id: abc.Hashable, sources: abc.Sequence[int]) -> None:
        """A step of a beam search, between two iterations: the request's i-th live sequence continues the
        ``sources[i]``-th. Nothing is copied.

        Raises:
            InvalidArgument: the request's sequences have no tokens of their own, or are swapped out; sources
                are not its own; an iteration is under way.
            DriverError, OutOfPages, TimedOut: of the cache. The sequences are as before.
        """
        if self.planned is None:
            self._settle()
        group = self._held(request_id)
        if (
            self.planned is not None
            or group is None
            or group.status is Status.SWAPPED
            or group.live[0].generated == 0
        ):
            raise InvalidArgument(
                f"[Scheduler.reorder] request {request_id!r} has no sequences at work: call it after "
                "complete() of an iteration that sampled it"
            )
        live = group.live
        if len(sources) != len(live) or not all(0 <= source < len(live) for source in sources):
            raise InvalidArgument(
                f"[Scheduler.reorder] sources {list(sources)} of {len(live)} live sequences"
            )
        changes: list[Change] = []
        for sequence, source in zip(live, sources, strict=True):
            changes.append((setattr, sequence, "known", live[source].known))
            changes.append((setattr, sequence, "output", list(live[source].output)))
        if group.status is Status.RUNNING and group.forked:  # otherwise one slot has their prompt, or none
            self._settled = False
            self._changing.append(group)
            before = [slot_of(sequence) for sequence in live]
            slots = self.cache.reorder(before, [before[source] for source in sources])
            lengths = self._lengths.copy()
            for slot in before:
                lengths[slot] = 0
            for sequence, source, slot in zip(live, sources, slots, strict=True):
                lengths[slot] = self._lengths[before[source]]
                changes += [
                    (setattr, sequence, "slot", slot),
                    (setattr, sequence, "computed", live[source].computed),
                    (setattr, sequence, "published", live[source].published),
                ]
            changes.append((setattr, self, "_lengths", lengths))
        self._note([*changes, (setattr, self, "_settled", True)])

    def _share(self, group: SampleGroup) -> None:
        """Publishes a prompt that is computed, and gives each sequence a slot that continues it."""
        if group.status is not Status.RUNNING:
            return  # it has ended since, or is computed again
        first, *others = group.live
        self._publish(first, first.computed)
        if group.forked:
            return
        self._changing.append(group)
        lengths = self._lengths.copy()
        changes: list[Change] = [
            (setattr, group, "forked", True),
            (setattr, self, "_lengths", lengths),
        ]
        for sequence, slot in zip(others, self.cache.fork(slot_of(first), len(others)), strict=True):
            lengths[slot] = lengths[slot_of(first)]
            changes += [
                (setattr, sequence, "slot", slot),
                (setattr, sequence, "computed", first.computed),
                (setattr, sequence, "published", first.published),
            ]
        self._note(changes)

    def _publish(self, sequence: TokenSequence, computed: int) -> None:
        """Puts what is new of a sequence's computed tokens into the cache's index."""
        request = sequence.group.request
        known = sequence.group.prompt_tokens + len(sequence.output)
        tokens = 0 if isinstance(request.prompt, int) else min(known, computed)
        if tokens - sequence.published >= self._unit:
            ids = sequence.ids(0, tokens)
            sequence.published = self.cache.publish(slot_of(sequence), ids, salt=request.salt)


_HELD = (Status.WAITING, Status.RUNNING, Status.SWAPPED)
_order = attrgetter("order")

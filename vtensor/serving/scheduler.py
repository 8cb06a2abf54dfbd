"""The tokens that each request computes in the next iteration, and the requests that make room for others.

First come, first served. The rules are those of vLLM's paper (Kwon et al., SOSP 2023, section 4.5): the
latest arrival is preempted first, a request's sequences all together; a single sequence is computed again,
several that share are swapped out. Prompts are computed in pieces beside the decoding sequences, under one
budget of tokens (Sarathi-Serve, Agrawal et al., OSDI 2024). The cache's ``step`` decides what fits.
"""

from __future__ import annotations

import time
from collections import abc
from itertools import repeat

from vtensor._base.arguments import integer, number, of_type, type_text
from vtensor.errors import InvalidArgument, OutOfPages
from vtensor.serving._books import Books, by_arrival
from vtensor.serving._commit import Change, commit, each, sets
from vtensor.serving.plans import Plan, SchedulerStats, Work, add_piece, decodes, slot_of, target
from vtensor.serving.promises import Promises
from vtensor.serving.requests import Request, SampleGroup, Status, TokenSequence, token_ids
from vtensor.serving.slots import KVCacheManager, fits_at_last


class Scheduler:
    """Plans iterations over a cache whose slots it owns.

    ::

        while scheduler.unfinished:
            plan = scheduler.plan()
            tokens = ...  # run the model over plan.work, choose a token for each of plan.sampled
            scheduler.complete(plan, tokens)

    Any call may raise, for an error of the cache or for Ctrl-C. It loses no request, token or slot; a request
    whose slots it was changing may be computed again. An iteration that is still :attr:`planned` can be
    completed by another call, or abandoned.

    Args:
        cache: a :class:`vtensor.KVCache`, or an object with its calls. Only the scheduler may alloc or free
            in it.
        token_budget: the most tokens computed in an iteration; at least one for each slot.
        patience: seconds that a request waits, with nothing else running, for memory that other processes of
            a shared budget hold. Then it fails. A request that would not fit even if they held none fails at
            once.
        promises: lets requests with long answers wait in host memory while a prompt has their room
            (:class:`vtensor.serving.Promises`). Those that have to make room go there too; without promises a
            single sequence is computed again. The cache must be able to swap.
        clock: seconds, as ``time.monotonic`` gives them.

    Raises InvalidArgument for a smaller budget, one that is no whole number, a patience below 0, or
    ``promises`` of another type. Call it from one thread.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        token_budget: int = 2048,
        patience: float = 60.0,
        promises: Promises | None = None,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
        if not hasattr(cache, "max_batch"):
            raise InvalidArgument(
                f"[Scheduler] cache is {type_text(type(cache))}: give a vtensor.KVCache, or an object with "
                "its calls"
            )
        token_budget = integer("Scheduler", "token_budget", token_budget)
        if token_budget < cache.max_batch:
            raise InvalidArgument(
                f"[Scheduler] token_budget={token_budget} for {cache.max_batch} slots, each of which may "
                "decode a token in an iteration: raise it, or make the cache with fewer slots"
            )
        self.patience = number("Scheduler", "patience", patience)
        if not self.patience >= 0:
            raise InvalidArgument(f"[Scheduler] patience is {patience}: it must be at least 0 seconds")
        if promises is not None:
            of_type("Scheduler", "promises", promises, Promises)
        self.cache = cache
        self.token_budget = token_budget
        self.promises = promises
        self._clock = clock
        self._began = 0.0  # when the iteration under way was planned
        self.stats = SchedulerStats()
        self._books = Books(cache)
        self.waiting, self.running = self._books.waiting, self._books.running
        self.swapped = self._books.swapped
        self.cancelled: list[SampleGroup] = []  # not in a plan yet
        self.planned: Plan | None = None
        """The iteration that is under way."""
        self.waits_for_others = False
        """The last plan is empty because other processes hold the memory: call again in a moment."""
        self._short_since: float | None = None  # since when memory is short, with no step granted since
        self._arrivals = 0
        self._refused = False  # memory was short, and no request has ended since
        self._prompts: list[SampleGroup] = []  # computed by the last iteration, to be shared before the next
        self._next = Plan()  # begins with the news of an iteration that was taken back, or interrupted
        self._invited: SampleGroup | None = None  # others have left for it, so it takes their room
        self._moved_tokens = 0  # to host memory and back, by the iteration that is planned

    @property
    def unfinished(self) -> int:
        """Number of requests that wait, run or are swapped out."""
        return len(self.waiting) + len(self.running) + len(self.swapped)

    @property
    def unreported(self) -> int:
        """Number of requests that failed or were cancelled, and that no complete iteration has named yet."""
        planned = 0 if self.planned is None else len(self.planned.failed) + len(self.planned.cancelled)
        return len(self.cancelled) + len(self._next.failed) + planned

    def add(self, request: Request) -> SampleGroup:
        """Queues a request after those that came before it.

        Raises InvalidArgument if its id is taken, or if the cache's slots are too small or too few for it.
        """
        self.check(request)
        group = SampleGroup(request, self._arrivals, self._clock())
        commit(
            [
                (self._books.groups.__setitem__, request.id, group),
                (self.waiting.append, group),
                *sets(self, _arrivals=group.order + 1),
            ]
        )
        return group

    def check(self, request: Request) -> None:
        """Raises as ``add`` does, and queues nothing."""
        of_type("Scheduler.add", "request", request, Request)
        if self._books.held(request.id) is not None:
            raise InvalidArgument(
                f"[Scheduler.add] request {request.id!r} is there already: choose another id"
            )
        if request.prompt_tokens + request.max_new_tokens > self.cache.max_len:
            raise InvalidArgument(
                f"[Scheduler.add] {request.prompt_tokens} tokens and {request.max_new_tokens} new ones, of "
                f"request {request.id!r}: the cache's max_len is {self.cache.max_len}"
            )
        if request.samples > self.cache.max_batch:
            raise InvalidArgument(
                f"[Scheduler.add] {request.samples} samples, of request {request.id!r}: the cache has "
                f"{self.cache.max_batch} slots"
            )

    def cancel(self, request_id: abc.Hashable) -> None:
        """Drops a request and frees its slots. The next plan has it in ``cancelled``.

        Raises:
            InvalidArgument: an unknown id; an iteration is under way.
            DriverError, TimedOut: errors of the cache. The request is still there.
        """
        if self.planned is not None:
            raise InvalidArgument("[Scheduler.cancel] an iteration is under way: complete it first")
        group = self._books.held(request_id)
        if group is None:
            raise InvalidArgument(f"[Scheduler.cancel] no request {request_id!r} waits, runs or is swapped")
        self._books.settle()
        self._books.settled = False
        changes = self._books.free(group, group.holders) + self._leave(group, Status.CANCELLED, "cancelled")
        self._books.note([*changes, (self.cancelled.append, group)])
        self._books.forget(group)
        self._books.settled = True

    # ------------------------------------------------------------------ planning

    def plan(self) -> Plan:
        """Plans the next iteration, and maps memory for it. The plan is empty if nothing can be computed now:
        call again while there are ``unfinished`` requests.

        Raises:
            InvalidArgument: the last iteration is not complete.
            DriverError, OutOfPages, NoFreeSlot, TimedOut: errors of the cache. No iteration is under way.
        """
        if self.planned is not None:
            raise InvalidArgument("[Scheduler.plan] the last one is not complete: call complete() first")
        self._books.settle()
        self._books.settled = False
        plan = self._next
        plan.cancelled = self.cancelled
        self._invited, self._moved_tokens = None, 0
        self.waits_for_others = False
        for group in self._prompts:
            self._share(plan, group)
        self._prompts = []
        self._let_leave(plan)
        left = len(plan.preempted)
        self._advance(plan)
        if len(plan.preempted) == left:
            self._admit(plan)
        if plan.work:
            self._books.look_ahead()
        own = sets(self, _began=self._clock(), cancelled=[], planned=plan, _next=Plan())
        commit([*own, *sets(self._books, settled=True)])
        return plan

    def _share(self, plan: Plan, group: SampleGroup) -> None:
        """Gives each sample of a computed prompt a slot. That takes memory where the system does not say
        which pages the kernel has copied: then of the latest requests."""
        waited = False
        while True:
            try:
                return self._books.share(group)
            except OutOfPages:
                if len(self.running) > 1:
                    self._preempt(plan, self.running[-1])
                elif waited:
                    self._fail(plan, group)
                else:  # memory may still be on its way out
                    fits_at_last(self.cache, self._books.lengths)
                    waited = True

    def _advance(self, plan: Plan) -> None:
        """Gives the running requests their tokens, and takes memory of the latest ones if it is short."""
        while True:
            lengths = self._plan_running(plan)
            if not self.running:
                return
            if self._step(lengths, alone=len(self.running) == 1):
                self._books.lengths = lengths
                self._short_since = None
                return
            # A single request fails or waits for other processes. While it waits, it keeps nothing that they
            # may wait for.
            if len(self.running) > 1 or self._may_wait(lengths):
                self._preempt(plan, self.running[-1])
            else:
                self._fail(plan, self.running[0])

    def _plan_running(self, plan: Plan) -> list[int]:
        """Plans the running requests. Returns the lengths that the slots need."""
        decoding: list[TokenSequence] = []
        tails: list[TokenSequence] = []  # prompts of several samples that lack a token
        prompts: list[TokenSequence] = []
        for group in self.running:
            one_left = decoding if group.forked else tails
            for sequence in group.holders:
                if sequence.known - sequence.computed == 1:
                    one_left.append(sequence)
                else:
                    prompts.append(sequence)
        lengths = self._books.lengths.copy()
        for sequence in decoding:
            lengths[slot_of(sequence)] = sequence.known
        plan.work = [Work(sequence, sequence.computed, sequence.known) for sequence in decoding]
        plan.sampled = list(enumerate(decoding))
        plan.tokens = len(decoding)
        for sequence in tails + prompts:
            stop = add_piece(plan, sequence, self.token_budget - plan.tokens)
            slot = slot_of(sequence)
            lengths[slot] = max(lengths[slot], stop)
        return lengths

    def _admit(self, plan: Plan) -> None:
        """Admits requests in order of arrival, until one does not fit. Only requests that have left are
        overtaken."""
        announced: set[SampleGroup] = set()  # by this plan
        while not (self._refused and self.running):
            waiting = next((group for group in self.waiting if group not in announced), None)
            group = self._first_in_line(waiting, announced)
            if group is None or plan.tokens + len(group.holders) > self.token_budget:
                break
            came_back = group.status is Status.SWAPPED
            if not came_back and not self._has_slots(group):
                break
            fits = self._bring_back(plan, group) if came_back else self._place(plan, group)
            if fits and group in self._books.announced:
                announced.add(group)
            if fits:
                continue
            if self.running:
                self._refused = True
            elif self.waits_for_others:
                break
            else:
                self._fail(plan, group)

    def _first_in_line(self, waiting: SampleGroup | None, announced: set[SampleGroup]) -> SampleGroup | None:
        """The request that gets memory next: the earliest, unless it has left and can stay away. While
        announced prompts are mapped, none comes back."""
        if self._invited is not None and waiting is self._invited:
            return waiting
        back = self.swapped[0] if self.swapped and not announced else None
        if waiting is None or back is None:
            return waiting or back
        if back.left_at is not None and self._is_worth(waiting, []):
            return waiting
        return min(waiting, back, key=by_arrival)

    def _has_slots(self, group: SampleGroup) -> bool:
        others = [*self.running, *self.swapped, *self._books.announced]
        taken = sum(len(other.live) for other in others if other is not group)
        return taken + len(group.live) <= self.cache.max_batch

    def _let_leave(self, plan: Plan) -> None:
        """Moves requests with long answers to host memory if the first waiting one found no room, and what it
        gains is worth what they lose."""
        if self.promises is None or not (self._refused and self.waiting):
            return
        first = self.waiting[0]
        needed = first.prompt_tokens + 2 * self._books.unit
        if sum(self._books.lengths) < needed:
            return  # not even all of them have it
        leavers = self.promises.leavers(needed, self.running)
        if not leavers or not self._has_slots(first) or not self._is_worth(first, leavers):
            return
        if all(self._swap_out(plan, group) for group in leavers):
            self._invited, self._refused = first, False
            self.stats.left += len(leavers)

    def _is_worth(self, group: SampleGroup, leavers: list[SampleGroup]) -> bool:
        promises, now = self.promises, self._clock()
        return promises is not None and promises.worth(group, leavers, self.running, self.swapped, now)

    def _place(self, plan: Plan, group: SampleGroup) -> bool:
        """Gives a waiting request a slot, and memory for its whole prompt: a piece of it would be lost again
        as soon as the next piece found no room. If the cache looks ahead and other requests run, the mapper
        maps it first, and the request begins with the next iteration."""
        slot = self._books.slot_for(group)
        if slot is None:
            return False
        sequence, covered = group.live[0], self.cache.length(slot)
        prompt = target(sequence)
        lengths = self._books.lengths.copy()
        lengths[slot] = prompt
        planned = self._books.with_prompts(lengths)
        # `fits` comes first: a refused step has given up prefixes that later requests would have found. A
        # request that waited for others comes back with room for more than it had, so that it makes progress
        # each time.
        wanted = planned
        if self._short_since is not None:
            wanted = planned.copy()
            wanted[slot] = min(prompt + self._books.unit, group.prompt_tokens + group.request.max_new_tokens)
        asks = (self.running and group is not self._invited) or self._short_since is not None
        if asks and not self.cache.fits(wanted):
            placed = False
        elif asks and self.running and self._books.must_wait(group, lengths):
            self._books.announce(group, slot, covered)
            return True
        else:
            placed = self._step(lengths, alone=not self.running)
        if not placed:
            if not self.running:
                self._may_wait(wanted)
            self._books.withdraw(group, slot)
            return False
        self._enter(plan, group, slot, covered, sets(self._books, lengths=lengths))
        add_piece(plan, sequence, self.token_budget - plan.tokens)
        return True

    def _enter(self, plan: Plan, group: SampleGroup, slot: int, covered: int, changes: list[Change]) -> None:
        """Makes a waiting request a running one, in a slot that has its first tokens."""
        sequence, stats = group.live[0], self.stats
        changes += sets(sequence, slot=slot, computed=covered, published=covered)
        if not group.admitted:
            counts = sets(
                stats,
                admitted=stats.admitted + 1,
                prompt_tokens=stats.prompt_tokens + group.prompt_tokens,
                reused_tokens=stats.reused_tokens + covered,
            )
            changes += [(plan.admitted.append, group), *sets(group, admitted=True), *counts]
        self._books.note([*changes, *self._books.move(group, Status.RUNNING)])

    def _bring_back(self, plan: Plan, group: SampleGroup) -> bool:
        """Swaps a request in, with room for one more token of each sequence, or leaves it where it was."""
        lengths = self._books.lengths.copy()
        back = [slot_of(sequence) for sequence in group.holders]
        for sequence, slot in zip(group.holders, back, strict=True):
            lengths[slot] = max(self.cache.length(slot), sequence.computed + 1)
        if self.running and not self.cache.fits(lengths):
            return False
        self._books.changing.append(group)
        alone = not self.running
        came_back = self.cache.swap_in(back)
        if not came_back and alone and fits_at_last(self.cache, lengths):
            came_back = self.cache.swap_in(back)
        if not came_back or not self._step(lengths, alone):
            if came_back:
                self.cache.swap_out(back)
            if not self.running:
                self._may_wait(lengths)
            self._books.note([])
            return False
        self._books.note(
            [
                (plan.swapped_in.extend, back),
                *sets(self._books, lengths=lengths),
                *sets(group, away=group.time_away(self._clock()), left_at=None),
                *self._books.move(group, Status.RUNNING),
            ]
        )
        self._moved_tokens += sum(sequence.computed for sequence in group.holders)
        for sequence in group.holders:
            add_piece(plan, sequence, 1)
        return True

    # ------------------------------------------------------------------ making room

    def _step(self, lengths: list[int], alone: bool) -> bool:
        """Steps the cache. A request that is ``alone`` waits for memory on its way out."""
        if self.cache.step(lengths):
            return True
        return alone and fits_at_last(self.cache, lengths) and self.cache.step(lengths)

    def _may_wait(self, lengths: list[int]) -> bool:
        """Whether to try a refused step again later: other processes are in its way, and no request here."""
        self.waits_for_others = False
        ask = getattr(self.cache, "waits_for_others", None)  # of a KVCache; others share with no process
        if ask is not None and ask(lengths):
            now = self._clock()
            if self._short_since is None:
                self._short_since = now
            self.waits_for_others = now - self._short_since < self.patience
        return self.waits_for_others

    def _preempt(self, plan: Plan, group: SampleGroup) -> None:
        stats, shared, first = self.stats, len(group.holders) > 1, group.live[0]
        swaps = (shared or self.promises is not None) and first.computed < target(first)  # else to be shared
        if swaps and self._swap_out(plan, group):
            return
        if not shared:  # published tokens are not computed again, unless memory is short until then
            self._books.publish(first, first.computed)
        self._books.note(
            [
                *self._books.free(group, group.holders),
                *self._books.wait(group),
                (plan.preempted.append, group),
                *sets(stats, recomputed=stats.recomputed + 1),
                *sets(self, _refused=True),
            ]
        )

    def _swap_out(self, plan: Plan, group: SampleGroup) -> bool:
        """Moves a request to host memory. False if that has no room."""
        changes = self._books.swap_out(group)
        if changes:
            self._moved_tokens += sum(sequence.computed for sequence in group.holders)
            changes += [
                (plan.preempted.append, group),
                *sets(group, left_at=self._clock()),
                *sets(self.stats, swapped=self.stats.swapped + 1),
                # Until a request ends: this one would be the first to go again.
                *sets(self, _refused=True),
            ]
            self._books.note(changes)
        return bool(changes)

    def _fail(self, plan: Plan, group: SampleGroup) -> None:
        tokens = max(sequence.known for sequence in group.live)
        reason = (
            f"{tokens} tokens in {len(group.live)} sequences do not fit into the cache's memory with nothing "
            "else running: give its pool a larger budget, free what else it holds, or ask for less"
        )
        if self._short_since is not None:
            reason += f"; other processes of the shared budget gave back too little in {self.patience:g} s"
        self._books.note(
            [
                *self._books.free(group, group.holders),
                *self._leave(group, Status.FAILED, reason),
                (plan.failed.append, group),
                *sets(self.stats, failed=self.stats.failed + 1),
            ]
        )
        self._books.forget(group)

    def _leave(self, group: SampleGroup, status: Status, reason: str = "") -> list[Change]:
        """Ends a request whose slots are free. A step that was refused may be granted now."""
        own = sets(self, _refused=False, _short_since=None)
        return [*self._books.move(group, status, reason), *own]

    # ------------------------------------------------------------------ completing

    def complete(self, plan: Plan, tokens: abc.Sequence[int | Exception] | None = None) -> list[SampleGroup]:
        """Completes an iteration: notes its computed tokens, and the chosen ones.

        Args:
            plan: the last plan.
            tokens: a token id for each of ``plan.sampled``, or an exception: then that request fails, and no
                other. None if only their number is known.

        Returns the requests that ended.

        Raises:
            InvalidArgument: another plan, another number of tokens, or no token ids; nothing was changed.
            DriverError, OutOfPages, TimedOut: errors of the cache. The iteration is still under way.
        """
        if plan is not self.planned:
            raise InvalidArgument(
                "[Scheduler.complete] this is not the iteration that is under way: give what plan() returned"
            )
        if tokens is not None and len(tokens) != len(plan.sampled):
            raise InvalidArgument(
                f"[Scheduler.complete] {len(tokens)} tokens, {len(plan.sampled)} sequences are due one: "
                "give a token for each of plan.sampled"
            )
        chosen = None if tokens is None else token_ids("Scheduler.complete", tokens)
        now = self._clock()
        self._books.settle()
        self._books.settled = False
        prompt_tokens = 0 if self.promises is None else plan.tokens - sum(map(decodes, plan.work))
        # An interrupted operation may have lost a slot.
        work = [(sequence, start, stop) for sequence, start, stop in plan.work if sequence.slot is not None]
        prompts = [s.group for s, start, stop in work if start < s.group.prompt_tokens <= stop]
        extended: list[TokenSequence] = []
        going: dict[SampleGroup, list[TokenSequence]] = {}
        errors: dict[SampleGroup, Exception] = {}
        for (_, sequence), token in zip(plan.sampled, chosen or repeat(None), strict=False):
            group = sequence.group
            if isinstance(token, Exception):
                errors.setdefault(group, token)
                continue
            extended.append(sequence)
            if sequence.generated + 1 == group.request.max_new_tokens or token in group.request.stop:
                going.setdefault(group, []).append(sequence)
        changes = [
            each(setattr, [s for s, _, _ in work], repeat("computed"), [stop for _, _, stop in work]),
            each(setattr, extended, repeat("known"), [s.known + 1 for s in extended]),
        ]
        if chosen is not None:
            ids = chosen if not errors else [token for token in chosen if not isinstance(token, Exception)]
            changes.append(each(list.append, [sequence.output for sequence in extended], ids))
        for group, error in errors.items():
            going.pop(group, None)
            changes += self._books.free(group, group.holders)
            changes += self._leave(group, Status.FAILED, f"{type(error).__name__}: {error}")
        ended_groups = list(errors)
        for group, sequences in going.items():
            changes += self._books.end_sequences(group, sequences)
            changes += sets(self, _refused=False)
            if len(sequences) == len(group.live):
                changes += self._leave(group, Status.FINISHED)
                ended_groups.append(group)
        stats = self.stats
        counts = sets(
            stats,
            computed_tokens=stats.computed_tokens + plan.tokens,
            finished=stats.finished + len(ended_groups) - len(errors),
            failed=stats.failed + len(errors),
        )
        own = [*sets(plan, ended=ended_groups), *sets(self, _prompts=prompts, planned=None)]
        self._books.note([*changes, *counts, *own])
        for group in ended_groups:
            self._books.forget(group)
        self._books.settled = True
        if self.promises is not None and plan.work:
            self.promises.pace.note(prompt_tokens, now - self._began, self._moved_tokens)
            for group in prompts:
                if group.first_token_at is None and group.live:
                    group.first_token_at = now
                    self.promises.note_first_token(group)
            for group in ended_groups:
                self.promises.note_end(group, now)
        return ended_groups

    def abandon(self, plan: Plan) -> None:
        """Takes back an iteration that could not be computed: its tokens are planned again.

        Raises InvalidArgument for any plan but the last.
        """
        if plan is not self.planned:
            raise InvalidArgument(
                "[Scheduler.abandon] this is not the iteration that is under way: give what plan() returned"
            )
        news = Plan(admitted=plan.admitted, failed=plan.failed, swapped_in=plan.swapped_in)
        commit(sets(self, cancelled=plan.cancelled + self.cancelled, _next=news, planned=None))

    def reorder(self, request_id: abc.Hashable, sources: abc.Sequence[int]) -> None:
        """A step of a beam search, between two iterations: the request's i-th live sequence continues the
        ``sources[i]``-th. Nothing is copied.

        Raises:
            InvalidArgument: the request's sequences have no tokens of their own, or are swapped out; sources
                are not its own; an iteration is under way.
            DriverError, OutOfPages, TimedOut: errors of the cache. The sequences are as before.
        """
        if self.planned is None:
            self._books.settle()
        group = self._books.held(request_id)
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
                f"[Scheduler.reorder] sources {list(sources)} of {len(live)} live sequences: give each the "
                f"place of one, from 0 to {len(live) - 1}"
            )
        changes: list[Change] = []
        for sequence, source in zip(live, sources, strict=True):
            changes += sets(sequence, known=live[source].known, output=list(live[source].output))
        if group.status is Status.RUNNING and group.forked:  # otherwise one slot has their prompt, or none
            changes += self._books.reorder(group, sources)
        self._books.note([*changes, *sets(self._books, settled=True)])

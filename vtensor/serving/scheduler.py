"""The tokens that each request computes in the next iteration, and the requests that make room for others.

First come, first served. The rules are those of vLLM's paper (Kwon et al., SOSP 2023, section 4.5): the
latest arrival is preempted first, a request's sequences all together; a single sequence is computed again,
several that share are swapped out. Prompts are computed in pieces beside the decoding sequences, under one
budget of tokens (Sarathi-Serve, Agrawal et al., OSDI 2024). The cache's ``step`` decides what fits.
"""

from __future__ import annotations

import time
from collections import abc
from itertools import islice, repeat

from vtensor._arguments import number
from vtensor.errors import InvalidArgument
from vtensor.serving._announcements import Announcements
from vtensor.serving._books import Books, by_arrival
from vtensor.serving._commit import Change, commit, each
from vtensor.serving._walks import Walks
from vtensor.serving.layers import Layering
from vtensor.serving.plans import Plan, SchedulerStats, Work, add_piece, next_piece, slot_of, target
from vtensor.serving.promises import Promises
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
        layered: whether prompts that find no room for all of their K and V are computed band by band
            (:class:`vtensor.serving.Layering`), and wait in host memory for their turn to decode. The cache
            needs ``bands=`` for that, and the model must call ``plan.enter(layer)``.
        promises: decides which prompts may be computed now; all that fit unless given.
        clock: seconds, as ``time.monotonic`` gives them.

    Raises InvalidArgument for a smaller budget, a patience below 0, or a cache without bands. Call it from
    one thread.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        token_budget: int = 2048,
        patience: float = 60.0,
        layered: Layering | bool = False,
        promises: Promises | None = None,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
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
        self.layering: Layering | None = Layering() if layered is True else layered or None
        if self.layering is not None:
            self.layering.open(cache)
        self.promises = promises
        self._clock = clock
        self._began = 0.0  # when the iteration under way was planned
        self.stats = SchedulerStats()
        self._books = Books(cache)
        self._walks = Walks(self._books, self.layering, token_budget)
        self._announcements = Announcements(cache)
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
        self._begun_tokens = 0  # still to come, of prompts that are being computed
        self._sequences = 0  # of running requests

    @property
    def unfinished(self) -> int:
        """Number of requests that wait, run or are swapped out."""
        return len(self.waiting) + len(self.running) + len(self.swapped)

    def add(self, request: Request) -> SampleGroup:
        """Queues a request after those that came before it.

        Raises InvalidArgument if its id is taken, or if the cache's slots are too small or too few for it.
        """
        if not isinstance(request, Request):
            raise InvalidArgument(f"[Scheduler.add] {request!r} is no Request: make one")
        if self._books.held(request.id) is not None:
            raise InvalidArgument(
                f"[Scheduler.add] request {request.id!r} is there already: choose another id"
            )
        check_fits("Scheduler.add", request, self.cache)
        group = SampleGroup(request, self._arrivals)
        commit(
            [
                (self._books.groups.__setitem__, request.id, group),
                (self.waiting.append, group),
                (setattr, self, "_arrivals", group.order + 1),
            ]
        )
        return group

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
        self._settle()
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
        self._settle()
        self._books.settled = False
        plan = self._next
        plan.work, plan.sampled, plan.tokens, plan.cancelled = [], [], 0, self.cancelled
        plan.walk = None
        self.waits_for_others = False
        for group in self._prompts:
            self._books.share(group)
        self._prompts = []
        self._advance(plan)
        admits = not plan.preempted and not self._admit(plan)
        if self.layering is not None:
            self._plan_walk(plan, admits)
        if plan.work:
            self._announcements.look_ahead(self._books.lengths, self._walks.parted)
        commit(
            [
                (setattr, self, "_began", self._clock()),
                (setattr, self, "cancelled", []),
                (setattr, self, "planned", plan),
                (setattr, self, "_next", Plan()),
                (setattr, self._books, "settled", True),
            ]
        )
        return plan

    def _advance(self, plan: Plan) -> None:
        """Gives the running requests their tokens, and takes memory of the latest ones if it is short."""
        while True:
            lengths = self._plan_running(plan)
            if not self.running:
                return
            if self.cache.step(lengths):
                self._books.lengths = lengths
                self._short_since = None
                return
            plan.work, plan.sampled, plan.tokens = [], [], 0
            if self._walks.send_away():
                continue
            self._make_way(plan, [group for group in self.running if self._walks.holds(group)], lengths)

    def _plan_running(self, plan: Plan) -> list[int]:
        """Plans the running requests, except those that are computed band by band. Returns the lengths that
        the slots need."""
        decoding: list[TokenSequence] = []
        tails: list[TokenSequence] = []  # prompts of several samples that lack a token
        prompts: list[TokenSequence] = []
        begun = more = 0
        for group in self.running:
            if group.layered:
                more += 1
                begun += target(group.live[0]) - group.live[0].computed
                continue
            live, one_left = group.live, decoding
            if not group.forked:
                more += len(live) - 1
                live, one_left = live[:1], tails
            for sequence in live:
                if sequence.known - sequence.computed == 1:
                    one_left.append(sequence)
                else:
                    prompts.append(sequence)
                    begun += sequence.known - sequence.computed
        lengths = self._books.lengths.copy()
        for sequence in decoding:
            lengths[slot_of(sequence)] = sequence.known
        plan.work = [Work(sequence, sequence.computed, sequence.known) for sequence in decoding]
        plan.sampled = list(enumerate(decoding))
        plan.tokens = len(decoding)
        for sequence in tails + prompts:
            if piece := next_piece(plan, sequence, sequence.computed, self.token_budget):
                add_piece(plan, piece)
                slot = slot_of(sequence)
                lengths[slot] = max(lengths[slot], piece.stop)
        self._begun_tokens = begun
        self._sequences = len(decoding) + len(tails) + len(prompts) + more
        return lengths

    def _admit(self, plan: Plan) -> bool:
        """Admits requests in order of arrival, until one does not fit: no other overtakes it. Returns whether
        some of them begin with the next iteration."""
        announced: set[SampleGroup] = set()  # by this plan
        while not (self._refused and self.running):
            waiting = (group for group in self.waiting if group not in announced)
            group = min([*islice(waiting, 1), *self.swapped[:1]], key=by_arrival, default=None)
            if group is None:
                break
            if self._walks.holds_up(group):
                break
            came_back = group.status is Status.SWAPPED
            if plan.tokens + len(group.holders) > self.token_budget:
                break
            if not came_back and not self._may_begin(group):
                break
            fits = self._bring_back(plan, group) if came_back else self._place(plan, group)
            if fits and group in self._announcements:
                announced.add(group)
            if fits or self._walks.send_away(behind=group.order):
                continue
            if self.running:
                self._refused = True
            elif self.waits_for_others:
                break
            elif not (self._walks.part_from_prefixes(group) or self._take_bands(plan, group)):
                self._fail(plan, group)
        return bool(announced)

    def _may_begin(self, group: SampleGroup) -> bool:
        """Whether there are slots for a waiting request, and the promises to others leave time for it."""
        taken = self._sequences + sum(len(other.live) for other in self.swapped)
        taken += self._announcements.sequences_beside(group)
        if taken + len(group.live) > self.cache.max_batch:
            return False
        if self.promises is None or not self.running:
            return True
        tokens = self._begun_tokens + group.prompt_tokens
        return self.promises.allow(tokens, self.running, self._clock())

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
        planned = self._announcements.with_prompts(lengths)
        # `fits` comes first: a refused step has given up prefixes that later requests would have found. A
        # request that waited for others comes back with room for more than it had, so that it makes progress
        # each time.
        wanted = self._walks.room_beside(planned, slot)
        if self._short_since is not None:
            wanted = planned.copy()
            wanted[slot] = min(prompt + self._books.unit, group.prompt_tokens + group.request.max_new_tokens)
        asks = self.running or self._short_since is not None
        if asks and not self.cache.fits(wanted):
            placed = False
        elif self.running and self._announcements.must_wait(group, lengths):
            self._announce(group, slot, covered)
            return True
        else:
            placed = self.cache.step(lengths)
        if not placed:
            if not self.running:
                self._may_wait(wanted)
            self._withdraw(group, slot)
            return False
        self._enter(plan, group, slot, covered, [(setattr, self._books, "lengths", lengths)])
        if piece := next_piece(plan, sequence, covered, self.token_budget):
            add_piece(plan, piece)
        return True

    def _announce(self, group: SampleGroup, slot: int, covered: int) -> None:
        """Announces a waiting request that begins with the next iteration: its prompt is mapped before."""
        self._books.note(
            [
                self._announcements.announce(group),
                (self._books.lengths.__setitem__, slot, covered),
                (setattr, group.live[0], "slot", slot),
            ]
        )

    def _withdraw(self, group: SampleGroup, slot: int) -> None:
        """Frees the slot of a request that cannot begin yet."""
        self.cache.free(slot)
        self._books.note(
            [
                (self._books.lengths.__setitem__, slot, 0),
                (setattr, group.live[0], "slot", None),
                self._announcements.drop(group),
            ]
        )

    def _enter(self, plan: Plan, group: SampleGroup, slot: int, covered: int, changes: list[Change]) -> None:
        """Makes a waiting request a running one, in a slot that has its first tokens."""
        sequence, stats = group.live[0], self.stats
        changes += [
            (setattr, sequence, "slot", slot),
            (setattr, sequence, "computed", covered),
            (setattr, sequence, "published", covered),
        ]
        if not group.admitted:
            changes += [
                (setattr, group, "admitted", True),
                (plan.admitted.append, group),
                (setattr, stats, "admitted", stats.admitted + 1),
                (setattr, stats, "prompt_tokens", stats.prompt_tokens + group.prompt_tokens),
                (setattr, stats, "reused_tokens", stats.reused_tokens + covered),
            ]
        self._books.note([*changes, *self._books.run(group), self._announcements.drop(group)])
        self._begun_tokens += target(sequence) - covered
        self._sequences += len(group.live)

    def _bring_back(self, plan: Plan, group: SampleGroup) -> bool:
        """Swaps a request in, with room for one more token of each sequence, or leaves it where it was."""
        lengths = self._books.lengths.copy()
        back = [slot_of(sequence) for sequence in group.holders]
        for sequence, slot in zip(group.holders, back, strict=True):
            lengths[slot] = max(self.cache.length(slot), sequence.computed + 1)
        layering = self.layering if group.layered else None
        if self.running:
            wanted = self._walks.room_beside(lengths, back[0])
            fits = layering.fits(back[0], wanted[back[0]]) if layering else self.cache.fits(wanted)
            if not fits:
                return False
        self._books.changing.append(group)
        came_back = layering.bring_back(back[0]) if layering else self.cache.swap_in(back)
        if not came_back or not self.cache.step(lengths):
            if came_back and layering is not None:
                layering.send_away(back[0])
            elif came_back:
                self.cache.swap_out(back)
            if not self.running:
                self._may_wait(lengths)
            self._books.note([])
            return False
        self._books.note(
            [
                (plan.swapped_in.extend, back),
                (setattr, self._books, "lengths", lengths),
                (setattr, group, "layered", False),
                *self._books.run(group),
            ]
        )
        self._sequences += len(group.live)
        for sequence in group.holders:
            add_piece(plan, Work(sequence, sequence.computed, sequence.computed + 1))
        return True

    def _plan_walk(self, plan: Plan, admits: bool) -> None:
        """Plans what is computed band by band: the pieces of running requests, then, with ``admits``, waiting
        prompts that find no room for all of their K and V."""
        while not self._walks.go_on(plan):
            due = self._walks.due
            lengths = self._books.lengths.copy()
            lengths[slot_of(due[0])] = target(due[0])
            self._make_way(plan, [sequence.group for sequence in due], lengths)
        admits = admits and self._walks.admits
        while admits and self.waiting and self.running and not plan.preempted:
            group = self.waiting[0]
            if group.request.samples > 1 or plan.tokens == self.token_budget or not self._may_begin(group):
                break
            admits = self._place_by_bands(plan, group)
        plan.walk = self._walks.walk()

    def _place_by_bands(self, plan: Plan, group: SampleGroup) -> bool:
        """Gives a waiting request a slot, and a place in an iteration's walk, if there is room for a few of
        its bands at a time."""
        slot = self._books.slot_for(group)
        if slot is None:
            return False
        covered = self.cache.length(slot)
        piece = next_piece(plan, group.live[0], covered, self.token_budget)
        if piece is None or not self._walks.fits(piece, slot):
            self._withdraw(group, slot)
            return False
        changes: list[Change] = [
            (self._books.lengths.__setitem__, slot, covered),
            (setattr, group, "layered", True),
            (setattr, self.stats, "layered", self.stats.layered + 1),
        ]
        self._enter(plan, group, slot, covered, changes)
        self._walks.add(plan, piece)
        return True

    # ------------------------------------------------------------------ making room

    def _may_wait(self, lengths: list[int]) -> bool:
        """Whether to try a refused step again later: other processes are in its way, and no request here."""
        self.waits_for_others = False
        if waits_for_others(self.cache, lengths):
            now = self._clock()
            if self._short_since is None:
                self._short_since = now
            self.waits_for_others = now - self._short_since < self.patience
        return self.waits_for_others

    def _make_way(self, plan: Plan, victims: list[SampleGroup], lengths: list[int]) -> None:
        """Makes room: by the latest of several running requests. A single one, which needs these lengths,
        fails or waits for other processes. While it waits, it keeps nothing that they may wait for."""
        latest = max(victims, key=by_arrival)
        if len(victims) > 1 or self._may_wait(lengths) or self._may_part(latest):
            self._preempt(plan, latest)
        else:
            self._fail(plan, latest)

    def _may_part(self, group: SampleGroup) -> bool:
        """Whether a single request gets more room by going to host memory: prefixes that some of its bands
        share can be given up once none shares them. Tried once at each length."""
        tokens = group.live[0].known
        if self.layering is None or group.layered or len(group.live) > 1 or group.parted_at == tokens:
            return False
        group.parted_at = tokens
        return True

    def _take_bands(self, plan: Plan, group: SampleGroup) -> bool:
        """Takes the bands that stayed of the latest other request in host memory, which has no room for them:
        that request is computed again. Returns whether there was one."""
        held = [other for other in self.swapped if other is not group and other.layered]
        held = [other for other in held if self._walks.holds(other)]
        if held:
            self._preempt(plan, max(held, key=by_arrival))
        return bool(held)

    def _preempt(self, plan: Plan, group: SampleGroup) -> None:
        stats, shared = self.stats, len(group.holders) > 1
        swaps = shared or (self.layering is not None and not group.layered)
        if swaps and (changes := self._books.swap_out(group)):
            changes.append((setattr, stats, "swapped", stats.swapped + 1))
        else:
            if not shared:  # published tokens are not computed again, unless memory is short until then
                self._books.publish(group.live[0], group.live[0].computed)
            changes = [*self._books.free(group, group.holders), *self._books.wait(group)]
            changes.append((setattr, stats, "recomputed", stats.recomputed + 1))
        # Until a request ends: this one would be the first to go again.
        self._books.note([*changes, (plan.preempted.append, group), (setattr, self, "_refused", True)])

    def _fail(self, plan: Plan, group: SampleGroup) -> None:
        tokens = max(sequence.known for sequence in group.live)
        reason = (
            f"{tokens} tokens in {len(group.live)} sequences do not fit into the cache's memory with nothing "
            "else running: give its pool a larger budget, or ask for less"
        )
        if self._short_since is not None:
            reason += f"; other processes of the shared budget gave back too little in {self.patience:g} s"
        self._books.note(
            [
                *self._books.free(group, group.holders),
                *self._leave(group, Status.FAILED, reason),
                (plan.failed.append, group),
                (setattr, self.stats, "failed", self.stats.failed + 1),
            ]
        )
        self._books.forget(group)

    def _leave(self, group: SampleGroup, status: Status, reason: str = "") -> list[Change]:
        """Ends a request whose slots are free. A step that was refused may be granted now."""
        return [
            *self._books.leave(group, status, reason),
            self._announcements.drop(group),
            self._walks.one_has_ended(),
            (setattr, self, "_refused", False),
            (setattr, self, "_short_since", None),
        ]

    def _settle(self) -> None:
        """Makes books and cache agree after an interrupted operation."""
        if not self._books.settled:
            self._announcements.clear()
            self._books.settle()

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
            raise InvalidArgument("[Scheduler.complete] this is not the iteration that is under way")
        if tokens is not None and len(tokens) != len(plan.sampled):
            raise InvalidArgument(
                f"[Scheduler.complete] {len(tokens)} tokens, {len(plan.sampled)} sequences are due one"
            )
        chosen = None if tokens is None else token_ids("Scheduler.complete", tokens)
        now = self._clock()
        if plan.walk is not None:
            plan.walk.finish()
        self._settle()
        self._books.settled = False
        computed: list[TokenSequence] = []
        stops: list[int] = []
        prompts: list[SampleGroup] = []
        for sequence, start, stop in plan.work:
            if sequence.slot is not None:  # an interrupted operation may have lost it
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
            changes += self._books.free(group, group.holders)
            changes += self._leave(group, Status.FAILED, f"{type(error).__name__}: {error}")
        ended_groups = list(errors)
        for group, sequences in going.items():
            changes += self._books.end_sequences(group, sequences)
            changes.append((setattr, self, "_refused", False))
            if len(sequences) == len(group.live):
                changes += self._leave(group, Status.FINISHED)
                ended_groups.append(group)
        if plan.walk is not None:
            changes += self._walks.computed(plan.walk, ended_groups)
        self._books.note(
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
            self._books.forget(group)
        self._books.settled = True
        if self.promises is not None and plan.work:
            prompt_tokens = plan.tokens - len(plan.sampled) + len(prompts)
            self.promises.note_iteration(prompt_tokens, now - self._began)
            for group in prompts:
                if group.first_token_at is None and group.live:
                    group.first_token_at = now
                    self.promises.note_first_token(group, now)
            for group in ended_groups:
                longest = max(sequence.generated for sequence in group.sequences)
                self.promises.predictor.observe(group.request, longest)
        if plan.walk is not None:
            self._walks.measure(plan.walk, now - self._began, self._clock)
        return ended_groups

    def abandon(self, plan: Plan) -> None:
        """Takes back an iteration that could not be computed: its tokens are planned again.

        Raises InvalidArgument for any plan but the last.
        """
        if plan is not self.planned:
            raise InvalidArgument("[Scheduler.abandon] this is not the iteration that is under way")
        news = Plan(admitted=plan.admitted, failed=plan.failed, swapped_in=plan.swapped_in)
        changes: list[Change] = [(setattr, self, "cancelled", plan.cancelled + self.cancelled)]
        if plan.walk is not None:
            changes += self._walks.taken_back(plan.walk)
        commit([*changes, (setattr, self, "_next", news), (setattr, self, "planned", None)])

    def reorder(self, request_id: abc.Hashable, sources: abc.Sequence[int]) -> None:
        """A step of a beam search, between two iterations: the request's i-th live sequence continues the
        ``sources[i]``-th. Nothing is copied.

        Raises:
            InvalidArgument: the request's sequences have no tokens of their own, or are swapped out; sources
                are not its own; an iteration is under way.
            DriverError, OutOfPages, TimedOut: errors of the cache. The sequences are as before.
        """
        if self.planned is None:
            self._settle()
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
                f"[Scheduler.reorder] sources {list(sources)} of {len(live)} live sequences"
            )
        changes: list[Change] = []
        for sequence, source in zip(live, sources, strict=True):
            changes.append((setattr, sequence, "known", live[source].known))
            changes.append((setattr, sequence, "output", list(live[source].output)))
        if group.status is Status.RUNNING and group.forked:  # otherwise one slot has their prompt, or none
            changes += self._books.reorder(group, sources)
        self._books.note([*changes, (setattr, self._books, "settled", True)])

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
from itertools import islice, repeat
from operator import attrgetter
from typing import cast

from vtensor._arguments import number
from vtensor.errors import InvalidArgument, NoFreeSlot
from vtensor.kv import KVCache
from vtensor.serving._commit import Change, commit, each
from vtensor.serving.layers import Layering
from vtensor.serving.plans import Plan, SchedulerStats, Walk, Work, plan_sampling, slot_of, target
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

    Any call may raise, for an error of the cache or for Ctrl-C. No request, token or slot is lost with it; a
    request whose slots it was changing may be computed again. An iteration that is still :attr:`planned` can
    be completed by another call, or abandoned.

    Args:
        cache: a :class:`vtensor.KVCache`, or what has its calls. Nobody else may alloc or free in it.
        token_budget: tokens computed in an iteration at most; at least one for each slot.
        patience: seconds that a request waits, with nothing else running, for memory that other processes of
            a shared budget hold. Then it fails; one that would not fit even if they held none does at once.
        layered: whether prompts that find no room for all of their K and V are computed band by band
            (:class:`vtensor.serving.Layering`), and wait in host memory for their turn to decode. The cache
            needs ``bands=`` for that, and the model must call ``plan.enter(layer)``.
        promises: which prompts may be computed now; all that fit unless given.
        clock: seconds, as ``time.monotonic`` gives them.

    Raises InvalidArgument for a smaller budget, a patience below 0, or a cache without bands. Calls come from
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
        self._looks_ahead = isinstance(cache, KVCache) and cache.lookahead > 0
        self._lengths = [0] * cache.max_batch
        self._groups: dict[abc.Hashable, SampleGroup] = {}  # by id, and some that have just ended
        self._arrivals = 0
        self._refused = False  # memory was short, and no request has ended since
        self._walk_refused = (
            False  # a walk was cut off, as by a host without memory, and none has ended since
        )
        self._prompts: list[SampleGroup] = []  # computed by the last iteration, to be shared before the next
        self._next = Plan()  # begins with the news of an iteration that was taken back, or cut off
        self._settled = True  # books and cache agree; not while an operation changes them, or was cut off
        self._changing: list[SampleGroup] = []  # whose slots an operation is changing
        # Waiting ones, the first of their queue, that have a slot already, for which the mapper maps pages.
        self._announced: list[SampleGroup] = []
        self._walk_short: SampleGroup | None = None  # for whose next piece the last plan had no room
        self._begun_tokens = 0  # of prompts that are being computed, still to come

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
        plan.walk = None
        self.waits_for_others = False
        for group in self._prompts:
            self._share(group)
        self._prompts = []
        self._advance(plan)
        admits = not plan.preempted and not self._admit(plan)
        if self.layering is not None:
            self._plan_walk(plan, self.layering, admits)
        if self._looks_ahead and plan.work:
            self._look_ahead(plan)
        commit(
            [
                (setattr, self, "_began", self._clock()),
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
            lengths = self._plan_running(plan)
            if self.cache.step(lengths):
                self._lengths = lengths
                self._short_since = None
                return
            plan.work, plan.sampled, plan.tokens = [], [], 0
            if self._send_away():
                continue
            self._make_way(plan, [group for group in self.running if self._holds(group)], lengths)

    def _plan_running(self, plan: Plan) -> list[int]:
        """Plans the running requests but those that are computed band by band. Returns the lengths that the
        slots need."""
        prompts: list[TokenSequence] = []
        work, sampled = plan.work, plan.sampled
        lengths = self._lengths.copy()
        begun = 0
        for group in self.running:
            if group.layered:
                begun += target(group.live[0]) - group.live[0].computed
                continue
            forked = group.forked
            for sequence in group.live if forked else group.live[:1]:
                start = sequence.computed
                stop = start + 1
                if sequence.known != stop:
                    prompts.append(sequence)
                    begun += sequence.known - start
                    continue
                sampled += [(len(work), follower) for follower in ([sequence] if forked else group.live)]
                work.append(Work(sequence, start, stop))
                slot = slot_of(sequence)
                if lengths[slot] < stop:
                    lengths[slot] = stop
        plan.tokens = len(work)
        for sequence in prompts:
            if piece := self._piece(plan.tokens, sequence, sequence.computed):
                self._plan_piece(plan, piece)
                slot = slot_of(sequence)
                lengths[slot] = max(lengths[slot], piece.stop)
        self._begun_tokens = begun
        return lengths

    def _piece(self, tokens: int, sequence: TokenSequence, start: int) -> Work | None:
        """As much of what a sequence has to compute from ``start`` on as the budget leaves beside so many
        tokens."""
        stop = min(target(sequence), start + self.token_budget - tokens)
        return Work(sequence, start, stop) if stop > start else None

    def _plan_piece(self, plan: Plan, piece: Work) -> None:
        plan.work.append(piece)
        plan.tokens += piece.stop - piece.start
        plan_sampling(plan, len(plan.work) - 1, piece)

    def _admit(self, plan: Plan) -> bool:
        """Lets requests in, in the order of arrival, until one does not fit: nobody overtakes it. Whether
        some of them begin with the next iteration."""
        announced: set[SampleGroup] = set()  # by this plan
        while not (self._refused and self.running):
            waiting = (group for group in self.waiting if group not in announced)
            group = min([*islice(waiting, 1), *self.swapped[:1]], key=_order, default=None)
            if group is None:
                break
            came_back = group.status is Status.SWAPPED
            if not came_back and self._by_bands():
                break  # it would overtake those
            if self._walk_short is not None and self._walk_short.order < group.order:
                break  # it would take the room that the next piece waits for
            if plan.tokens + len(group.holders) > self.token_budget:
                break
            if not came_back and not self._may_begin(group):
                break
            fits = self._bring_back(plan, group) if came_back else self._place(plan, group)
            if fits and group in self._announced:
                announced.add(group)
            if fits or self._send_away(group.order):
                continue
            if self.running:
                self._refused = True
            elif self.waits_for_others:
                break
            elif not self._part_from_prefixes(group):
                self._fail(plan, group)
        return bool(announced)

    def _may_begin(self, group: SampleGroup) -> bool:
        """Whether there are slots for a waiting request, and the promises to others leave time for it."""
        others = [other for other in self._announced if other is not group]
        taken = sum(len(other.live) for other in self.running + self.swapped + others)
        if taken + len(group.live) > self.cache.max_batch:
            return False
        if self.promises is None or not self.running:
            return True
        tokens = self._begun_tokens + group.prompt_tokens
        return self.promises.allow(tokens, self.running, self._clock())

    def _place(self, plan: Plan, group: SampleGroup) -> bool:
        """Gives a waiting request a slot, and memory for all of its prompt: a piece of it would be lost again
        as soon as the next piece found no room. Where the cache looks ahead and others run meanwhile, the
        mapper maps it first, and the request begins with the next iteration."""
        slot = self._slot_for(group)
        if slot is None:
            return False
        sequence, covered = group.live[0], self.cache.length(slot)
        prompt = target(sequence)
        lengths = self._lengths.copy()
        lengths[slot] = prompt
        planned = self._with_announced(lengths)
        # Asked first: a step that is refused has given up prefixes that later requests would have found. Who
        # waited for others comes back with room for more than it had, so that it gets on each time.
        wanted = self._beside_walks(planned, slot)
        if self._short_since is not None:
            wanted = planned.copy()
            wanted[slot] = min(prompt + self._unit, group.prompt_tokens + group.request.max_new_tokens)
        asks = self.running or self._short_since is not None
        if asks and not self.cache.fits(wanted):
            placed = False
        elif self._looks_ahead and self.running and not self._is_mapped(group, lengths):
            return self._announce(group, slot, covered)
        else:
            placed = self.cache.step(lengths)
        if not placed:
            if not self.running:
                self._may_wait(wanted)
            self._withdraw(group, slot)
            return False
        self._enter(plan, group, slot, covered, [(setattr, self, "_lengths", lengths)])
        if piece := self._piece(plan.tokens, sequence, covered):
            self._plan_piece(plan, piece)
        return True

    def _announce(self, group: SampleGroup, slot: int, covered: int) -> bool:
        """Names a waiting request that begins with the next iteration: its prompt is mapped before."""
        changes: list[Change] = [(setattr, group, "announced", group.announced + 1)]
        if group.live[0].slot is None:
            changes += [
                (self._lengths.__setitem__, slot, covered),
                (setattr, group.live[0], "slot", slot),
                (self._announced.append, group),
            ]
        self._note(changes)
        return True

    def _is_mapped(self, group: SampleGroup, lengths: list[int]) -> bool:
        """Whether a request was announced, and is mapped or has waited for that long enough."""
        if group.live[0].slot is None:
            return False
        return group.announced == _MOST_ANNOUNCED or cast(KVCache, self.cache).prepare(lengths)

    def _look_ahead(self, plan: Plan) -> None:
        """Has the mapper map, while this iteration is computed, what is known of the next: a token more of
        each sequence, and the prompts of announced requests."""
        lengths = self._with_announced(self._lengths)
        most = self.cache.max_len
        for sequence, _, stop in plan.work:
            slot = slot_of(sequence)
            if lengths[slot] <= stop < most and not sequence.group.layered:
                lengths[slot] = stop + 1
        cast(KVCache, self.cache).prepare(lengths)

    def _with_announced(self, lengths: list[int]) -> list[int]:
        """A copy, with the prompts of announced requests."""
        lengths = lengths.copy()
        for group in self._announced:
            lengths[slot_of(group.live[0])] = target(group.live[0])
        return lengths

    def _slot_for(self, group: SampleGroup) -> int | None:
        """The slot of an announced request, or a free one."""
        slot = group.live[0].slot
        return self._alloc(group) if slot is None else slot

    def _withdraw(self, group: SampleGroup, slot: int) -> None:
        """Frees the slot of a request that cannot begin yet."""
        self.cache.free(slot)
        self._note(
            [
                (self._lengths.__setitem__, slot, 0),
                (setattr, group.live[0], "slot", None),
                *self._no_longer_announced(group),
            ]
        )

    def _no_longer_announced(self, group: SampleGroup) -> list[Change]:
        others = [other for other in self._announced if other is not group]
        return [(setattr, self, "_announced", others), (setattr, group, "announced", 0)]

    def _alloc(self, group: SampleGroup) -> int | None:
        """A slot that begins with what is published of a request's prompt."""
        sequence, request = group.live[0], group.request
        tokens = None if isinstance(request.prompt, int) else sequence.ids(0, target(sequence))
        expect = group.prompt_tokens + request.max_new_tokens
        try:
            return self.cache.alloc(tokens, salt=request.salt, expect=expect)
        except NoFreeSlot:  # the cache has lost some to calls that it could not undo
            if self.running:
                return None
            raise

    def _enter(self, plan: Plan, group: SampleGroup, slot: int, covered: int, changes: list[Change]) -> None:
        """A waiting request is running from now on, in a slot that has its first tokens."""
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
        self._note([*changes, *self._run(group), *self._no_longer_announced(group)])
        self._begun_tokens += target(sequence) - covered

    def _bring_back(self, plan: Plan, group: SampleGroup) -> bool:
        """Swaps a request in, with room for a token more of each sequence; or leaves it where it was."""
        lengths = self._lengths.copy()
        back = [slot_of(sequence) for sequence in group.holders]
        for sequence, slot in zip(group.holders, back, strict=True):
            lengths[slot] = max(self.cache.length(slot), sequence.computed + 1)
        layering = self.layering if group.layered else None
        if self.running:
            wanted = self._beside_walks(lengths, back[0])
            fits = layering.fits(back[0], wanted[back[0]]) if layering else self.cache.fits(wanted)
            if not fits:
                return False
        self._changing.append(group)
        came_back = layering.bring_back(back[0]) if layering else self.cache.swap_in(back)
        if not came_back or not self.cache.step(lengths):
            if came_back and layering is not None:
                layering.send_away(back[0])
            elif came_back:
                self.cache.swap_out(back)
            if not self.running:
                self._may_wait(lengths)
            self._note([])
            return False
        self._note(
            [
                (plan.swapped_in.extend, back),
                (setattr, self, "_lengths", lengths),
                (setattr, group, "layered", False),
                *self._run(group),
            ]
        )
        for sequence in group.holders:
            self._plan_piece(plan, Work(sequence, sequence.computed, sequence.computed + 1))
        return True

    def _run(self, group: SampleGroup) -> list[Change]:
        return [
            (self._queue_of(group).remove, group),
            (self.running.insert, bisect(self.running, group.order, key=_order), group),
            (setattr, group, "status", Status.RUNNING),
        ]

    # ------------------------------------------------------------------ prompts computed band by band

    def _by_bands(self) -> list[TokenSequence]:
        """Sequences of running requests whose prompts are computed band by band, in the order of arrival."""
        if self.layering is None:
            return []
        return [group.live[0] for group in self.running if group.layered]

    def _plan_walk(self, plan: Plan, layering: Layering, admits: bool) -> None:
        """Plans what is computed band by band: the pieces of running requests, then, if it ``admits`` any,
        prompts that wait and for all of which there is no room. Between two iterations they hold the bands
        that stay."""
        walk: dict[int, Work] = {}
        short: SampleGroup | None = None
        while not walk and (due := self._by_bands()):
            short = None
            for sequence in due:
                piece = self._piece(plan.tokens, sequence, sequence.computed)
                if piece is None or not layering.fits_walk([*walk.items(), (slot_of(sequence), piece)]):
                    short = sequence.group
                    break
                walk[slot_of(sequence)] = piece
                self._plan_piece(plan, piece)
            if plan.work or self._send_away(due[0].group.order):
                break
            lengths = self._lengths.copy()
            lengths[slot_of(due[0])] = target(due[0])
            self._make_way(plan, [sequence.group for sequence in due], lengths)
        # A walk that is refused takes those that decode beside it back with it: they come to an end first.
        admits = admits and not self._walk_refused and short is None
        while admits and self.waiting and self.running and not plan.preempted:
            group = self.waiting[0]
            if group.request.samples > 1 or plan.tokens == self.token_budget or not self._may_begin(group):
                break
            if not self._place_by_bands(plan, layering, group, walk):
                break
        self._walk_short = short
        if walk:
            plan.walk = layering.walk(walk)

    def _place_by_bands(
        self, plan: Plan, layering: Layering, group: SampleGroup, walk: dict[int, Work]
    ) -> bool:
        """Gives a waiting request a slot, and a place in an iteration's walk, where there is room for a few
        of its bands at a time."""
        slot = self._slot_for(group)
        if slot is None:
            return False
        covered = self.cache.length(slot)
        sequence = group.live[0]
        piece = self._piece(plan.tokens, sequence, covered)
        if piece is None or not layering.fits_walk([*walk.items(), (slot, piece)]):
            self._withdraw(group, slot)
            return False
        stats = self.stats
        changes: list[Change] = [
            (self._lengths.__setitem__, slot, covered),
            (setattr, group, "layered", True),
            (setattr, stats, "layered", stats.layered + 1),
        ]
        self._enter(plan, group, slot, covered, changes)
        walk[slot] = piece
        self._plan_piece(plan, piece)
        return True

    def _beside_walks(self, lengths: list[int], slot: int) -> list[int]:
        """Lengths that leave room for the next prompts to be computed band by band, by that much more of a
        slot; as they are where there is no such prompt, or nobody who decodes and will make room."""
        if self.layering is None or len(self.waiting) <= 1 or all(group.layered for group in self.running):
            return lengths
        wanted = lengths.copy()
        more = self.layering.tokens_at_once(self.token_budget)
        wanted[slot] = min(wanted[slot] + more, self.cache.max_len)
        return wanted

    def _holds(self, group: SampleGroup) -> bool:
        """Whether a running request has memory. One that is computed band by band has that of the bands that
        stay, which the host may have no room for."""
        return not group.layered or (
            self.layering is not None and self.layering.holds(slot_of(group.live[0]))
        )

    def _send_away(self, behind: int = -1) -> bool:
        """Moves to host memory the bands that stayed here of the latest request that has some, of those that
        arrived behind another. Whether there was one."""
        if self.layering is None or not self.layering.stay:
            return False
        held = [group for group in self.swapped + self.running if group.layered and group.order > behind]
        held.sort(key=_order, reverse=True)
        return any(self.layering.send_away(slot_of(group.live[0])) for group in held)

    def _may_part(self, group: SampleGroup) -> bool:
        """Whether a request alone gets more room by going to host memory: prefixes that some of its bands
        share can be given up once none does. At each length once."""
        tokens = group.live[0].known
        if self.layering is None or group.layered or len(group.live) > 1 or group.parted_at == tokens:
            return False
        group.parted_at = tokens
        return True

    def _part_from_prefixes(self, group: SampleGroup) -> bool:
        """The same for one that comes back to bands that stayed. Whether there were some."""
        return self.layering is not None and group.layered and self.layering.send_away(slot_of(group.live[0]))

    # ------------------------------------------------------------------ making room

    def _may_wait(self, lengths: list[int]) -> bool:
        """Whether a refused step is tried again later: nobody here is in its way, but other processes are."""
        self.waits_for_others = False
        if waits_for_others(self.cache, lengths):
            now = self._clock()
            if self._short_since is None:
                self._short_since = now
            self.waits_for_others = now - self._short_since < self.patience
        return self.waits_for_others

    def _make_way(self, plan: Plan, victims: list[SampleGroup], lengths: list[int]) -> None:
        """The latest of some running requests makes room for the others; the only one, which needs these
        lengths, fails or waits for other processes. Waiting, it keeps nothing that they may wait for."""
        latest = max(victims, key=_order)
        if len(victims) > 1 or self._may_wait(lengths) or self._may_part(latest):
            self._preempt(plan, latest)
        else:
            self._fail(plan, latest)

    def _preempt(self, plan: Plan, group: SampleGroup) -> None:
        stats, shared = self.stats, len(group.holders) > 1
        swaps = shared or (self.layering is not None and not group.layered)
        if swaps and (changes := self._swap_out(group)):
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
            (setattr, group, "layered", False),
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
            *self._no_longer_announced(group),
            (setattr, group, "status", status),
            (setattr, group, "reason", reason),
            (setattr, self, "_refused", False),
            (setattr, self, "_walk_refused", False),
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
        for group in self._announced:
            group.live[0].slot, group.announced = None, 0
        self._announced = []
        self._groups = {group.request.id: group for group in [*self.waiting, *self.running, *self.swapped]}
        held = {s.slot for group in self.running + self.swapped for s in group.holders}
        for slot in range(self.cache.max_batch):
            if slot not in held:
                with suppress(InvalidArgument):  # most are free already
                    self.cache.free(slot)
        lengths = [0] * self.cache.max_batch
        for group in self.running + [group for group in self.swapped if group.layered]:
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
        now = self._clock()
        if plan.walk is not None:
            plan.walk.finish()
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
        if plan.walk is not None:
            changes += self._leave_walk(plan.walk, ended_groups)
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
        if self.layering is not None and plan.walk is not None:
            self.layering.measure(plan.walk, now - self._began, self._clock)
        return ended_groups

    def _leave_walk(self, walk: Walk, ended: list[SampleGroup]) -> list[Change]:
        """Requests whose prompts are computed wait in host memory for room to decode."""
        changes: list[Change] = []
        swapped = self.swapped.copy()
        for sequence, _, stop in walk.work:
            group = sequence.group
            if sequence.slot is None or group in ended:
                continue
            changes.append((self._lengths.__setitem__, sequence.slot, stop))
            if stop == target(sequence):
                swapped.append(group)
                changes += [(self.running.remove, group), (setattr, group, "status", Status.SWAPPED)]
        return [*changes, (setattr, self, "swapped", sorted(swapped, key=_order))]

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
        changes: list[Change] = [(setattr, self, "cancelled", plan.cancelled + self.cancelled)]
        if plan.walk is not None and plan.walk.begun:  # its bands are in disorder
            groups = [sequence.group for sequence, _, _ in plan.walk.work]
            changes += [
                (self._changing.extend, groups),
                (setattr, self, "_settled", False),
                (setattr, self, "_walk_refused", True),
            ]
        commit([*changes, (setattr, self, "_next", news), (setattr, self, "planned", None)])

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
        if tokens - sequence.published >= self._unit and not sequence.group.layered:
            ids = sequence.ids(0, tokens)
            sequence.published = self.cache.publish(slot_of(sequence), ids, salt=request.salt)


_MOST_ANNOUNCED = 4  # iterations for which a request waits until it is mapped
_HELD = (Status.WAITING, Status.RUNNING, Status.SWAPPED)
_order = attrgetter("order")

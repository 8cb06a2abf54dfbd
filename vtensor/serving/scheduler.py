"""Which request computes which tokens in the next iteration, and whose memory makes room for whom.

First come, first served. The rules are those of vLLM's paper (Kwon et al., SOSP 2023, section 4.5): the
latest arrival is preempted first, a request's sequences all together; a single sequence is computed again,
several that share are swapped out. Prompts are computed in pieces beside the decoding sequences, under one
budget of tokens (Sarathi-Serve, Agrawal et al., OSDI 2024). What fits is for the cache's ``step`` to say.
"""

from __future__ import annotations

from bisect import insort
from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from vtensor.errors import InvalidArgument
from vtensor.serving.requests import Group, Request, Sequence, Status
from vtensor.serving.slots import SlotCache

__all__ = ["Plan", "Scheduler", "SchedulerStats", "Work"]


class Work(NamedTuple):
    """Tokens ``[start, stop)`` of a sequence, whose K and V go to these positions of its slot."""

    sequence: Sequence
    start: int
    stop: int


@dataclass
class Plan:
    """One iteration."""

    work: list[Work] = field(default_factory=list)
    """The decoding sequences (one token each) first, then pieces of prompts."""
    sampled: list[tuple[int, Sequence]] = field(default_factory=list)
    """Who gets a token from the logits at the end of which work (its index)."""
    admitted: list[Group] = field(default_factory=list)
    """Requests that have their first tokens computed here."""
    preempted: list[Group] = field(default_factory=list)
    """Requests that had to make room: swapped out, or back among the waiting."""
    failed: list[Group] = field(default_factory=list)
    """Requests that the cache cannot hold even alone."""
    swapped_in: list[int] = field(default_factory=list)
    """Slots on their way back: ``cache.wait(slot, layer)`` before each layer reads them."""
    tokens: int = 0
    """Tokens computed."""

    def __bool__(self) -> bool:
        return bool(self.work)


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made."""

    admitted: int = 0
    finished: int = 0
    failed: int = 0
    recomputed: int = 0
    """Preemptions that gave up what was computed."""
    swapped: int = 0
    """Preemptions that moved it to host memory."""
    prompt_tokens: int = 0
    """Of admitted requests."""
    reused_tokens: int = 0
    """Of those, the ones that published prefixes covered."""
    computed_tokens: int = 0


class Scheduler:
    """Plans iterations over a cache whose slots it owns.

    ::

        while scheduler.unfinished:
            plan = scheduler.plan()
            tokens = ...  # run the model over plan.work, choose a token for each of plan.sampled
            scheduler.complete(plan, tokens)

    Args:
        cache: a :class:`vtensor.KVCache`, or what has its calls. Nobody else may alloc or free in it.
        token_budget: tokens computed in an iteration at most; at least one for each slot.

    Raises InvalidArgument for a smaller budget. Calls come from one thread.
    """

    def __init__(self, cache: SlotCache, *, token_budget: int = 2048) -> None:
        if token_budget < cache.max_batch:
            raise InvalidArgument(
                f"[Scheduler] token_budget={token_budget} for {cache.max_batch} slots, each of which may "
                "decode a token in an iteration: raise it, or make the cache with fewer slots"
            )
        self.cache = cache
        self.token_budget = token_budget
        self.stats = SchedulerStats()
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self.swapped: list[Group] = []
        self._unit = cache.stats().unit
        self._lengths = [0] * cache.max_batch
        self._slots_free = cache.max_batch
        self._ids: dict[abc.Hashable, Group] = {}
        self._arrivals = 0
        self._refused = False  # memory was short, and no request has ended since
        self._planned: Plan | None = None
        self._next = Plan()  # begins with the news of an iteration that was taken back

    @property
    def unfinished(self) -> int:
        """Requests that wait, run or are swapped out."""
        return len(self._ids)

    def add(self, request: Request) -> Group:
        """Queues a request behind those that came before it.

        Raises InvalidArgument where its id is taken, or where no slot could ever hold it.
        """
        cache = self.cache
        if request.id in self._ids:
            raise InvalidArgument(
                f"[Scheduler.add] request {request.id!r} is there already: choose another id"
            )
        if request.prompt_tokens + request.max_new_tokens > cache.max_len:
            raise InvalidArgument(
                f"[Scheduler.add] {request.prompt_tokens} tokens and {request.max_new_tokens} new ones, of "
                f"request {request.id!r}: the cache's max_len is {cache.max_len}"
            )
        if request.samples > cache.max_batch:
            raise InvalidArgument(
                f"[Scheduler.add] {request.samples} samples, of request {request.id!r}: the cache has "
                f"{cache.max_batch} slots"
            )
        group = Group(request, self._arrivals)
        self._arrivals += 1
        self._ids[request.id] = group
        self.waiting.append(group)
        return group

    def cancel(self, request_id: abc.Hashable) -> None:
        """Drops a request and frees what it holds. Raises InvalidArgument for an unknown id, and between
        ``plan`` and ``complete``."""
        if self._planned is not None:
            raise InvalidArgument("[Scheduler.cancel] an iteration is under way: complete it first")
        if request_id not in self._ids:
            raise InvalidArgument(
                f"[Scheduler.cancel] no request {request_id!r} is waiting, running or swapped"
            )
        group = self._ids[request_id]
        self._queue_of(group).remove(group)
        self._end(group, Status.CANCELLED)

    # ------------------------------------------------------------------ planning

    def plan(self) -> Plan:
        """The next iteration; memory for it is mapped. Empty where nothing can be computed now: call again
        while there are ``unfinished`` requests. Raises InvalidArgument where the last is not complete."""
        if self._planned is not None:
            raise InvalidArgument(
                "[Scheduler.plan] the last iteration is not complete: call complete() first"
            )
        plan, self._next = self._next, Plan()
        self._advance(plan)
        if not plan.preempted:
            self._admit(plan)
        self._planned = plan
        return plan

    def _advance(self, plan: Plan) -> None:
        """Gives the running requests their tokens, and takes the latest ones' memory where it is short."""
        while self.running:
            self._plan_running(plan)
            lengths = self._lengths.copy()
            for sequence, _, stop in plan.work:
                slot = _slot(sequence)
                if lengths[slot] < stop:
                    lengths[slot] = stop
            if self.cache.step(lengths):
                self._lengths = lengths
                for i, work in enumerate(plan.work):
                    _plan_sampling(plan, i, work)
                return
            plan.work, plan.tokens = [], 0
            victim = self.running.pop()
            if self.running:
                self._preempt(plan, victim)
            else:
                self._fail(plan, victim)

    def _plan_running(self, plan: Plan) -> None:
        prompts: list[Sequence] = []
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

    def _plan_piece(self, plan: Plan, sequence: Sequence) -> None:
        """As much of what a sequence still has to compute as the budget leaves."""
        start = sequence.computed
        stop = min(_target(sequence), start + self.token_budget - plan.tokens)
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
            if not came_back and len(group.live) > self._slots_free:
                return
            if self._bring_back(plan, group) if came_back else self._place(plan, group):
                queue.pop(0)
                group.status = Status.RUNNING
                self.running.append(group)
            elif self.running:
                self._refused = True
            else:
                queue.pop(0)
                self._fail(plan, group)

    def _place(self, plan: Plan, group: Group) -> bool:
        """Gives a waiting request a slot, and memory for all of its prompt: a piece of it would be lost again
        as soon as the next piece found no room."""
        sequence, request = group.live[0], group.request
        target = _target(sequence)
        tokens = None if isinstance(request.prompt, int) else sequence.ids(0, target)
        slot = self.cache.alloc(
            tokens, salt=request.salt, expect=group.prompt_tokens + request.max_new_tokens
        )
        covered = self.cache.length(slot)
        self._lengths[slot] = target
        if not self.cache.step(self._lengths):
            self._lengths[slot] = 0
            self.cache.free(slot)
            return False
        sequence.slot = slot
        sequence.computed = sequence.published = covered
        self._slots_free -= len(group.live)
        if not group.admitted:
            group.admitted = True
            plan.admitted.append(group)
            self.stats.admitted += 1
            self.stats.prompt_tokens += group.prompt_tokens
            self.stats.reused_tokens += covered
        self._plan_piece(plan, sequence)
        _plan_sampling(plan, len(plan.work) - 1, plan.work[-1])
        return True

    def _bring_back(self, plan: Plan, group: Group) -> bool:
        """Swaps a request in, with room for a token more of each sequence; or leaves it where it was."""
        lengths = self._lengths.copy()
        back: list[int] = []
        for sequence in group.holders:
            slot = _slot(sequence)
            if not self.cache.swap_in(slot):
                break
            back.append(slot)
            lengths[slot] = max(self.cache.length(slot), sequence.computed + 1)
        if len(back) < len(group.holders) or not self.cache.step(lengths):
            self.cache.swap_out(back)
            return False
        self._lengths = lengths
        plan.swapped_in += back
        for sequence in group.holders:
            plan.work.append(Work(sequence, sequence.computed, sequence.computed + 1))
            plan.tokens += 1
            _plan_sampling(plan, len(plan.work) - 1, plan.work[-1])
        return True

    # ------------------------------------------------------------------ making room

    def _preempt(self, plan: Plan, group: Group) -> None:
        plan.preempted.append(group)
        self._refused = True  # until somebody ends: it would be the first to go again
        if len(group.holders) > 1 and self._swap_out(group):
            self.stats.swapped += 1
        else:
            self._recompute(group, publish=len(group.holders) == 1)
            self.stats.recomputed += 1

    def _swap_out(self, group: Group) -> bool:
        """False where host memory is short; the slots are then to be freed."""
        try:
            self.cache.swap_out([_slot(sequence) for sequence in group.holders])
        except MemoryError:
            return False
        for sequence in group.holders:
            self._lengths[_slot(sequence)] = 0
        group.status = Status.SWAPPED
        insort(self.swapped, group, key=lambda group: group.order)
        return True

    def _recompute(self, group: Group, publish: bool = False) -> None:
        """Back to the waiting, where its arrival puts it. What is published first, and not given up until
        then, need not be computed again."""
        for sequence in group.holders:
            if publish:
                self._publish(sequence)
            self._free(sequence)
        for sequence in group.live:
            sequence.computed = sequence.published = 0
        self._slots_free += len(group.live)
        group.forked = len(group.live) == 1
        group.status = Status.WAITING
        insort(self.waiting, group, key=lambda group: group.order)

    def _fail(self, plan: Plan, group: Group) -> None:
        tokens = max(sequence.known for sequence in group.live)
        group.reason = (
            f"{tokens} tokens in {len(group.live)} sequences do not fit into the cache's memory with nothing "
            "else running: give its pool a larger budget, or ask for less"
        )
        plan.failed.append(group)
        self.stats.failed += 1
        self._end(group, Status.FAILED)

    def _end(self, group: Group, status: Status) -> None:
        if group.status in (Status.RUNNING, Status.SWAPPED):
            self._slots_free += len(group.live)
            for sequence in group.holders:
                self._free(sequence)
        group.status = status
        del self._ids[group.request.id]
        self._refused = False

    def _free(self, sequence: Sequence) -> None:
        slot = _slot(sequence)
        self.cache.free(slot)
        self._lengths[slot] = 0
        sequence.slot = None

    def _queue_of(self, group: Group) -> list[Group]:
        return {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}[
            group.status
        ]

    # ------------------------------------------------------------------ completing

    def complete(self, plan: Plan, tokens: abc.Sequence[int] | None = None) -> list[Group]:
        """Takes note that the plan's tokens are computed, and of those that were chosen.

        Args:
            plan: the last one of ``plan()``.
            tokens: a token id for each of ``plan.sampled``; None where only their number is known.

        Returns the requests that are finished.

        Raises InvalidArgument for another plan, or another number of tokens; nothing was changed.
        """
        if plan is not self._planned:
            raise InvalidArgument("[Scheduler.complete] this is not the iteration that is under way")
        if tokens is not None and len(tokens) != len(plan.sampled):
            raise InvalidArgument(
                f"[Scheduler.complete] {len(tokens)} tokens, {len(plan.sampled)} sequences are due one"
            )
        self._planned = None
        self.stats.computed_tokens += plan.tokens
        for sequence, start, stop in plan.work:
            sequence.computed = stop
            if start < sequence.group.prompt_tokens <= stop:
                self._publish(sequence)
                if not sequence.group.forked:
                    self._fork(sequence.group)
        finished: list[Group] = []
        for i, (_, sequence) in enumerate(plan.sampled):
            group = sequence.group
            sequence.known += 1
            ended = sequence.generated == group.request.max_new_tokens
            if tokens is not None:
                sequence.output.append(int(tokens[i]))
                ended = ended or sequence.output[-1] in group.request.stop
            if ended:
                self._end_sequence(sequence)
                if not group.live:
                    finished.append(group)
        return finished

    def abandon(self, plan: Plan) -> None:
        """Takes an iteration back that could not be computed: its tokens are planned again.

        Raises InvalidArgument for another plan than the last.
        """
        if plan is not self._planned:
            raise InvalidArgument("[Scheduler.abandon] this is not the iteration that is under way")
        self._planned = None
        self._next = Plan(admitted=plan.admitted, failed=plan.failed, swapped_in=plan.swapped_in)

    def reorder(self, request_id: abc.Hashable, sources: abc.Sequence[int]) -> None:
        """A step of a beam search, between two iterations: the request's i-th live sequence continues the
        ``sources[i]``-th. Nothing is copied.

        Raises InvalidArgument where the request's sequences do not all have slots, or for sources that are
        not its own.
        """
        group = self._ids.get(request_id)
        if (
            self._planned is not None
            or group is None
            or group.status is not Status.RUNNING
            or not group.forked
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
        before = [_slot(sequence) for sequence in live]
        slots = self.cache.reorder(before, [before[source] for source in sources])
        states = [(list(s.output), s.known, s.computed, s.published, self._lengths[_slot(s)]) for s in live]
        for slot in before:
            self._lengths[slot] = 0
        for sequence, source, slot in zip(live, sources, slots, strict=True):
            output, sequence.known, sequence.computed, sequence.published, length = states[source]
            sequence.output, sequence.slot = list(output), slot
            self._lengths[slot] = length

    def _fork(self, group: Group) -> None:
        first, *others = group.live
        for sequence, slot in zip(others, self.cache.fork(_slot(first), len(others)), strict=True):
            sequence.slot = slot
            sequence.computed, sequence.published = first.computed, first.published
            self._lengths[slot] = self._lengths[_slot(first)]
        group.forked = True

    def _publish(self, sequence: Sequence) -> None:
        request = sequence.group.request
        known = sequence.group.prompt_tokens + len(sequence.output)
        tokens = 0 if isinstance(request.prompt, int) else min(known, sequence.computed)
        if tokens - sequence.published >= self._unit:
            ids = sequence.ids(0, tokens)
            sequence.published = self.cache.publish(_slot(sequence), ids, salt=request.salt)

    def _end_sequence(self, sequence: Sequence) -> None:
        group = sequence.group
        self._publish(sequence)
        self._free(sequence)
        self._slots_free += 1
        self._refused = False
        group.live.remove(sequence)
        if not group.live:
            self.running.remove(group)
            self._end(group, Status.FINISHED)
            self.stats.finished += 1


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _target(sequence: Sequence) -> int:
    """How far a sequence is computed before it is its turn to sample, or to be forked."""
    return sequence.known if sequence.group.forked else sequence.group.prompt_tokens


def _plan_sampling(plan: Plan, i: int, work: Work) -> None:
    """Notes who gets a token at the end of the i-th work: all the samples of a prompt, where it is theirs."""
    sequence = work.sequence
    if work.stop == sequence.known:
        followers = [sequence] if sequence.group.forked else sequence.group.live
        plan.sampled += [(i, follower) for follower in followers]

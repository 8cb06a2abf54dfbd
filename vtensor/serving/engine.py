"""Continuous batching: the scheduler's plans, run with a model."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass

import torch

from vtensor._base.arguments import of_type
from vtensor._base.terminal import Progress
from vtensor.errors import InvalidArgument
from vtensor.serving._commit import commit, sets
from vtensor.serving.plans import Plan
from vtensor.serving.requests import Request, SampleGroup, Status, TokenSequence, token_id
from vtensor.serving.scheduler import Scheduler

_PAUSE_SECONDS = 0.002  # while only other processes could make room


@dataclass(frozen=True)
class Completion:
    """The result of a request that has ended."""

    id: abc.Hashable
    tokens: list[list[int]]
    """The generated tokens of each sample."""
    error: str = ""
    """The reason if it ended early, such as ``"cancelled"``; else empty."""


def greedy(logits: torch.Tensor, sequence: TokenSequence) -> int:
    """The most likely token. ``logits``: [vocabulary]."""
    return int(logits.argmax())


class Engine:
    """Runs requests together, each as if it were alone.

    Any operation may raise, for an error of the cache or the model, or for Ctrl-C. The next one goes on from
    there, and each request's end is returned once.

    Args:
        scheduler: owns the cache that ``forward`` reads and writes.
        forward: computes ``plan.work`` and returns the logits at the last token of each, [work, vocabulary].
            ``vtensor.integrations.transformers.serving.ServedModel`` does that for Hugging Face models. Its
            method ``check(request)``, if it has one, raises InvalidArgument for what the model cannot
            compute.
        choose: ``choose(logits, sequence)``, the next token of a sequence; logits: [vocabulary]. If it
            depends on the sequence alone, a request gets the same tokens beside any other requests. If it
            raises, or returns no token id, that request ends with the reason.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        forward: abc.Callable[[Plan], torch.Tensor],
        choose: abc.Callable[[torch.Tensor, TokenSequence], int] = greedy,
    ) -> None:
        self.scheduler = of_type("Engine", "scheduler", scheduler, Scheduler)
        self.forward = forward
        self.choose = choose
        self._plan: Plan | None = None  # the last plan, until its completions are in _ended
        self._ended: list[Completion] = []  # not returned yet

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InvalidArgument as ``Scheduler.add`` does, for a prompt without tokens,
        and for what the model cannot compute."""
        self._check(request)
        self.scheduler.add(request)

    def _check(self, request: Request) -> None:
        if isinstance(request, Request):
            if isinstance(request.prompt, int):
                raise InvalidArgument(
                    f"[Engine.submit] the prompt of request {request.id!r} is a number: a model needs token "
                    "ids"
                )
            check = getattr(self.forward, "check", None)
            if check is not None:
                check(request)

    def cancel(self, request_id: abc.Hashable) -> None:
        """Ends a request. The next step returns its tokens so far.

        Raises:
            InvalidArgument: no such request is waiting, running or swapped.
            DriverError, TimedOut: errors of the cache. The request goes on.
        """
        self._collect()
        self._take_back()
        self.scheduler.cancel(request_id)

    @property
    def unfinished(self) -> int:
        """Number of requests whose end was not returned yet."""
        self._collect()
        return self.scheduler.unfinished + self.scheduler.unreported + len(self._ended)

    def step(self) -> list[Completion]:
        """Computes one iteration and returns the requests that ended. If the model or the cache raises, the
        iteration is taken back, and the next call tries it again."""
        self._iterate()
        ended = self._ended
        self._ended = []
        return ended

    def run(
        self, requests: abc.Iterable[Request] = (), *, progress: bool | None = None
    ) -> dict[abc.Hashable, Completion]:
        """Submits requests and iterates until none is left. Returns their completions by id, and those of an
        earlier run that was interrupted. Raises InvalidArgument as ``submit`` does, before it submits any.

        Args:
            progress: whether to print progress to stderr once a second has passed; unless given, if stderr is
                a terminal.
        """
        requests = list(requests)
        ids: set[abc.Hashable] = set()
        for request in requests:
            self._check(request)
            self.scheduler.check(request)
            if request.id in ids:
                raise InvalidArgument(
                    f"[Engine.run] two requests have the id {request.id!r}: choose another id for one"
                )
            ids.add(request.id)
        for request in requests:
            self.scheduler.add(request)
        scheduler, stats = self.scheduler, self.scheduler.stats
        with Progress(progress) as show:
            while scheduler.unfinished or scheduler.unreported:
                self._iterate()
                show(
                    f"{len(self._ended):,} requests done, {len(scheduler.running):,} running, "
                    f"{len(scheduler.waiting) + len(scheduler.swapped):,} waiting, "
                    f"{stats.computed_tokens:,} tokens"
                )
        self._collect()
        done = {completion.id: completion for completion in self._ended}
        self._ended = []
        return done

    def _take_back(self) -> None:
        """Takes back the iteration of a step that was interrupted."""
        if self.scheduler.planned is not None:
            self.scheduler.abandon(self.scheduler.planned)

    def _iterate(self) -> None:
        scheduler = self.scheduler
        self._collect()
        self._take_back()
        plan = self._plan = scheduler.plan()
        if not plan and scheduler.waits_for_others:
            time.sleep(_PAUSE_SECONDS)
        try:
            scheduler.complete(plan, self._tokens(plan) if plan else [])
        except BaseException:
            if scheduler.planned is plan:
                scheduler.abandon(plan)
            raise
        self._collect()

    def _tokens(self, plan: Plan) -> list[int | Exception]:
        logits = self.forward(plan)
        return [self._token(logits[i], sequence) for i, sequence in plan.sampled]

    def _token(self, logits: torch.Tensor, sequence: TokenSequence) -> int | Exception:
        try:
            return token_id("Engine.step", self.choose(logits, sequence))
        except Exception as error:
            return error

    def _collect(self) -> None:
        """Collects the completions of the last iteration, if it is complete."""
        plan = self._plan
        if plan is not None and plan.ended is not None:
            ended = [_completion(group) for group in plan.cancelled + plan.failed + plan.ended]
            commit([(self._ended.extend, ended), *sets(self, _plan=None)])


def _completion(group: SampleGroup) -> Completion:
    generated = [list(sequence.output) for sequence in group.sequences]
    return Completion(group.request.id, generated, "" if group.status is Status.FINISHED else group.reason)

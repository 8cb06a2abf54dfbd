"""Continuous batching: the scheduler's plans, run with a model."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch

from vtensor.errors import InvalidArgument
from vtensor.serving.requests import Group, Request, Sequence, Status
from vtensor.serving.scheduler import Plan, Scheduler

__all__ = ["Completion", "Engine", "greedy"]


@dataclass(frozen=True)
class Completion:
    """The end of a request."""

    id: abc.Hashable
    tokens: list[list[int]]
    """The generated tokens of each sample."""
    error: str = ""
    """Why there are no more of them; empty where all went well."""


def greedy(logits: torch.Tensor, sequence: Sequence) -> int:
    """The likeliest token. ``logits``: [vocabulary]."""
    return int(logits.argmax())


class Engine:
    """Runs requests together, each as if it were alone.

    Args:
        scheduler: owns the cache that ``forward`` reads and writes.
        forward: computes ``plan.work`` and returns the logits at the last token of each, [work, vocabulary];
            ``vtensor.integrations.transformers.serving.ServedModel`` does for Hugging Face models.
        choose: ``choose(logits, sequence)``, the next token of a sequence; logits: [vocabulary]. What it
            draws must depend on the sequence alone if a request shall get the same tokens in any company.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        forward: abc.Callable[[Plan], torch.Tensor],
        choose: abc.Callable[[torch.Tensor, Sequence], int] = greedy,
    ) -> None:
        self.scheduler = scheduler
        self.forward = forward
        self.choose = choose

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InvalidArgument as ``Scheduler.add`` does, and for a prompt without
        tokens."""
        if isinstance(request.prompt, int):
            raise InvalidArgument(
                f"[Engine.submit] the prompt of request {request.id!r} is a number: a model needs token ids"
            )
        self.scheduler.add(request)

    def step(self) -> list[Completion]:
        """One iteration; returns the requests that it ended. Where the model raises, the iteration is taken
        back, and the next call tries it again."""
        plan = self.scheduler.plan()
        try:
            tokens: list[int] = []
            if plan:
                logits = self.forward(plan)
                tokens = [self.choose(logits[i], sequence) for i, sequence in plan.sampled]
        except BaseException:
            self.scheduler.abandon(plan)
            raise
        return [_completion(group) for group in plan.failed + self.scheduler.complete(plan, tokens)]

    def run(self, requests: abc.Iterable[Request] = ()) -> dict[abc.Hashable, Completion]:
        """Submits requests and iterates until none is left; returns their ends by id."""
        for request in requests:
            self.submit(request)
        done: dict[abc.Hashable, Completion] = {}
        while self.scheduler.unfinished:
            done |= {completion.id: completion for completion in self.step()}
        return done


def _completion(group: Group) -> Completion:
    generated = [list(sequence.output) for sequence in group.sequences]
    return Completion(group.request.id, generated, group.reason if group.status is Status.FAILED else "")

"""Forking a long prefix n ways, against copying it."""

from __future__ import annotations

from collections.abc import Callable

import torch

import vtensor

from .harness import Bar, Figure, Settings, clock, count, interleave, speedup

HEADS, HEAD_DIM = 8, 128


def run(settings: Settings) -> list[Figure]:
    length = settings.pick(131072, 2048) + 1  # the last page is a partial one
    pool = vtensor.Pool(settings.device)
    options = {"dtype": torch.bfloat16, "device": settings.device}
    plain, second = (torch.ones(1, length, HEADS, HEAD_DIM, **options) for _ in range(2))
    t = vtensor.from_tensor(plain, grow_dim=1, capacity=length + 64, pool=pool)
    x = plain[:, :1].clone()

    def fork_ways(ways: int, then: Callable[[vtensor.VTensor], object] = lambda fork: None) -> float:
        forks: list[vtensor.VTensor] = []

        def fork_all() -> None:
            for _ in range(ways):
                forks.append(t.fork())
                then(forks[-1])

        seconds = clock(fork_all, settings.wait)
        for fork in forks:
            fork.close()
        return seconds

    def copy_ways(source: torch.Tensor, ways: int) -> float:
        copies: list[torch.Tensor] = []
        return clock(lambda: copies.extend(source.clone() for _ in range(ways)), settings.wait)

    figures = []
    for ways in (1, 4):
        taken = interleave(
            {
                "fork": lambda ways=ways: fork_ways(ways),
                "append": lambda ways=ways: fork_ways(ways, lambda fork: fork.append(x)),
                "copy": lambda ways=ways: copy_ways(plain, ways),
                "control": lambda ways=ways: copy_ways(second, ways),
            },
            settings.pick(10, 2),
        )
        figures += [
            speedup.among(taken, f"{what}, {ways} ways", "clone()", key, "copy", "control")
            for what, key in (("fork", "fork"), ("fork and first append", "append"))
        ]
    used = pool.stats().pages_used
    forks = [t.fork() for _ in range(4)]
    shared = pool.stats().pages_used
    for fork in forks:
        fork.append(x)
    apart = pool.stats().pages_used
    pool.close()
    return [
        *figures,
        count("4 forks", "the prefix alone", shared - used, "pages more", Bar(0)),
        count(
            "4 forks, each with its own next token", "the prefix alone", apart - used, "pages more", Bar(4)
        ),
    ]

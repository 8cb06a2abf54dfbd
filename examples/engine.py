"""A serving engine by hand, on vtensor.KVCache: admission, ragged batches, a shared prefix, preemption.

    python examples/engine.py

It shows the calls that an engine makes. ``vtensor.serving`` has an engine that is ready to use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

import vtensor

LAYERS, HEADS, HEAD_DIM, SLOTS, VOCABULARY = 2, 2, 32, 8, 64


@dataclass
class Request:
    tokens: list[int]
    end: int  # its tokens at the end
    slot: int = -1
    computed: int = 0


class Engine:
    def __init__(self, cache: vtensor.KVCache) -> None:
        self.cache = cache
        self.running, self.swapped = [], []
        self.embed = torch.randn(VOCABULARY, HEADS * HEAD_DIM) / 8
        self.qkv = [torch.randn(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM) / 16 for _ in range(LAYERS)]

    def admit(self, waiting: list[Request]) -> None:
        while self.swapped:  # preempted requests come first
            if not self.cache.fits(self.lengths([*self.running, self.swapped[-1]])):
                return
            self.cache.swap_in(self.swapped[-1].slot)
            self.running.append(self.swapped.pop())
        while waiting and len(self.running) < SLOTS:
            request = waiting[0]
            request.slot = self.cache.alloc(tokens=request.tokens)  # begins with what the index has
            if not self.cache.fits(self.lengths([*self.running, request])):
                return self.cache.free(request.slot)
            request.computed = self.cache.length(request.slot)
            self.running.append(waiting.pop(0))

    def lengths(self, requests: list[Request]) -> list[int]:
        lengths = self.cache.lengths
        for request in requests:
            lengths[request.slot] = len(request.tokens)
        return lengths

    def iterate(self) -> None:
        while not self.cache.step(self.lengths(self.running)):  # memory is short: preempt the latest
            self.swapped.append(self.running.pop())
            self.cache.swap_out(self.swapped[-1].slot)
        for request, logits in zip(list(self.running), self.forward(), strict=True):
            if request.computed == 0:
                self.cache.publish(request.slot, request.tokens)  # for prompts with the same beginning
            request.computed = len(request.tokens)
            request.tokens.append(int(logits.argmax()))
            if len(request.tokens) == request.end:
                self.cache.free(request.slot)
                self.running.remove(request)

    def forward(self) -> torch.Tensor:
        slots, starts = [r.slot for r in self.running], [r.computed for r in self.running]
        new = [torch.tensor(r.tokens[r.computed :]) for r in self.running]
        counts = [len(tokens) for tokens in new]
        x = self.embed[torch.cat(new)]
        for layer, qkv in enumerate(self.qkv):
            q, k, v = (x @ qkv).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(1)
            self.cache.write(layer, slots, starts, k, v, counts=counts)  # waits for the swap-in
            parts = []
            for slot, start, some in zip(slots, starts, q.split(counts), strict=True):
                past = (side[slot, : start + len(some)].transpose(0, 1) for side in self.cache[layer])
                mask = torch.ones(len(some), start + len(some), dtype=torch.bool).tril(start)
                parts.append(scaled_dot_product_attention(some.transpose(0, 1), *past, attn_mask=mask))
            x = x + torch.cat(parts, dim=1).transpose(0, 1).flatten(1)
        return x[torch.tensor(counts).cumsum(0) - 1] @ self.embed.T


def main(budget: str) -> list[list[int]]:
    torch.manual_seed(0)
    requests = [Request([*range(40), i, i + 1], end=90) for i in range(12)]  # a common beginning
    pool = vtensor.Pool("cpu", page_size=4096, budget=budget)
    with pool, vtensor.KVCache(LAYERS, HEADS, HEAD_DIM, SLOTS, 1024, torch.float32, pool=pool) as cache:
        engine, waiting = Engine(cache), list(requests)
        while waiting or engine.running or engine.swapped:
            engine.admit(waiting)
            engine.iterate()
        print(f"{len(requests)} requests with {budget}: {cache.stats()}")
    return [request.tokens for request in requests]


if __name__ == "__main__":
    assert main("64MiB") == main("200KiB")  # too little for all at once: some are swapped out and back

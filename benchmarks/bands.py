"""A prompt computed layer by layer with K and V of some layers in memory, against all of them (LayerKV, arXiv
2410.00428)."""

from __future__ import annotations

import torch

import vtensor

from .harness import Bar, Figure, Settings, clock, interleave, slowdown

LAYERS, HEADS, HEAD_DIM = 8, 8, 64
HIDDEN = HEADS * HEAD_DIM
LEAVING = 2  # bands beside those that stay: one is computed, and one copied to host memory


class Prefill:
    """A cache of a band for each layer, in the memory of ``room`` of them."""

    def __init__(self, settings: Settings, tokens: int, room: int) -> None:
        self.wait, self.tokens = settings.wait, tokens
        options = {"dtype": torch.float32, "device": settings.device}
        size = 2 * tokens * HIDDEN * 4
        self.pool = vtensor.Pool(settings.device, budget=room * size)
        self.cache = vtensor.KVCache(
            LAYERS, HEADS, HEAD_DIM, 1, tokens, torch.float32, bands=LAYERS, tile=1, pool=self.pool
        )
        stay = LAYERS if room == LAYERS else room - LEAVING
        self.stays = {LAYERS * (i + 1) // stay - 1 for i in range(stay)} if stay else set()
        torch.manual_seed(0)
        self.x = torch.randn(tokens, HIDDEN, **options)
        self.weights = [torch.randn(HIDDEN, 6 * HIDDEN, **options) / 32 for _ in range(LAYERS)]
        self.down = [torch.randn(3 * HIDDEN, HIDDEN, **options) / 32 for _ in range(LAYERS)]

    def run(self) -> float:
        slot = self.cache.alloc()
        seconds = clock(lambda: self.compute(slot), self.wait)
        self.cache.free(slot)
        self.pool.wait_idle()
        return seconds

    def compute(self, slot: int) -> None:
        x, target = self.x, self.cache.lengths
        target[slot] = self.tokens
        for band, layers in enumerate(self.cache.bands):
            if not self.cache.step(target, bands=[band]):
                raise RuntimeError("memory is short")
            for layer in layers:
                _, k, v, up = (x @ self.weights[layer]).split((HIDDEN, HIDDEN, HIDDEN, 3 * HIDDEN), dim=1)
                k, v = (side.unflatten(1, (HEADS, HEAD_DIM)) for side in (k, v))
                self.cache.write(layer, slot, 0, k, v)
                x = x + up.relu() @ self.down[layer]
            if band not in self.stays:
                self.cache.swap_out(slot, bands=[band])

    def close(self) -> None:
        self.cache.close()
        self.pool.close()


def run(settings: Settings) -> list[Figure]:
    tokens = settings.pick(8192, 512)
    rooms = {"whole": LAYERS, "control": LAYERS, "half": LAYERS // 2, "quarter": LAYERS // 4}
    prefills = {name: Prefill(settings, tokens, room) for name, room in rooms.items()}
    taken = interleave({name: prefill.run for name, prefill in prefills.items()}, settings.pick(7, 2))
    for prefill in prefills.values():
        prefill.close()
    prompt, against = f"a prompt of {tokens:,} tokens in", "all of its layers in memory"
    return [
        slowdown.among(taken, f"{prompt} {share} of the memory", against, name, "whole", "control", bar)
        for name, share, bar in (("half", "half", Bar(1.1)), ("quarter", "a quarter", None))
    ]

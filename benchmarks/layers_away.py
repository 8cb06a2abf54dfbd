"""Decoding while some bands of layers are in host memory, against all of them resident: time per token over
the number of bands that are out. ``python -m benchmarks.layers_away`` measures it on the CPU."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import vtensor

from . import machine
from .harness import clock, interleave

BANDS, HEADS, HEAD_DIM, BATCH = 8, 8, 64, 4  # a layer in each band
HIDDEN, INNER = HEADS * HEAD_DIM, 2048
STEPS = 4  # between two looks at the clock


class Decoder:
    """Layers of attention and an MLP with seeded weights, over a cache with a band for each layer.

    Args:
        context: tokens that each request has before the first step.
        steps: the most that will be decoded.
        out: bands that are in host memory between their turns, spread evenly.
    """

    def __init__(self, context: int, steps: int, out: int) -> None:
        here = BANDS - out
        stay = {BANDS * (i + 1) // here - 1 for i in range(here)}
        self.out = [band for band in range(BANDS) if band not in stay]
        self.pool = vtensor.Pool("cpu")
        sizes = (BANDS, HEADS, HEAD_DIM, BATCH, context + steps, torch.float32)
        self.cache = vtensor.KVCache(*sizes, bands=BANDS, tile=1, pool=self.pool)
        self.slots = [self.cache.alloc() for _ in range(BATCH)]
        self.length = context
        if not self.cache.step([context] * BATCH):
            raise RuntimeError("memory is short")
        draw = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw) / shape[0] ** 0.5

        self.x = weights(HIDDEN, BATCH).T.contiguous()
        self.qkv = [weights(HIDDEN, 3 * HIDDEN) for _ in range(BANDS)]
        self.heads_out = [weights(HIDDEN, HIDDEN) for _ in range(BANDS)]
        self.up = [weights(HIDDEN, 2 * INNER) for _ in range(BANDS)]
        self.down = [weights(INNER, HIDDEN) for _ in range(BANDS)]
        for k, v in (self.cache[layer] for layer in range(BANDS)):
            for side in (k, v):
                side[:, :context].normal_(generator=draw)
        if self.out:
            self.cache.swap_out(self.slots, bands=self.out)

    def decode(self) -> None:
        """``STEPS`` tokens of each request, until the last copy has ended."""
        for _ in range(STEPS):
            self._step()
        for slot in self.slots:
            self.cache.wait(slot)

    def _step(self) -> None:
        self.length += 1
        lengths = [self.length] * BATCH
        for band in range(BANDS):
            self._bring_back(band)
            for slot in self.slots:
                self.cache.wait(slot, band)
            if not self.cache.step(lengths, bands=[band]):
                raise RuntimeError("memory is short")
            if band in self.out:  # the next one comes behind the computation
                self._bring_back(self.out[(self.out.index(band) + 1) % len(self.out)])
            self._compute(band)
            if band in self.out:
                self.cache.swap_out(self.slots, bands=[band])
        self.x = F.normalize(self.x) * HIDDEN**0.5

    def _bring_back(self, band: int) -> None:
        away = band in self.cache.bands_away(self.slots[0])
        if away and not self.cache.swap_in(self.slots, bands=[band]):
            raise RuntimeError("memory is short")

    def _compute(self, layer: int) -> None:
        qkv = F.layer_norm(self.x, [HIDDEN]) @ self.qkv[layer]
        q, k, v = qkv.unflatten(1, (3, HEADS, HEAD_DIM)).unbind(1)
        self.cache.write(layer, self.slots, [self.length - 1] * BATCH, k[:, None], v[:, None])
        keys, values = (side[:, : self.length].transpose(1, 2) for side in self.cache[layer])
        mixed = F.scaled_dot_product_attention(q[:, :, None], keys, values)
        self.x = self.x + mixed.flatten(1) @ self.heads_out[layer]
        gate, up = (F.layer_norm(self.x, [HIDDEN]) @ self.up[layer]).chunk(2, dim=1)
        self.x = self.x + (F.silu(gate) * up) @ self.down[layer]

    def close(self) -> None:
        self.cache.close()
        self.pool.close()


def measure(context: int, rounds: int) -> list[float]:
    """Seconds per step for 0, 1, ... bands out: medians of runs that take turns."""
    decoders = [Decoder(context, STEPS * (rounds + 1), out) for out in range(BANDS + 1)]
    samples = {str(len(d.out)): partial(clock, d.decode) for d in decoders}
    taken = interleave(samples, rounds)
    if not all(torch.equal(decoder.x, decoders[0].x) for decoder in decoders):
        raise AssertionError("the number of bands that are out changed what is computed")
    for decoder in decoders:
        decoder.close()
    return [statistics.median(seconds) / STEPS for seconds in taken.values()]


@dataclass(frozen=True)
class Device:
    """Stated bandwidths, in bytes a second, and a model: bytes of a layer's weights, and of its K and V of a
    token."""

    memory: float
    link: float
    layers: int
    weights: float
    kv: float

    def predict(self, requests: int, context: int) -> list[float]:
        """Seconds per step for 0, 1, ... of the bands out, if reading memory is all that computing takes, and
        all copies to the device run beside it."""
        compute = self.layers * (self.weights + requests * context * self.kv) / self.memory
        copy = self.layers * requests * context * self.kv / self.link
        return [max(compute, copy * out / BANDS) for out in range(BANDS + 1)]


# The data sheet's 3.35 TB/s and one direction of PCIe 5.0 x16; Llama-3-8B in bf16.
H100 = Device(memory=3.35e12, link=64e9, layers=32, weights=218e6 * 2, kv=2 * 8 * 128 * 2)
REQUESTS = 32  # of the prediction


def picture(measured: dict[int, list[float]], computed: dict[int, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots(1, 2)
    titles = (
        f"measured on a CPU: {BATCH} requests",
        f"computed from bandwidths, not measured:\nan H100, Llama-3-8B, {REQUESTS} requests",
    )
    colors = ("#1b9aaa", "#2b4c7e", "#e0a33e")
    for axis, lines, title, style in zip(axes, (measured, computed), titles, ("-", "--"), strict=True):
        for (context, seconds), color in zip(lines.items(), colors, strict=True):
            label = f"{context:,} tokens each"
            values = [taken * 1e3 for taken in seconds]
            axis.plot(range(BANDS + 1), values, style, label=label, color=color, marker="." * (style == "-"))
        axis.set_title(title, fontsize=10)
        axis.set(ylim=(0, None), ylabel="time per token (ms)")
        axis.set_xlabel(f"bands of layers in host memory, of {BANDS}")
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the cores that are left copy
    contexts = [int(context) for context in options.contexts.split(",")]
    measured = {context: measure(context, options.rounds) for context in contexts}
    computed = {context: H100.predict(REQUESTS, context) for context in contexts}
    for name, lines in (("measured here", measured), ("computed for an H100", computed)):
        print(f"{name}: ms per token with 0, 1, ... of {BANDS} bands out")
        for context, seconds in lines.items():
            print(f"{context:8,} tokens" + "".join(f"{taken * 1e3:9.2f}" for taken in seconds))
    if options.json:
        result = {
            "machine": machine.describe("cpu"),
            "requests": BATCH,
            "measured_seconds": measured,
            "computed_from": {**vars(H100), "requests": REQUESTS},
            "computed_seconds": computed,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        picture(measured, computed, options.plot)


if __name__ == "__main__":
    main()

"""Records the allocations of real training steps: ``python benchmarks/record_allocations.py FOLDER``.

A small transformer is trained on the CPU, on random tokens whose length changes every step: once as it is
("lengths"), once with activation checkpointing, and once with activations kept elsewhere until the backward
pass ("offload"). torch.profiler records every allocation. The plain format keeps them, with all sizes
multiplied by one factor, because tensors that a CPU trains in a minute are small.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from vtensor.allocations import read_allocations
from vtensor.allocations.events import AllocationTrace, Event
from vtensor.allocations.plain import write_plain

LAYERS, HIDDEN, HEADS, VOCABULARY, BATCH = 6, 256, 4, 4096, 4
SHORTEST, LONGEST = 64, 448
STEPS, SCALE, SEED = 14, 16, 21


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(VOCABULARY, HIDDEN),
            nn.Linear(HIDDEN, VOCABULARY, bias=False),
        )
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def offloaded(model: nn.Module) -> AbstractContextManager[object]:
    """Keeps what autograd saves in memory of numpy's, which torch.profiler does not see: it stands for the
    host."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(saved: Tensor) -> object:
        if saved.untyped_storage().data_ptr() in weights:
            return saved
        return saved.detach().numpy().copy(order="K")

    def unpack(kept: object) -> Tensor:
        return kept if isinstance(kept, Tensor) else torch.from_numpy(kept).clone()

    return saved_tensors_hooks(pack, unpack)


def train(checkpointed: bool, saving: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
    torch.manual_seed(SEED)
    lengths = random.Random(SEED)
    model = Model(checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, lengths.randint(SHORTEST, LONGEST) + 1))
        with saving(model):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


WAYS: dict[str, tuple[bool, Callable[[nn.Module], AbstractContextManager[object]]]] = {
    "lengths": (False, lambda model: nullcontext()),
    "checkpointing": (True, lambda model: nullcontext()),
    "offload": (False, offloaded),
}


def record(way: str) -> AllocationTrace:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train(*WAYS[way])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = read_allocations(path, "cpu").events
    notes = [
        f"{STEPS} training steps recorded on the CPU, torch {torch.__version__}, by torch.profiler: {way}",
        f"transformer: {LAYERS} layers, {HIDDEN} hidden, {HEADS} heads, vocabulary {VOCABULARY}, float32, "
        f"AdamW; {BATCH} sequences of {SHORTEST} to {LONGEST} tokens, another length each step; seed {SEED}",
        f"scale: all sizes are {SCALE} times those recorded",
    ]
    return AllocationTrace([Event(kind, name, SCALE * size, 0) for kind, name, size, _ in events], notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write a .csv.xz file for each way of training")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    for way in WAYS:
        trace = record(way)
        path = folder / f"train-{way}.csv.xz"
        write_plain(trace, path)
        peak = max(trace.live_bytes()) / 2**20
        print(f"{path}: {len(trace.events):,} events, peak {peak:,.0f} MiB, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""A decode loop by hand: a model that attends to all earlier tokens, with K and V that grow in place.

python examples/decode_loop.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

import vtensor

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 4, 32, 256
PROMPT, NEW = b"Grow in place: ", 200


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, grow) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        k, v = grow(k, v)  # with all that came before
        attended = scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, caches: list) -> torch.Tensor:
        x = self.embed(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache.grow)
        return x[:, -1] @ self.embed.weight.T


class Concatenated:
    """K and V as most code keeps them: every token copies all of them."""

    def __init__(self) -> None:
        self.k = self.v = torch.empty(1, HEADS, 0, HEAD_DIM)

    def grow(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        return self.k, self.v


class InPlace:
    """The same with vtensor: addresses for 131,072 tokens, memory for the tokens so far."""

    def __init__(self) -> None:
        self.k = vtensor.empty(1, HEADS, 0, HEAD_DIM, grow_dim=2, capacity=131072)
        self.v = vtensor.empty_like(self.k)

    def grow(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k.append(k), self.v.append(v)


@torch.no_grad()
def generate(model: Model, caches: list) -> bytes:
    tokens = list(PROMPT)
    logits = model(torch.tensor([tokens]), caches)
    for _ in tqdm(range(NEW), desc=type(caches[0]).__name__, unit=" tokens", delay=1, leave=False):
        tokens.append(int(logits.argmax()))
        logits = model(torch.tensor([tokens[-1:]]), caches)
    return bytes(tokens)


def main() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    copied = generate(model, [Concatenated() for _ in range(LAYERS)])
    caches = [InPlace() for _ in range(LAYERS)]
    assert generate(model, caches) == copied
    k = caches[0].k
    print(f"{k.length} tokens, the same ones; K of a layer: {k!r}")
    print(f"its address never changed: {k.data_ptr():#x}; reserved: {k.nbytes_reserved:,} bytes")
    draft = caches[0].k.fork()  # a speculative branch: pages are shared until it writes
    draft.append(torch.zeros(1, HEADS, 4, HEAD_DIM)).truncate(k.length)  # four drafts, all rejected
    assert torch.equal(draft, k)


if __name__ == "__main__":
    main()

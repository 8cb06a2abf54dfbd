"""A trainer and a generator, in processes of their own, over one set of weights: a step of the optimizer
reaches the generator, and no weight is copied.

    python examples/weights.py
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import vtensor

TEXT = b"Weights that another process reads are trained in place. " * 8
CONTEXT, WIDTH, NEW = 8, 32, 57


class Model(nn.Module):
    """The next byte from the last eight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.up, self.out = nn.Linear(CONTEXT * WIDTH, 256), nn.Linear(256, 256)

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        return self.out(gelu(self.up(self.embed(contexts).flatten(1))))


@torch.no_grad()
def generate(model: Model) -> bytes:
    tokens = list(TEXT[:CONTEXT])
    for _ in range(NEW):
        tokens.append(int(model(torch.tensor([tokens[-CONTEXT:]])).argmax()))
    return bytes(tokens[CONTEXT:])


def places(model: Model) -> dict[str, tuple[str, int]]:
    """Which byte of which file each parameter begins at, as the kernel says. Equal: the same memory."""
    found = {}
    with open("/proc/self/maps") as maps:
        mappings = [line.split() for line in maps]
    for name, parameter in model.named_parameters():
        for addresses, _, offset, _, inode, *_ in mappings:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if begin <= parameter.data_ptr() < end:
                found[name] = (inode, int(offset, 16) + parameter.data_ptr() - begin)
    return found


def generator(pipe: Connection) -> None:
    """The other process. No weight is sent to it; messages ask it to generate."""
    torch.set_num_threads(1)
    weights = pipe.recv()
    with torch.device("meta"):  # without memory of its own
        model = Model()
    model.load_state_dict(weights.state_dict(), assign=True)
    pipe.send(places(model))
    while pipe.recv() == "generate":
        pipe.send(generate(model))
    weights.close()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=generator, args=(theirs,))
    process.start()

    pool = vtensor.Pool("cpu", shareable=True)
    model = Model()
    vtensor.adopt(model, pool)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ours.send(vtensor.share(model))
    assert ours.recv() == places(model)

    data = torch.tensor(list(TEXT))
    contexts, following = data.unfold(0, CONTEXT, 1)[:-1], data[CONTEXT:]
    for _ in range(4):
        ours.send("generate")
        text = ours.recv()
        assert text == generate(model)  # as in one process
        print(text)
        for _ in range(6):
            optimizer.zero_grad()
            cross_entropy(model(contexts), following).backward()
            optimizer.step()  # in place: the generator has it
    ours.send("end")
    process.join()
    assert process.exitcode == 0
    print(f"{sum(p.nbytes for p in model.parameters()):,} bytes of weights, in memory once")


if __name__ == "__main__":
    main()

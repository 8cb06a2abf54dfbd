"""The text that the demo reads, as tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = Path(__file__).with_name("jargon.txt")


def read_tokens(count: int, vocab_size: int) -> torch.Tensor:
    """The first ``count`` tokens of the text, int64 [1, count].

    The tokenizer is a byte-level BPE trained on the text itself. That takes a fraction of a second and needs
    no download.
    """
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    ids = tokenizer.encode(text).ids
    if len(ids) < count:
        raise ValueError(f"{TEXT.name} is {len(ids)} tokens long, {count} are asked for: ask for fewer")
    return torch.tensor([ids[:count]])

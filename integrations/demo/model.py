"""The demo's text as tokens, its model, and the fastest possible cache, as the limit for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

SEED = 20
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


def make_llama(layers: int, vocab_size: int) -> LlamaForCausalLM:
    """A Llama in float32, with seeded random weights. Its attention is that of Llama 3.2 1B, with 32 query
    heads and 8 KV heads of 64. Everything else is small."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        # Large enough that attention is peaked, so that the next token depends on the text and not only on
        # the last token.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,  # never stops by itself
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class PreallocatedLayer(DynamicLayer):
    """K and V in plain tensors of exactly the final length. Attention gets views of the tokens so far."""

    is_initialized: bool

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.max_len = max_len

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.all_keys, self.all_values = (
                states.new_zeros(*states.shape[:2], self.max_len, states.shape[-1])
                for states in (key_states, value_states)
            )
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        self.all_keys[:, :, start:stop] = key_states
        self.all_values[:, :, start:stop] = value_states
        self.keys, self.values = self.all_keys[:, :, :stop], self.all_values[:, :, :stop]
        return self.keys, self.values


class PreallocatedCache(DynamicCache):
    """The limit: it knows the final length, so it never copies, maps or masks."""

    layers: list[Any]

    def __init__(self, config: LlamaConfig, max_len: int) -> None:
        super().__init__(config=config)
        self.layers = [PreallocatedLayer(max_len) for _ in self.layers]

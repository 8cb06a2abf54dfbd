"""Tiny random models and what the tests of VTensorCache compare it with."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from vtensor.integrations.sdpa import SingleStepView
from vtensor.integrations.transformers import VTensorCache, VTensorLayer

import vtensor

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,  # so that logits are far apart
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GREEDY = {"do_sample": False, "max_new_tokens": 20}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices gain nothing from a second thread, and wait for it where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def before(release: str) -> bool:
    """Whether transformers is older than that."""
    return Version(transformers.__version__) < Version(release)


RECORDED_WINDOW = "transformers before 5.18 hands out more of a recorded window than its mask says"


class SameKernelCache(DynamicCache):
    """A DynamicCache whose single steps go to the kernel that those of a VTensorCache go to, so that both can
    be compared bit for bit."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[-2] > 1 or torch.compiler.is_compiling():
            return states
        return tuple(x.as_subclass(SingleStepView) for x in states)


def make_llama(attention: str, **changes) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes, attn_implementation=attention)).eval()


def make_t5gemma():
    """An encoder and a decoder, each with a window."""
    sizes = SIZES | {"sliding_window": 8}
    parts = {"encoder": sizes, "decoder": sizes}
    config = transformers.T5GemmaConfig(**parts, vocab_size=VOCAB, decoder_start_token_id=2)
    for part in (config, config.encoder, config.decoder):
        part.eos_token_id = None
    return transformers.T5GemmaForConditionalGeneration(config).eval()


def prompt(batch: int = 1, length: int = 70, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model, cache, ids, mask=None, **method):
    torch.manual_seed(11)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        return_dict_in_generate=True,
        output_logits=True,
        **method,
    )


def assert_same_output(ours, theirs) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.logits) == len(theirs.logits)
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        assert torch.equal(a, b), f"logits differ at step {step}"


def assert_same_content(ours, theirs) -> None:
    """K and V of two caches are equal, bit for bit (I2)."""
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        if not isinstance(a, VTensorLayer):
            continue
        assert type(a.keys) is torch.Tensor and type(a.values) is torch.Tensor
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def states(batch=1, new=1, seed=0, head_dim=16):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, new, head_dim, generator=g), torch.randn(batch, 2, new, 16, generator=g)


def filled(config, pool, batch=2, length=70, max_len=256):
    """A VTensorCache and a DynamicCache of the same content."""
    ours, theirs = VTensorCache(config, max_len, pool), SameKernelCache(config=config)
    for layer in range(2):
        for cache in (ours, theirs):
            cache.update(*states(batch, length, seed=layer), layer)
    return ours, theirs


@contextmanager
def pages_left(pool, n):
    """Leaves the pool ``n`` free pages."""
    nbytes = (pool.stats().pages_free - n) * pool.page_size
    with vtensor.empty(nbytes, grow_dim=0, capacity=nbytes, dtype=torch.uint8, pool=pool):
        yield


def before_and_after(make, operation, content):
    """What ``content`` says of a cache, and of one after ``operation``."""
    begun, ended = make(), make()
    operation(ended)
    said = content(begun), content(ended)
    for cache in (begun, ended):
        cache.reset()
    return said


def same(a, b):
    """Whether two values, or lists of values, are equal; tensors by their elements."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return (
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b
    )

"""generate() on a real GPU: a VTensorCache gives what DynamicCache gives."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from vtensor.integrations.transformers import VTensorCache

SIZES = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.1}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


pytestmark = pytest.mark.parametrize("device", ["gpu"], indirect=True)


@pytest.fixture(params=["sdpa", "eager"])
def llama(request, device):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, **SPECIAL, attn_implementation=request.param)
    return transformers.LlamaForCausalLM(config).eval().to("cuda", torch.float32)


def prompts(batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, 512, (batch, length), generator=generator).cuda()


@pytest.mark.parametrize("method", [{"num_beams": 1}, {"num_beams": 4}], ids=["greedy", "beams"])
def test_generate_gives_the_same_tokens(llama, pool, method):
    options = {"do_sample": False, "max_new_tokens": 40, **method}
    ids = prompts(2, 3000)  # two pages of 2 MiB a row: 2,048 tokens of 4 heads of 64 in float32 fill one
    expected = llama.generate(ids, past_key_values=transformers.DynamicCache(config=llama.config), **options)
    cache = VTensorCache(llama.config, 16384, pool)
    assert torch.equal(llama.generate(ids, past_key_values=cache, **options), expected)
    assert pool.stats().pages_used >= 2 * SIZES["num_hidden_layers"]
    cache.reset()


def test_a_conversation_goes_on_over_page_borders(llama, pool):
    theirs, ours = transformers.DynamicCache(config=llama.config), VTensorCache(llama.config, 16384, pool)
    ids = prompts(1, 2040)  # the border is at 2,048 tokens
    for _ in range(3):
        options = {"do_sample": False, "max_new_tokens": 16}
        expected = llama.generate(ids, past_key_values=theirs, **options)
        assert torch.equal(llama.generate(ids, past_key_values=ours, **options), expected)
        ids = torch.cat([expected, prompts(1, 700)], 1)
    ours.reset()

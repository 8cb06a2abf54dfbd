"""Small random models of many architectures, with the caches that the tests give them."""

from __future__ import annotations

import functools

import torch
import transformers as hf
from transformers import EncoderDecoderCache
from vtensor.integrations.transformers import VTensorCache, encoder_decoder_cache

from tiny_models import SIZES, VOCAB, SameKernelCache

WINDOW = 24
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
UNTIED = {"tie_word_embeddings": False}  # a random model whose head is its embedding repeats its input
ENCODER_DECODER = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "decoder_start_token_id": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# A model's class, its config's, and what the config has beside SIZES (or ENCODER_DECODER).
MODELS = {
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "Qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {}),
    "Mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": WINDOW}),
    "Gemma 2": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        MIXED | UNTIED | {"query_pre_attn_scalar": 16, "final_logit_softcapping": None},
    ),
    "Gemma 3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, MIXED | UNTIED),
    "GPT-2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        UNTIED | {"n_positions": 256, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "Phi-3": (hf.Phi3ForCausalLM, hf.Phi3Config, {}),
    "Mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {"num_local_experts": 4}),
    # K is the latent vector, V the rotary part: one head each, of different sizes.
    "DeepSeek-V3": (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config,
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "GPT-OSS": (hf.GptOssForCausalLM, hf.GptOssConfig, MIXED | {"num_local_experts": 4}),
    "Llama 4": (  # chunked attention
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig,
        {
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
        },
    ),
    "Qwen3-Next": (  # linear attention and full attention in turn
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig,
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Falcon-H1": (  # both kinds in one layer
        hf.FalconH1ForCausalLM,
        hf.FalconH1Config,
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
    "MiMo-V2": (  # more heads in the layers with a window, and V smaller than K
        hf.MiMoV2FlashForCausalLM,
        hf.MiMoV2FlashConfig,
        MIXED
        | {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "Inkling": (  # more and smaller heads in the layers with a window; convolutions in each layer
        hf.InklingForCausalLM,
        hf.InklingTextConfig,
        {
            "layer_types": ["hybrid_sliding", "hybrid"],
            "sliding_window_size": WINDOW,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "CPM-Ant": (  # heads that are not a part of the hidden size
        hf.CpmAntForCausalLM,
        hf.CpmAntConfig,
        {"dim_head": 24, "dim_ff": 64, "prompt_length": 4, "segment_types": 4},
    ),
    "T5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "initializer_factor": 3.0},
    ),
    "BART": (
        hf.BartForConditionalGeneration,
        hf.BartConfig,
        {
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 256,
            "init_std": 0.5,
            "forced_eos_token_id": None,
        },
    ),
}


@functools.cache
def make(name: str):
    model, config, own = MODELS[name]
    torch.manual_seed(3)
    base = ENCODER_DECODER if name in ("T5", "BART") else SIZES
    made = model(config(**base | own)).eval()
    made.generation_config.forced_eos_token_id = None
    return made


def caches(model, pool, max_len=256):
    """Ours and Hugging Face's for a model: fresh ones, which one kernel reads alike."""
    if not model.config.is_encoder_decoder:
        return VTensorCache(model.config, max_len, pool), SameKernelCache(config=model.config)
    theirs = EncoderDecoderCache(*(SameKernelCache(config=model.config) for _ in range(2)))
    return encoder_decoder_cache(model.config, max_len, pool), theirs


def halves(cache):
    """The plain caches that a cache consists of."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]

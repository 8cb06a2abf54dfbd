"""Tiny random models for which transformers prepares masks or caches in ways of their own, with inputs such
as their processors give."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers as hf

from tiny_models import SIZES, VOCAB, make_llama, prompt

IMAGE = VOCAB  # the token in whose place a part of the image goes: none of prompt()'s

TEXT = {"vocab_size": VOCAB + 1, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
UNTIED = {"tie_word_embeddings": False}  # as in model_zoo.py
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
DECODER = {
    "d_model": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def _paligemma2():
    text = SIZES | TEXT | UNTIED | {"model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 16}
    vision = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
    return hf.PaliGemmaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
        vocab_size=VOCAB + 1,
        **UNTIED,
    )


def _florence2(encoder_layers: int, decoder_layers: int):
    layers = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers, "encoder_ffn_dim": 64}
    vision = {
        "depths": [1],
        "patch_size": [7],
        "patch_stride": [4],
        "patch_padding": [3],
        "patch_prenorm": [False],
        "embed_dim": [16],
        "num_heads": [2],
        "num_groups": [2],
        "window_size": 4,
        "projection_dim": 32,
    }
    text = TEXT | DECODER | layers | {"model_type": "bart"}
    return hf.Florence2Config(text_config=text, vision_config=vision, image_token_id=IMAGE)


def _blt():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": VOCAB + 1}
    one, two = sizes | {"num_hidden_layers": 1}, sizes | {"num_hidden_layers": 2}
    return hf.BltConfig(
        **TEXT,
        patcher_config=one,
        encoder_config=one | {"num_key_value_heads": 2, "hidden_size_global": 64},
        global_config=one | {"hidden_size": 64},
        decoder_config=two | {"hidden_size_global": 64},
        encoder_hash_byte_group_vocab=32,
        encoder_hash_byte_group_size=[2, 3],
        local_attention_window_len=24,
        num_hidden_layers=2,  # BltConfig has none of its own, and DynamicCache asks for it
    )


def _diffusion_gemma():
    text = {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 8,
        "num_experts": 2,
        "top_k_experts": 1,
        "moe_intermediate_size": 16,
    }
    vision = VISION | {"num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 16}
    del vision["image_size"]
    return hf.DiffusionGemmaConfig(
        text_config=SIZES | TEXT | text, vision_config=vision, image_token_id=IMAGE, canvas_length=8
    )


# A model's class, and what makes its config.
RARE = {
    "PaliGemma 2": (hf.PaliGemmaForConditionalGeneration, _paligemma2),
    "Florence-2, longer decoder": (hf.Florence2ForConditionalGeneration, lambda: _florence2(2, 3)),
    "BLT": (hf.BltForCausalLM, _blt),
    "DiffusionGemma": (hf.DiffusionGemmaForBlockDiffusion, _diffusion_gemma),
}
PROMPT_TUNING = "PEFT prompt tuning"


@functools.cache
def make_rare(name: str):
    """The model. Skips the test where that is PEFT's, and PEFT is not installed."""
    if name == PROMPT_TUNING:
        peft = pytest.importorskip("peft", reason="PEFT is not installed")
        tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        return peft.get_peft_model(make_llama("sdpa"), tuning).eval()
    model, config = RARE[name]
    torch.manual_seed(3)
    made = model(config()).eval()
    for parameter_name, parameter in made.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=_spread(parameter_name))
    return made


def _spread(parameter_name: str) -> float:
    if "encoder_attn" in parameter_name:
        return (
            0.08  # what the encoder read is the same at every step, and more of it makes every token the same
        )
    return 1.0 if "positions" in parameter_name else 0.3


def inputs(name: str, padded: bool = False) -> dict[str, torch.Tensor]:
    """Two prompts and their images; the second has padding on the left if asked for."""
    noise = torch.Generator().manual_seed(7)
    ids = prompt(2, 40)
    mask = torch.ones_like(ids)
    if padded:
        ids[1, :7] = mask[1, :7] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if name == "PaliGemma 2" or name.startswith("Florence-2"):
        given["pixel_values"] = torch.rand(2, 3, 16, 16, generator=noise)
        parts = 17 if name.startswith("Florence-2") else 4
        image = torch.zeros_like(ids)
        image[:, 10 : 10 + parts] = 1
        given["input_ids"] = torch.where(image == 1, IMAGE, ids)
        if name == "PaliGemma 2":  # all is the prefix, whose tokens see each other
            given["token_type_ids"] = torch.zeros_like(ids)
    return given


def continued(model, given: dict[str, torch.Tensor], sequences: torch.Tensor) -> dict[str, torch.Tensor]:
    """What goes on from `sequences`, which generate() made of `given`: seven tokens more."""
    ids = torch.cat([sequences, prompt(2, 7, seed=9)], dim=1)
    if model.config.is_encoder_decoder:
        return given | {"decoder_input_ids": ids}
    more = dict(given, input_ids=ids)
    for name, filling in (("attention_mask", 1), ("token_type_ids", 1)):
        if name in given:
            new = given[name].new_full((2, ids.shape[1] - given[name].shape[1]), filling)
            more[name] = torch.cat([given[name], new], dim=1)
    if "token_type_ids" in given:
        del more["pixel_values"]  # PaliGemma looks for its place among the new tokens
    return more

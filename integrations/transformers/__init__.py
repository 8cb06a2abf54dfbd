"""Hugging Face transformers with K and V that grow in place.

``VTensorCache`` is a ``DynamicCache``: pass it to an unmodified ``model.generate()`` as
``past_key_values``. What a layer hands to attention is a plain view of exactly the tokens stored, as
``DynamicCache`` does, so attention masks, kernels and tokens are the same; only the copy of the whole
past at every token is gone. Importing this changes nothing in transformers.
"""

from __future__ import annotations

from .attention import register_attention, unregister_attention
from .cache import VTensorCache
from .default import install, installed, uninstall
from .encoder_decoder import VTensorEncoderDecoderCache, encoder_decoder_cache
from .hybrid import VTensorHybridLayer, VTensorHybridSlidingWindowLayer
from .layers import VTensorLayer
from .window import VTensorSlidingWindowLayer

__all__ = [
    "VTensorCache",
    "VTensorEncoderDecoderCache",
    "VTensorHybridLayer",
    "VTensorHybridSlidingWindowLayer",
    "VTensorLayer",
    "VTensorSlidingWindowLayer",
    "encoder_decoder_cache",
    "install",
    "installed",
    "register_attention",
    "uninstall",
    "unregister_attention",
]

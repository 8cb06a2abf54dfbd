"""Hugging Face transformers with K and V that grow in place.

``VTensorCache`` is a ``DynamicCache``: pass it to an unmodified ``model.generate()`` as ``past_key_values``.
Like ``DynamicCache``, a layer passes attention exactly the tokens stored, so attention masks, kernels and
tokens are the same. Only the copy of the whole past at every token is gone. The import changes nothing in
transformers. It registers the cache with torch.export.
"""

from __future__ import annotations

from . import release as _release  # noqa: F401  # before code that needs a newer transformers

# isort: split
from .attention import register_attention, unregister_attention
from .cache import VTensorCache, encoder_decoder_cache
from .default import install, installed, uninstall
from .export import register_export
from .hybrid import VTensorHybridLayer, VTensorHybridSlidingWindowLayer
from .layers import VTensorLayer
from .window import VTensorSlidingWindowLayer

__all__ = [
    "VTensorCache",
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

register_export()

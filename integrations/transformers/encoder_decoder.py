"""The cache of an encoder-decoder model: two halves, each a ``VTensorCache``."""

from __future__ import annotations

from transformers import EncoderDecoderCache, PreTrainedConfig

from vtensor import Pool

from .cache import VTensorCache

__all__ = ["encoder_decoder_cache"]


def encoder_decoder_cache(
    config: PreTrainedConfig,
    max_len: int | None = None,
    pool: Pool | None = None,
    *,
    compiled: bool = False,
) -> EncoderDecoderCache:
    """Makes a cache for an encoder-decoder model.

    Both halves are a ``VTensorCache``: the decoder's own K and V, and the K and V of the encoder's output.

    Args:
        config: the model's config.
        max_len: the most tokens of the decoder's sequence. None means no limit. The encoder's half has no
            limit.
        pool, compiled: as for ``VTensorCache``.

    Raises:
        InvalidArgument: as for ``VTensorCache``.
    """
    own = VTensorCache(config, max_len, pool, compiled=compiled)
    return EncoderDecoderCache(own, VTensorCache(config, None, pool, compiled=compiled))

"""The cache of an encoder-decoder model: two halves, each a ``VTensorCache``.

Follows ``EncoderDecoderCache`` in ``transformers/cache_utils.py`` of transformers 5.23.
"""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from vtensor import InvalidArgument, Pool

from .cache import VTensorCache
from .callers import ForOneGeneration, Generation

__all__ = ["VTensorEncoderDecoderCache", "encoder_decoder_cache"]


class VTensorEncoderDecoderCache(ForOneGeneration, EncoderDecoderCache):
    """An ``EncoderDecoderCache`` that is for one model and for one ``generate()`` at a time, as a
    ``VTensorCache`` is. ``encoder_decoder_cache`` makes one."""

    def _generation_begins(self, model: PreTrainedModel, generation: Generation) -> None:
        # The decoder's own half stands for both: a model may have made the other one anew, as T5Gemma does.
        if isinstance(self.self_attention_cache, VTensorCache):
            self.self_attention_cache.begin(model, generation)

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InvalidArgument: a model that asks for it knows of no halves."""
        raise InvalidArgument(
            "[VTensorEncoderDecoderCache] a cache of two halves, but the model that uses it has no "
            "cross-attention: pass past_key_values=VTensorCache(model.config)"
        )


def encoder_decoder_cache(
    config: PreTrainedConfig,
    max_len: int | None = None,
    pool: Pool | None = None,
    *,
    compiled: bool = False,
) -> VTensorEncoderDecoderCache:
    """A cache for an encoder-decoder model: both halves, the decoder's own K and V and those of what the
    encoder read, are a ``VTensorCache``.

    Args:
        config: the model's config.
        max_len: the most tokens of the decoder's sequence; None for no limit. What the encoder read has none.
        pool, compiled: as for ``VTensorCache``.

    Raises:
        InvalidArgument: as ``VTensorCache``.
    """
    own = VTensorCache(config, max_len, pool, compiled=compiled)
    return VTensorEncoderDecoderCache(own, VTensorCache(config, None, pool, compiled=compiled))

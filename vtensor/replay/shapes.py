"""The size of a token's K and V in known models."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vtensor.errors import InvalidArgument


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model's K and V. Elements have two bytes by default."""

    layers: int
    kv_heads: int
    head_dim: int
    item_bytes: int = 2

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token's K, or of its V, in one layer."""
        return self.kv_heads * self.head_dim * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return 2 * self.layers * self.layer_bytes


# From the models' published config.json.
MODELS = {
    "llama-2-7b": ModelShape(32, 32, 128),
    "llama-2-13b": ModelShape(40, 40, 128),
    "llama-3-8b": ModelShape(32, 8, 128),
    "llama-3-70b": ModelShape(80, 8, 128),
    "mistral-7b": ModelShape(32, 8, 128),
    "qwen2.5-7b": ModelShape(28, 4, 128),
    "qwen2.5-32b": ModelShape(64, 8, 128),
}


def model_shape(name: str) -> ModelShape:
    """The shape of a known model, or of ``LAYERSxKV_HEADSxHEAD_DIM``.

    Raises:
        InvalidArgument: if ``name`` is neither.
    """
    if name in MODELS:
        return MODELS[name]
    if match := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})", name, flags=re.ASCII):
        return ModelShape(*(int(number) for number in match.groups()))
    raise InvalidArgument(
        f"[replay] model {name!r}: pass one of {', '.join(MODELS)}, or LAYERSxKV_HEADSxHEAD_DIM as in "
        "32x8x128"
    )

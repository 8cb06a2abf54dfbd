"""What a model's config says of the K and V that its layers cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

__all__ = ["ModelShape"]

# Configs name the sizes of K and V each in its own way, and some models compute them from others. So nothing
# is computed here: of two configs of one kind all such sizes must be the same.
_SIZES = re.compile(r"head|kv|query|rank|hidden_size|d_model|n_embd|embedding_size|channels")


@dataclass(frozen=True)
class ModelShape:
    """The kind of a model, and of each layer its kind, its window and its sizes of K and V."""

    kind: str
    layers: tuple[dict[str, str], ...]

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelShape:
        """That of the decoder of the model that has this config."""
        config = config.get_text_config(decoder=True)
        types, options = get_layer_types_and_kwargs(config)
        layers = []
        sizes: dict[int, dict[str, str]] = {}
        configs = config.per_layer_config
        for kind, own, layer_config in zip(types, options, configs, strict=False):
            if id(layer_config) not in sizes:  # most often one and the same for all layers
                sizes[id(layer_config)] = _sizes(layer_config)
            windows = {name: str(value) for name, value in own.items() if isinstance(value, int)}
            layers.append({"type": kind, **windows, **sizes[id(layer_config)]})
        return cls(config.model_type, tuple(layers))

    def difference(self, other: ModelShape) -> tuple[str, str] | None:
        """The first thing in which the two differ, as this one has it and as the other; None if alike."""
        if self.kind != other.kind:
            return f"model_type={self.kind!r}", f"model_type={other.kind!r}"
        if len(self.layers) != len(other.layers):
            return f"{len(self.layers)} layers", f"{len(other.layers)} layers"
        for number, (mine, its) in enumerate(zip(self.layers, other.layers, strict=True)):
            for name in {**mine, **its}:
                if mine.get(name) != its.get(name):
                    where = f"in layer {number}"
                    return f"{name}={mine.get(name)} {where}", f"{name}={its.get(name)} {where}"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelShape:
        return self  # nothing in it changes


def _sizes(config: PreTrainedConfig) -> dict[str, str]:
    return {
        name: str(value)
        for name, value in vars(config).items()
        if isinstance(value, int | list | tuple) and _SIZES.search(name)
    }

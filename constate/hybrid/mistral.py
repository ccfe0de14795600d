"""Mistral (Jiang et al., 2310.06825): Llama's block, its attention over a window in every layer.

A token sees itself and the `sliding_window` - 1 before it, so that each layer's cache is a ring; null means
full attention, as in the later releases. Configs with `layer_types`, which transformers hands to another
family, are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.architecture import Architecture
from .transformer import Traits, TransformerConfig, build, weights


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The keys of Hugging Face's config.json for model_type "mistral"."""

    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    @property
    def traits(self) -> Traits:
        return Traits(windows=[self.sliding_window] * self.num_hidden_layers)


ARCHITECTURE = Architecture("mistral", Config, build, weights)

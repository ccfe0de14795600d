"""Qwen2 (Yang et al., 2407.10671): Llama's block with biases on q, k and v, and a window on some layers.

The window is used only where `use_sliding_window` says so: on the layers that `layer_types` calls
sliding_attention, without that list on those from `max_window_layers` on. The files name a
`sliding_window` also where it is not in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.architecture import Architecture
from .transformer import Traits, TransformerConfig, build, weights, windows_by_layer


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The keys of Hugging Face's config.json for model_type "qwen2"."""

    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: Sequence[str] | None = None

    @property
    def windows(self) -> Sequence[int | None]:
        """Each layer's window, None for full attention."""
        window = self.sliding_window if self.use_sliding_window else None
        return windows_by_layer(self.num_hidden_layers, window, self.layer_types, self.max_window_layers)

    @property
    def traits(self) -> Traits:
        return Traits(qkv_bias=True, windows=self.windows)


ARCHITECTURE = Architecture("qwen2", Config, build, weights)

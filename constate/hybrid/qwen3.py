"""Qwen3 (Yang et al., 2505.09388): q and k are normed a head before they are rotated, in place of biases.

`head_dim` does not follow from the width and the heads; windows are those of Qwen2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.architecture import Architecture
from . import qwen2
from .transformer import Traits, build, weights


@dataclass(frozen=True)
class Config(qwen2.Config):
    """The keys of Hugging Face's config.json for model_type "qwen3"."""

    head_dim: int | None = 128
    attention_bias: bool = False

    @property
    def traits(self) -> Traits:
        bias = self.attention_bias
        return Traits(qkv_bias=bias, out_bias=bias, qk_norm=True, windows=self.windows)


ARCHITECTURE = Architecture("qwen3", Config, build, weights)

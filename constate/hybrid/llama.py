"""Llama (Touvron et al., 2302.13971; 2407.21783): the transformer, and the baseline of every comparison.

Full attention in every layer, no bias unless the config asks for one. A hybrid whose every layer is
attention: no code path of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.architecture import Architecture
from .transformer import Traits, TransformerConfig, build, weights


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The keys of Hugging Face's config.json for model_type "llama"."""

    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(qkv_bias=self.attention_bias, out_bias=self.attention_bias, mlp_bias=self.mlp_bias)


ARCHITECTURE = Architecture("llama", Config, build, weights)

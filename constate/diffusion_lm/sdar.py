"""SDAR (Cheng et al., 2510.06303): Qwen3 turned into a block diffusion model.

Qwen3's layers and names. A place sees its whole block and all blocks before it, blocks being counted from
the row's start, prompt included; the logits at a place predict that place. Published checkpoints may leave
the mask to their tokenizer and the block's size to their name ("b16" ...): without `block_size` it is 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.architecture import Architecture
from ..hybrid import qwen3
from ..hybrid.transformer import Traits, build, weights
from .denoiser import Denoiser, Masked, masked_diffusion


@dataclass(frozen=True)
class Config(qwen3.Config, Masked):
    """The keys of Hugging Face's config.json for model_type "sdar"."""

    mask_token_id: int | None = None
    block_size: int = 4

    @property
    def traits(self) -> Traits:
        return replace(super().traits, block=self.block_size)

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id, block=self.block_size)


ARCHITECTURE = Architecture("sdar", Config, build, weights, decode=masked_diffusion)

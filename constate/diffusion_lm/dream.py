"""Dream (Ye et al., 2508.15487): Qwen2.5 gone on training as a masked diffusion model.

Qwen2's layers, its biases on q, k and v and its names, without a causal mask: every place sees the whole
row. The one-place shift is kept: the logits at place i - 1 predict place i (Gong et al., 2410.17891).
DiffuCoder's checkpoints are of the same model_type. That is written with a capital letter.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.architecture import Architecture
from ..hybrid import qwen2
from ..hybrid.transformer import Traits, build, weights
from .denoiser import Denoiser, Masked, masked_diffusion


@dataclass(frozen=True)
class Config(qwen2.Config, Masked):
    """The keys of Hugging Face's config.json for model_type "Dream"."""

    mask_token_id: int | None = None

    @property
    def traits(self) -> Traits:
        return Traits(qkv_bias=True, windows=self.windows, block=None)

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id, shift=True)


ARCHITECTURE = Architecture("Dream", Config, build, weights, decode=masked_diffusion)

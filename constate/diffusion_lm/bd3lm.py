"""BD3-LM (Arriola et al., 2503.09573): MDLM's stack, read block by block.

A place sees its own block and all blocks before it. Its authors write the same model down for each size of
block, and with `adaln` false without the noise that MDLM's branches hear. What their code reads beside
each other in training, noisy and clean, is `streams.py`; a cache holds what is clean.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.architecture import Architecture
from ..core.model import Model
from ..core.weights import Rule, drop
from . import mdlm
from .denoiser import Denoiser, masked_diffusion


@dataclass(frozen=True)
class Config(mdlm.Config):
    """The keys of Hugging Face's config.json for model_type "bd3lm". The last four say how it was trained
    and is computed."""

    block_size: int = 1
    adaln: bool = True
    cross_attn: bool = True
    causal: bool = False
    var_min: bool = True
    sampling_eps_min: float = 1e-3
    sampling_eps_max: float = 0.999
    attn_backend: str = "flex"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cross_attn or self.causal:
            raise ValueError(
                f"cross_attn {self.cross_attn} and causal {self.causal}: only models that were trained block "
                "by block (true and false) are denoisers of blocks"
            )
        if self.time_conditioning:
            raise ValueError(
                "time_conditioning true: a block's noise would be heard by the clean blocks that are read "
                "with it, and no published model is such"
            )

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id, block=self.block_size)


def build(config: Config) -> Model:
    return mdlm.build(config, config.block_size, config.adaln)


def weights(config: Config) -> list[Rule]:
    """MDLM's names; what their sampler keeps beside them is dropped."""
    return [*mdlm.weights(config, config.adaln), drop("sampling_eps_min"), drop("sampling_eps_max")]


ARCHITECTURE = Architecture("bd3lm", Config, build, weights, decode=masked_diffusion)

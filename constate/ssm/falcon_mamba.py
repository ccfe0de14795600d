"""Falcon Mamba (Zuo et al., 2410.05355): Mamba whose dt, B and C are normed before they enter the scan.

Each of the three is divided by its root mean square, without a weight (section 3.2), which keeps the
training of a 7B model stable. All else is Mamba's; checkpoints are in Hugging Face's format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.architecture import Architecture
from .mamba import Config as MambaConfig
from .mamba import MambaSpec, build, weights


@dataclass(frozen=True)
class Config(MambaConfig):
    """The keys of Hugging Face's config.json for model_type "falcon_mamba": Mamba's, and the norms' eps."""

    mixer_rms_eps: float = 1e-6

    @property
    def spec(self) -> MambaSpec:
        return replace(super().spec, norm_eps=self.mixer_rms_eps)


ARCHITECTURE = Architecture("falcon_mamba", Config, build, weights)

"""Our own format for denoisers: a `composed` list of layers that see both sides, or whole blocks.

    {"model_type": "composed_diffusion", "vocab_size": 1025, "hidden_size": 128, "layers": [...],
     "mask_token_id": 1024, "shift": true, "block": null}

`block` null: every place sees the whole row; B: its own block of B places and all before (Arriola et al.,
2503.09573). With `shift`, the logits at place i - 1 predict place i, as in the model that it may have been
made from (Gong et al., 2410.17891). Every layer's mixer is attention: a recurrence reads one way.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.architecture import Architecture
from ..core.model import Model
from ..hybrid import composed
from .denoiser import Denoiser, Masked, masked_diffusion


@dataclass(frozen=True)
class Config(composed.Config, Masked):
    """The keys of `composed`, and those of the file's header."""

    mask_token_id: int | None = None
    shift: bool = False
    block: int | None = None

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id, self.shift, self.block)


def build(config: Config) -> Model:
    return composed.build(config, config.block)


ARCHITECTURE = Architecture("composed_diffusion", Config, build, composed.weights, decode=masked_diffusion)

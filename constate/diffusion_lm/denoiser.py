"""What a masked diffusion model tells its decoder, its trainer and its scorer. Knows no tensors.

A denoiser is a stack whose attention is not causal: it reads a row in which some places hold the mask id
and gives logits for what stands there. Everything else about it is a `Denoiser`, which the model's Config
makes of config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.model import Model


@dataclass(frozen=True)
class Denoiser:
    """How a masked diffusion model is to be asked.

    `mask_id` stands for a place that is not yet written. With `shift`, the logits at place i - 1 predict
    place i, as in the autoregressive model that it was made from; place 0 keeps its own. `block` B: a place
    sees its whole block of B places, counted from the row's start, and all blocks before; None: the whole
    row. `time_conditioned`: the model also hears how much of a row is masked (see `mdlm`).
    """

    mask_id: int
    shift: bool = False
    block: int | None = None
    time_conditioned: bool = False

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"block {self.block}: at least 1 place is wanted, or none for the whole row")

    @property
    def exact_cache(self) -> bool:
        """Whether what a cache holds of a finished block stays right while later places are written."""
        return self.block is not None


class Masked:
    """What the Config of a masked diffusion model derives from. `mask` is the mask id that it knows of, if
    any; `asked(mask_id)` how a model with this mask id is to be asked."""

    @property
    def mask(self) -> int | None:
        return getattr(self, "mask_token_id", None)

    def asked(self, mask_id: int) -> Denoiser:
        raise NotImplementedError(f"{type(self).__module__} does not say how its models are asked")


def denoiser(model: Model) -> Denoiser:
    """How this model is to be asked; its mask id is config.json's, or else that of the tokenizer's mask
    token. Raises ValueError for a model that is no denoiser, for one without a mask id, and for a mask id
    that its embedding lacks."""
    if not isinstance(model.config, Masked):
        name = model.architecture.model_type if model.architecture else type(model.config).__module__
        raise ValueError(f"a {name} model writes one token after another: it has no masks to fill")
    mask = model.config.mask
    if mask is None and model.tokenizer is not None and "mask_token" in model.special_tokens:
        mask = model.tokenizer.token_to_id(model.special_tokens["mask_token"])
    if mask is None:
        raise ValueError(
            "neither config.json (mask_token_id) nor the tokenizer (mask_token) names a mask, and nothing "
            "else says which places are to be filled: add the mask_token_id that the model was trained with"
        )
    if not 0 <= mask < model.embed.num_embeddings:
        raise ValueError(
            f"mask_token_id {mask} is outside the embedding of {model.embed.num_embeddings} rows"
        )
    return model.config.asked(mask)


def masked_diffusion(*args: Any, **options: Any) -> Any:
    """The decoder of denoisers: `diffusion_lm.decode.masked_diffusion`."""
    from .decode import masked_diffusion as decode  # it asks for a model's Denoiser, which is made here

    return decode(*args, **options)

"""What each kind of model is trained on and scored by. Knows losses and scores; no optimiser and no files.

Autoregressive models predict each next token; denoisers the masked places (`training.diffusion`), and what
is scored of them is a bound, under keys that say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..core.architecture import Architecture
from ..core.model import Model
from ..diffusion_lm import composed_diffusion, likelihood
from ..hybrid import composed
from .batches import batch
from .diffusion import masked_loss
from .score import WINDOW, bits_per_byte
from .text import END_ID, Text


@dataclass(frozen=True)
class Objective:
    """`loss(model, ids, step, seed)` is the mean of a step's batch of the training text, a scalar in nats a
    predicted token; `score(model, text, every)` reads each `every`-th window of a text and names what it
    found; `held_out` is that name in the log."""

    architecture: Architecture
    loss: Callable[[Model, Tensor, int, int], Tensor]
    score: Callable[[Model, Text, int], Mapping[str, float]]
    held_out: str


def of(model_type: object, recipe: str) -> Objective:
    """The objective of a recipe's config. Raises ValueError for what is not trained here."""
    if model_type not in OBJECTIVES:
        known = " or ".join(map(repr, OBJECTIVES))
        raise ValueError(f"recipe {recipe}: only configs of model_type {known} are trained")
    return OBJECTIVES[str(model_type)]


def _next_token(model: Model, ids: Tensor, step: int, seed: int) -> Tensor:
    heard, wanted, spans = batch(ids, step, seed)
    return F.cross_entropy(model(heard, spans), wanted)


def _code_length(model: Model, text: Text, every: int) -> Mapping[str, float]:
    return {"bits_per_byte": bits_per_byte(model, text.ids, text.nbytes, every=every)}


def _bound(model: Model, text: Text, every: int) -> Mapping[str, float]:
    options = {"window": WINDOW, "start": END_ID, "every": every}
    bound = likelihood.bits_per_byte(model, text.ids, text.nbytes, **options)
    return {"bits_per_byte_bound": bound.value, "standard_error": bound.error}


OBJECTIVES: Mapping[str, Objective] = {
    "composed": Objective(composed.ARCHITECTURE, _next_token, _code_length, "held_out_bpb"),
    "composed_diffusion": Objective(
        composed_diffusion.ARCHITECTURE, masked_loss, _bound, "held_out_bpb_bound"
    ),
}

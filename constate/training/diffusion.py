"""The loss that denoisers are trained on: plain cross-entropy at masked places.

A place is masked with its group's probability, that of the linear schedule at a time drawn evenly over
(0, 1): the row's, or the block's where the model is block-causal. Every masked place weighs the same: the
bound's own weights (`diffusion_lm.schedules`) let the few groups with little masked drown the others in
noise, and are kept for scoring. Knows batches and predictions; no optimiser.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.model import Model
from ..diffusion_lm.denoiser import denoiser
from ..diffusion_lm.likelihood import groups
from ..diffusion_lm.schedules import LINEAR
from ..diffusion_lm.streams import predict
from ..spans import Spans
from .batches import batch


def masked_loss(model: Model, text: Tensor, step: int, seed: int) -> Tensor:
    """Mean nats a masked place of this step's batch, a scalar. What is masked follows from seed and step.

    A row's place 0 is never masked: a shifted model has nothing before it to predict it from.
    """
    clean, _, spans = batch(text, step, seed)
    about = denoiser(model)
    at = drawn(spans, about.block, seed, step).nonzero().flatten()
    noisy = clean.index_fill(0, at, about.mask_id)
    return F.cross_entropy(predict(model, clean, noisy, spans, at), clean[at])


def drawn(spans: Spans, block: int | None, seed: int, step: int) -> Tensor:
    """Which places a step masks, (n,) bool: none of a row's first, and at least one."""
    g = torch.Generator().manual_seed(seed * 1_000_003 + step)
    group = groups(spans, block)
    count = int(group[-1]) + 1
    # One time from each of `count` equal parts of (0, 1), in random order: no step sees easy rows alone.
    time = (torch.randperm(count, generator=g) + torch.rand(count, generator=g)) / count
    masked = torch.rand(spans.total, generator=g) < LINEAR.masked(time)[group]
    masked[spans.position == 0] = False
    if not masked.any():
        masked[-1] = True
    return masked

"""Bits per byte of a text that the model has not met: comparable across tokenizers. Knows texts by name."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.model import Model
from ...diffusion_lm import likelihood
from ...diffusion_lm.denoiser import Masked
from ...training.score import WINDOW, bits_per_byte
from .reading import fits
from .row import row
from .texts import read

SEED = 0  # of a denoiser's draws


def bpb(model: Model, name: str, text: str | None = None) -> dict[str, Any]:
    """One row: `score` bits a byte, of `n` bytes; `chance` is what equal odds for every id would give.

    The text is read in windows, each from an empty state (`setting` says how long). Nothing is drawn, so
    that `seed`, `low` and `high` are None. A denoiser's score is a bound from above, as `bound` and
    `setting` say, and estimated: drawn from `seed`, it lies between `low` and `high`, 1.96 standard errors
    to either side, in 95 of 100 such estimates. Raises ValueError for a model without a tokenizer, and for
    a denoiser without a mask.
    """
    if model.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, and bits per byte are those of a text")
    title, content = read(text)
    tokens = torch.tensor(model.tokenizer.encode(content, add_special_tokens=False).ids)
    size = len(content.encode())
    fits(model, name, min(WINDOW, len(tokens)))
    start = min(model.eos_ids, default=0)
    found = row(
        "bpb",
        model,
        name,
        setting=f"{title}, windows of {WINDOW} tokens",
        score=math.nan,
        chance=math.log2(model.vocab) * len(tokens) / size,
        n=size,
        tokens=WINDOW,
    )
    found["bound"] = isinstance(model.config, Masked)
    tokens = tokens.to(model.device)
    if not found["bound"]:
        return found | {"score": bits_per_byte(model, tokens, size, start=start)}
    bound = likelihood.bits_per_byte(model, tokens, size, window=WINDOW, start=start, seed=SEED)
    return found | {
        "seed": SEED,
        "setting": f"{found['setting']}; an upper bound, from {likelihood.SAMPLES} draws each",
        "score": bound.value,
        "low": bound.value - 1.96 * bound.error,
        "high": bound.value + 1.96 * bound.error,
    }

"""Bits per byte of a text that the model has not met: comparable across tokenizers. Knows texts by name."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.model import Model
from ...diffusion_lm import likelihood
from ...diffusion_lm.denoiser import Masked
from ...training import score
from ...training.score import WINDOW
from .intervals import Z, times
from .reading import costs, first_id, fits
from .row import row
from .texts import read

SEED = 0  # of a denoiser's draws


def bpb(
    model: Model, name: str, text: str | None = None, *, window: int = WINDOW, every: int = 1
) -> dict[str, Any]:
    """One row: `score` bits a byte, of `n` bytes; `chance` is what equal odds for every id would give.

    The text is read in windows, each from an empty state, and of them one in `every`; window 0 is the whole
    text at once, through the state, in memory that does not grow with it (but for its ids) where the model's
    state does not. `low` to `high` is the 95% interval over stretches of WINDOW tokens: of what other text
    of this kind would cost, and no measure of how sure the difference of two models on this text is. A
    denoiser's score is a bound from above, as `bound` and `setting` say; its interval is that of the draws
    from `seed` that estimate it. Raises ValueError for an empty text, a window beyond the model's positions,
    a model without a tokenizer, `every` of a text that is read whole, and a denoiser without a mask or with
    window 0.
    """
    if every > 1 and not window:
        raise ValueError(f"every {every} is of windows, and window 0 reads the whole text: give one of them")
    if model.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, and bits per byte are those of a text")
    title, content = read(text)
    tokens = torch.tensor(model.tokenizer.encode(content, add_special_tokens=False).ids)
    size = len(content.encode())
    if not len(tokens):
        raise ValueError(f"{title} is empty: bits per byte are those of a text")
    fits(model, name, min(window or len(tokens), len(tokens)))
    cuts = range(0, len(tokens), window * every or len(tokens))
    heard = sum(min(window or len(tokens), len(tokens) - at) for at in cuts)  # tokens
    some = f", one in {every}" if every > 1 else ""
    found = row(
        "bpb",
        model,
        name,
        setting=f"{title}, windows of {window} tokens{some}" if window else f"{title}, read whole",
        score=math.nan,
        chance=math.log2(model.vocab) * len(tokens) / size,
        n=size * heard // len(tokens),
        tokens=window or len(tokens),
        text=title,
    )
    found["bound"] = isinstance(model.config, Masked)
    if not found["bound"]:
        return found | _exact(model, tokens, size, window, every)
    if not window:
        raise ValueError(f"{name} is a masked diffusion model, which holds no state: a window is wanted")
    tokens = tokens.to(model.device)
    start = first_id(model)
    read_as: dict[str, Any] = {"window": window, "every": every, "start": start, "seed": SEED}
    bound = likelihood.bits_per_byte(model, tokens, size, **read_as)
    return found | {
        "seed": SEED,
        "setting": f"{found['setting']}; an upper bound, from {likelihood.SAMPLES} draws each",
        "score": bound.value,
        "low": bound.value - Z * bound.error,
        "high": bound.value + Z * bound.error,
    }


def _exact(model: Model, tokens: torch.Tensor, size: int, window: int, every: int) -> dict[str, float | None]:
    """`score`, `low` and `high`."""
    start, bits = first_id(model), len(tokens) / size / math.log(2)  # bits a byte for one nat a token
    if window:
        pieces = score.costs(model, tokens.to(model.device), window=window, every=every, start=start)
    else:
        pieces = (piece.flatten() for piece in costs(model, [tokens], start=start))
    stretches = torch.cat(list(pieces)).split(WINDOW)
    sums = torch.stack([stretch.double().sum() for stretch in stretches])
    count = sum(len(stretch) for stretch in stretches)
    mean = sums.sum() / count
    off = sums - mean * torch.tensor([len(stretch) for stretch in stretches])
    found: dict[str, float | None] = {"score": float(mean) * bits, "low": None, "high": None}
    if len(off) > 1:
        half = (
            times(len(off)) * bits * math.sqrt(float(off.square().sum()) * len(off) / (len(off) - 1)) / count
        )
        found |= {"low": float(mean) * bits - half, "high": float(mean) * bits + half}
    return found

"""Bits per byte of a text that the model has not met: comparable across tokenizers. Knows texts by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ...core.model import Model
from ...diffusion_lm import likelihood
from ...diffusion_lm.denoiser import Masked
from ...training.score import WINDOW, bits_per_byte
from ...training.text import shipped

BOOK = "northanger_abbey"  # what no shipped model was trained on
SEED = 0  # of a denoiser's draws


def read(text: str | None) -> tuple[str, str]:
    """A text's name and content: a shipped one, or a UTF-8 file. Raises ValueError for neither."""
    name = text or BOOK
    if name in (BOOK, "shakespeare"):
        return name, shipped(name)
    try:
        return Path(name).name, Path(name).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"--text {name}: neither {BOOK}, shakespeare nor a file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {name}: not UTF-8 ({error}); plain text is wanted") from None


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
    start = min(model.eos_ids, default=0)
    row = {
        "probe": "bpb",
        "model": name,
        "seed": None,
        "setting": f"{title}, windows of {WINDOW} tokens",
        "score": math.nan,
        "chance": math.log2(model.vocab) * len(tokens) / size,
        "n": size,
        "low": None,
        "high": None,
        "bound": isinstance(model.config, Masked),
        "params": sum(p.numel() for n, p in model.named_parameters() if not n.endswith(".scales")),
        "state_bytes": model.cost().held.get("state", 0),
        "dtype": model.weight_dtype,
    }
    tokens = tokens.to(model.device)
    if not row["bound"]:
        return row | {"score": bits_per_byte(model, tokens, size, start=start)}
    bound = likelihood.bits_per_byte(model, tokens, size, window=WINDOW, start=start, seed=SEED)
    return row | {
        "seed": SEED,
        "setting": f"{row['setting']}; an upper bound, from {likelihood.SAMPLES} draws each",
        "score": bound.value,
        "low": bound.value - 1.96 * bound.error,
        "high": bound.value + 1.96 * bound.error,
    }

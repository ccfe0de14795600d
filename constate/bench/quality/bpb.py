"""Bits per byte of a text that the model has not met: comparable across tokenizers. Knows texts by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ...core.model import Model
from ...training.score import WINDOW, bits_per_byte
from ...training.text import shipped

BOOK = "northanger_abbey"  # what no shipped model was trained on


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
    that `seed`, `low` and `high` are None. Raises ValueError for a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, and bits per byte are those of a text")
    title, content = read(text)
    tokens = torch.tensor(model.tokenizer.encode(content, add_special_tokens=False).ids)
    size = len(content.encode())
    start = min(model.eos_ids, default=0)
    score = bits_per_byte(model, tokens.to(model.embed.weight.device), size, start=start)
    return {
        "probe": "bpb",
        "model": name,
        "seed": None,
        "setting": f"{title}, windows of {WINDOW} tokens",
        "score": score,
        "chance": math.log2(model.vocab) * len(tokens) / size,
        "n": size,
        "low": None,
        "high": None,
        "params": sum(p.numel() for p in model.parameters()),
        "state_bytes": model.cost().held.get("state", 0),
    }

"""The row of results that every probe writes: who was asked, what came of it, what it weighs."""

from __future__ import annotations

from typing import Any

from ...core.model import Model
from .texts import met


def row(
    probe: str,
    model: Model,
    name: str,
    *,
    setting: str,
    score: float,
    chance: float,
    n: int,
    seed: int | None = None,
    low: float | None = None,
    high: float | None = None,
    tokens: int = 0,
    text: str | None = None,
) -> dict[str, Any]:
    """`low` to `high` is the score's 95% interval, None where nothing was drawn. The bytes are what one
    sequence holds behind `tokens` tokens: recurrent state, convolutions' history, keys and values. A row of
    a `text` says too whether the model was trained on it, `contaminated`."""
    held = model.cost(0, tokens).held
    found = {
        "probe": probe,
        "model": name,
        "seed": seed,
        "setting": setting,
        "score": score,
        "chance": chance,
        "n": n,
        "low": low,
        "high": high,
        "params": sum(p.numel() for n, p in model.named_parameters() if not n.endswith(".scales")),
        "state_bytes": held.get("state", 0),
        "conv_bytes": held.get("conv", 0),
        "kv_bytes": held.get("kv", 0),
        "dtype": model.weight_dtype,
    }
    return found if text is None else found | {"contaminated": met(name, text)}

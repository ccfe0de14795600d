"""The row of results that every probe writes: who was asked, what came of it, what it weighs."""

from __future__ import annotations

from typing import Any

from ...core.model import Model


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
) -> dict[str, Any]:
    """`low` to `high` is the score's 95% interval, None where nothing was drawn. The bytes are what one
    sequence holds behind `tokens` tokens: recurrent state, convolutions' history, keys and values."""
    held = model.cost(0, tokens).held
    return {
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

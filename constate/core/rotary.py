"""Rotary position embedding (Su et al., 2104.09864) and its context extensions.

Knows positions and frequencies; holds no tensor, so a model built without memory needs nothing filled in.
The halves convention of Hugging Face: channel i is rotated with channel i + dim / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .mixer import Call


@dataclass(frozen=True)
class Rotary:
    """Frequencies of one rotary embedding, radians a position, and the factor on cos and sin."""

    frequencies: tuple[float, ...]
    factor: float = 1.0

    @staticmethod
    def of(parameters: Mapping[str, Any], head_dim: int, max_positions: int | None = None) -> Rotary:
        """From `rope_parameters` (or the older `rope_theta` + `rope_scaling` in one mapping).

        Types: default, linear (Chen et al., 2306.15595), llama3, yarn (Peng et al., 2309.00071), longrope
        (Ding et al., 2402.13753) where its two tables are one: a divisor for each frequency.
        `max_positions` stands in for a missing `original_max_position_embeddings`. Raises ValueError for
        an unknown type, an unknown key, and for "dynamic", which turns earlier keys as the text grows.
        """
        p = dict(parameters)
        kind = p.pop("rope_type", None) or p.pop("type", None) or "default"
        p.pop("type", None)
        theta = float(p.pop("rope_theta", 10000.0))
        if not theta > 0:
            raise ValueError(f"rope_theta {theta:g}: a base above 0 is wanted")
        dim = int(head_dim * p.pop("partial_rotary_factor", 1.0))
        if dim < 2 or dim % 2:
            raise ValueError(f"rotary embedding over {dim} of {head_dim} channels: an even number is wanted")
        base = [theta ** (-i / dim) for i in range(0, dim, 2)]
        if kind == "default":
            rotary = Rotary(tuple(base))
            p.pop("original_max_position_embeddings", None)
        elif kind == "linear":
            scale = _need(p, "factor", kind)
            rotary = Rotary(tuple(f / scale for f in base))
        elif kind == "llama3":
            rotary = _llama3(base, p, max_positions)
        elif kind == "yarn":
            rotary = _yarn(base, theta, dim, p, max_positions)
        elif kind == "longrope":
            rotary = _longrope(base, p, max_positions)
        else:
            why = "it re-rotates keys that are already cached, so no cache of it can be exact"
            known = "known are default, linear, llama3, yarn, longrope"
            raise ValueError(f"rope_type {kind!r}: {why if kind == 'dynamic' else known}")
        if p:
            raise ValueError(f"rope_type {kind!r} does not know the keys {sorted(p)}")
        return rotary

    @property
    def dim(self) -> int:
        """How many channels of a head are rotated; the rest pass through."""
        return 2 * len(self.frequencies)

    def rotate(self, x: Tensor, call: Call) -> Tensor:
        """x (n, h, k) rotated to its tokens' positions. cos and sin are made once a call and shared by
        every layer with the same frequencies."""
        if self not in call.shared:
            frequencies = torch.tensor(self.frequencies, device=x.device)
            angle = call.positions.float()[:, None, None] * frequencies
            cos, sin = angle.cos() * self.factor, angle.sin() * self.factor
            # (a, b) turns to (a cos - b sin, b cos + a sin): x times the one, x's halves swapped the other.
            call.shared[self] = (torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
        cos, sin = call.shared[self]
        head = x[..., : self.dim].float()
        turned = torch.addcmul(head * cos, head.roll(self.dim // 2, dims=-1), sin).to(x.dtype)
        return turned if self.dim == x.shape[-1] else torch.cat([turned, x[..., self.dim :]], dim=-1)


def _need(p: dict[str, Any], key: str, kind: str) -> float:
    if key not in p:
        raise ValueError(f"rope_type {kind!r} wants {key}")
    return float(p.pop(key))


def _llama3(base: list[float], p: dict[str, Any], max_positions: int | None) -> Rotary:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, a ramp between."""
    factor, low, high = (_need(p, k, "llama3") for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = p.pop("original_max_position_embeddings", None) or max_positions
    if original is None:
        raise ValueError("rope_type 'llama3' wants original_max_position_embeddings")

    def scaled(f: float) -> float:
        turns = original * f / (2 * math.pi)  # how often the wave fits into the original context
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        return (1 - keep) * f / factor + keep * f

    return Rotary(tuple(scaled(f) for f in base))


def _yarn(base: list[float], theta: float, dim: int, p: dict[str, Any], max_positions: int | None) -> Rotary:
    """YaRN, equations 17 to 22: a ramp over channels between kept and interpolated frequencies."""
    original = p.pop("original_max_position_embeddings", None) or max_positions
    if original is None:
        raise ValueError("rope_type 'yarn' wants original_max_position_embeddings")
    given = p.pop("factor", None)
    factor = float(given) if given is not None else (max_positions or original) / original
    fast, slow = p.pop("beta_fast", None) or 32, p.pop("beta_slow", None) or 1
    mscale, mscale_all = p.pop("mscale", None), p.pop("mscale_all_dim", None)
    attention, truncate = p.pop("attention_factor", None), p.pop("truncate", True)

    def temperature(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    if attention is None:
        both = mscale and mscale_all
        attention = temperature(mscale) / temperature(mscale_all) if both else temperature()
    low, high = channel(fast), channel(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    slowed = [min(1.0, max(0.0, (i - low) / width)) for i in range(dim // 2)]
    mixed = (f / factor * s + f * (1 - s) for f, s in zip(base, slowed, strict=True))
    return Rotary(tuple(mixed), float(attention))


def _longrope(base: list[float], p: dict[str, Any], max_positions: int | None) -> Rotary:
    """LongRoPE with one table of divisors. With two, the longer text's would turn keys that are cached."""
    short, long = p.pop("short_factor", None), p.pop("long_factor", None)
    if short is None or long is None or list(short) != list(long):
        raise ValueError(
            "rope_type 'longrope' with a short_factor that differs from its long_factor re-rotates keys that "
            "are already cached as a text grows, so no cache of it can be exact"
        )
    if len(short) != len(base):
        raise ValueError(f"rope_type 'longrope' has {len(short)} factors for {len(base)} frequencies")
    original = p.pop("original_max_position_embeddings", None) or max_positions
    factor, attention = p.pop("factor", None), p.pop("attention_factor", None)
    if attention is None:
        if original is None:
            raise ValueError(
                "rope_type 'longrope' wants an attention_factor or original_max_position_embeddings"
            )
        factor = float(factor if factor is not None else (max_positions or original) / original)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rotary(tuple(f / s for f, s in zip(base, short, strict=True)), float(attention))

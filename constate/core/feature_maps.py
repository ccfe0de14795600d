"""Feature maps of linear attention: phi with phi(q) . phi(k) in place of softmax's exp(q . k).

Each acts on the last axis of (..., k) in float32. Knows no attention and no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .norms import unit


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1, positive everywhere (Katharopoulos et al., 2006.16236, equation 7). phi(0) = 1: a token
    is absent only where its features are, never where its key is zero."""
    return F.elu(x) + 1


def identity(x: Tensor) -> Tensor:
    return x


def taylor(x: Tensor) -> Tensor:
    """The second-order Taylor series of exp(q . k / sqrt(k)), (..., k) to (..., 1 + k + k (k + 1) / 2).

    phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt(k) (Arora et al., 2402.18668, section 4.1).
    Departure: x_i x_j and x_j x_i are one feature times sqrt(2), which keeps every product and halves
    the state.
    """
    x = x * x.shape[-1] ** -0.25
    pairs = _pairs.__wrapped__ if torch.compiler.is_compiling() else _pairs  # no cache can be traced
    i, j, weight = pairs(x.shape[-1], x.device)
    return torch.cat([torch.ones_like(x[..., :1]), x, x[..., i] * x[..., j] * weight], dim=-1)


@lru_cache(maxsize=16)
def _pairs(k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs i <= j, and what each product weighs: 1 for two of a kind over sqrt(2), else 1."""
    with torch.inference_mode(False):  # kept between calls: a training may follow
        i, j = torch.triu_indices(k, k, device=device)
        return i, j, torch.where(i == j, math.sqrt(0.5), 1.0)


@dataclass(frozen=True)
class FeatureMap:
    """`apply` maps (..., k) to (..., width(k))."""

    apply: Callable[[Tensor], Tensor]
    width: Callable[[int], int] = lambda k: k

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(x.float())


FEATURE_MAPS = {
    "elu": FeatureMap(elu),
    "relu": FeatureMap(F.relu),
    "identity": FeatureMap(identity),
    "unit": FeatureMap(unit),  # written and found by direction alone; eps 1e-6
    "taylor": FeatureMap(taylor, lambda k: 1 + k + k * (k + 1) // 2),
}


def feature_map(name: str) -> FeatureMap:
    """The map of this name. Raises ValueError for one we do not have."""
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature map {name!r} is not known; known are {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]

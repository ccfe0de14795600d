"""How recurrences with a learned time step are initialised: decay rates and step sizes.

Shared by the state-space and gated-delta mixers, which draw both from the same published ranges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_softplus(x: Tensor) -> Tensor:
    """The y with softplus(y) = x, for x > 0."""
    return x + torch.log(-torch.expm1(-x))


def step_bias(n: int, low: float = 1e-3, high: float = 0.1) -> Tensor:
    """(n,) biases whose softplus is log-uniform in [low, high] (Mamba, section 3.6)."""
    uniform = torch.rand(n)
    return inverse_softplus(torch.exp(uniform * (math.log(high) - math.log(low)) + math.log(low)))


def log_rates(n: int, low: float = 1.0, high: float = 16.0) -> Tensor:
    """(n,) logarithms of decay rates uniform in [low, high] (Mamba-2's reference initialisation)."""
    return (low + (high - low) * torch.rand(n)).log()

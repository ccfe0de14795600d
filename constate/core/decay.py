"""Decay rates and step sizes: how they are initialised, and a projection to them that keeps its precision.

The state-space and gated-delta mixers draw both from the same published ranges.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear


class DecayProjection(Linear):
    """A linear layer to decays: whatever the model's dtype, its bias and what it returns are float32."""

    float32: ClassVar[frozenset[str]] = frozenset({"bias"})

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, None).float() + self.bias


def softplus_decay(x: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """-exp(a_log) softplus(x + bias), the log of Mamba-2's decay, in float32."""
    return -a_log.exp() * F.softplus(x.float() + bias)


def bounded_decay(x: Tensor, a_log: Tensor, bias: Tensor, bound: float) -> Tensor:
    """bound * sigmoid(exp(a_log) (x + bias)), a log of a decay that is never below `bound`, in float32: what
    Kimi Delta Attention's kernels take where a model was trained for it. No limit of `softplus_decay`: the
    two differ everywhere, and a model trained with one repeats itself with the other."""
    return bound * torch.sigmoid(a_log.exp() * (x.float() + bias))


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

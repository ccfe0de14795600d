"""Noise schedules: how much of a text is masked at time t, and what a loss at t weighs.

t runs from 0 (nothing masked) to 1 (everything). In continuous time the negative evidence bound is
E_t [weight(t) x cross-entropy summed over the masked places], weight = m'(t) / m(t) with m the share that
is masked (Sahoo et al., 2406.07524, equation 11; Shi et al., 2406.04329). The bound does not depend on the
schedule, only its estimate's spread does. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-3  # of MDLM's schedules: the share of places that even t = 1 leaves open


@dataclass(frozen=True)
class Schedule:
    """`masked(t)` is the share of places masked at time t in (0, 1], `weight(t)` the loss's; both take and
    give float tensors of one shape."""

    name: str
    masked: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]

    def sigma(self, t: Tensor) -> Tensor:
        """The total noise -log(1 - masked(t)), which time-conditioned models hear."""
        return sigma(self.masked(t))


def sigma(masked: Tensor) -> Tensor:
    """-log(1 - masked) for shares of places in [0, 1]; the log-linear schedule's end at 1."""
    return -torch.log1p(-masked.clamp(max=1 - EPS))


LINEAR = Schedule("linear", lambda t: t, lambda t: 1 / t)
"""LLaDA's (Nie et al., 2502.09992): a place is masked with probability t."""

COSINE = Schedule(
    "cosine",
    lambda t: 1 - torch.cos(t * math.pi / 2),
    lambda t: math.pi / 2 / torch.tan(t * math.pi / 4),  # sin x / (1 - cos x) = 1 / tan(x / 2)
)
"""MaskGIT's (Chang et al., 2202.04200), without the floor that MDLM's has: slow where little is masked."""

LOG_LINEAR = Schedule("log_linear", lambda t: (1 - EPS) * t, lambda t: 1 / t)
"""MDLM's: sigma(t) = -log(1 - (1 - eps) t), so that its noise is finite at t = 1. The factor 1 - eps
cancels in the weight."""

SCHEDULES: Mapping[str, Schedule] = {s.name: s for s in (LINEAR, COSINE, LOG_LINEAR)}

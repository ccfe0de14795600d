"""Normalisation over the last axis. Weights stay float32; the output has the input's dtype."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_normed(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis. Written out because PyTorch's own is a dozen operations
    on a CPU, which in a decode step cost more than the arithmetic."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (length * length / x.shape[-1] + eps).rsqrt()


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 (Zhang & Sennrich, 1910.07467)."""

    float32: ClassVar[frozenset[str]] = frozenset({"weight"})

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (rms_normed(x.float(), self.eps) * self.weight).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMS norm of the output of a mixer with a SiLU gate, over groups of the last axis.

    `before` norms first and gates then (Gated DeltaNet, GLA); otherwise the gated value is normed
    (Mamba-2). x and gate (..., width); each of the `groups` slices of the width has its own rms.
    """

    float32: ClassVar[frozenset[str]] = frozenset({"weight"})

    def __init__(self, width: int, eps: float = 1e-5, *, groups: int = 1, before: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups, self.before = eps, groups, before

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype, gate = x.dtype, F.silu(gate.float())
        x = x.float() if self.before else x.float() * gate
        if self.groups == 1:
            x = rms_normed(x, self.eps) * self.weight
        else:
            x = rms_normed(x.unflatten(-1, (self.groups, -1)), self.eps).flatten(-2) * self.weight
        return (x * gate if self.before else x).to(dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias, in float32 (Ba et al., 1607.06450)."""

    float32: ClassVar[frozenset[str]] = frozenset({"weight", "bias"})

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


class GroupNorm(nn.Module):
    """A layer norm of each of `groups` slices of the last axis, with a weight and a bias for the whole of it
    (Wu & He, 1803.08494)."""

    float32: ClassVar[frozenset[str]] = frozenset({"weight", "bias"})

    def __init__(self, width: int, groups: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        """x (n, width)."""
        return F.group_norm(x.float(), self.groups, self.weight, self.bias, self.eps).to(x.dtype)


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x scaled to length 1 on its last axis, eps inside the root as the published kernels have it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)

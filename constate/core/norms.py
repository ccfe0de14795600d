"""Normalisation over the last axis. Weights stay float32; the output has the input's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.chunked.norms import rms_norm
from .backed import Backed

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


class RMSNorm(Backed):
    """x / rms(x) * (offset + weight), in float32 (Zhang & Sennrich, 1910.07467). `offset` is 1 where a
    checkpoint stores how far the weight is from one (Gemma, Qwen3-Next)."""

    float32: ClassVar[frozenset[str]] = frozenset({"weight"})

    def __init__(self, width: int, eps: float = 1e-5, *, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) - offset)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        norm = rms_norm if self.ops is None else self.ops.rms_norm
        return norm(x, self.whole, self.eps)

    def record(self, tape: Tape, x: Tensor, y: Tensor | None = None, **sum: Any) -> Tensor:
        """x += y, where there is one (`sum`: see Tape.add), and the norm of x, written onto a tape."""
        return tape.add_norm(x, y, tape.constant(self.whole), self.eps, **sum)

    @property
    def whole(self) -> Tensor:
        """What the normed values are multiplied by."""
        return self.weight if self.offset == 0 else self.weight + self.offset


class GatedRMSNorm(Backed):
    """RMS norm of the output of a mixer with a gate, SiLU or `sigmoid`, over groups of the last axis.

    `before` norms first and gates then (Gated DeltaNet, GLA); otherwise the gated value is normed
    (Mamba-2). x and gate (..., width); each of the `groups` slices of the width has its own rms.
    """

    float32: ClassVar[frozenset[str]] = frozenset({"weight"})

    def __init__(
        self, width: int, eps: float = 1e-5, *, groups: int = 1, before: bool = False, sigmoid: bool = False
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups, self.before = eps, groups, before
        self.sigmoid = sigmoid

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        norm = rms_norm if self.ops is None else self.ops.rms_norm
        return norm(
            x,
            self.weight,
            self.eps,
            gate=gate,
            groups=self.groups,
            gate_first=not self.before,
            sigmoid=self.sigmoid,
        )

    def record(self, tape: Tape, x: Tensor, gate: Tensor, heads: int = 1) -> Tensor:
        """Written onto a tape: x and gate (rows, heads * width), each head normed by the same weight."""
        return tape.gated_norm(
            x,
            gate,
            self.weight,
            self.eps,
            groups=heads * self.groups,
            gate_first=not self.before,
            sigmoid=self.sigmoid,
        )


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

    def record(self, tape: Tape, x: Tensor, y: Tensor | None = None, **sum: Any) -> Tensor:
        """x += y, where there is one (`sum`: see Tape.add), and the norm of x, written onto a tape."""
        return tape.add_norm(x, y, self.weight, self.eps, bias=self.bias, centred=True, **sum)


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

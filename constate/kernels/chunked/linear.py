"""The product of a linear layer in plain PyTorch; int8 weights are dequantised first."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .. import shapes


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `reference.linear`. Weights of another dtype than x's are brought to it first."""
    shapes.linear(x, weight, bias, scales, out)
    if scales is not None:
        weight = dequantised(weight, scales)
    y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return y if out is None else out.copy_(y)


def dequantised(weight: Tensor, scales: Tensor) -> Tensor:
    """int8 rows (..., in) with a scale for each 64 of a row, scales (..., ceil(in / 64)), as float32."""
    spread = scales.repeat_interleave(shapes.GROUP, -1)[..., : weight.shape[-1]]
    return weight.float() * spread

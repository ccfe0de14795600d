"""RMS norms, gated or not, in plain PyTorch: in float32, whatever comes in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shapes


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gate: Tensor | None = None,
    groups: int = 1,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> Tensor:
    """See `reference.rms_norm`."""
    shapes.rms_norm(x, weight, gate, groups)
    act = torch.sigmoid if sigmoid else F.silu
    dtype, gate = x.dtype, None if gate is None else act(gate.float())
    x = x.float()
    if gate is not None and gate_first:
        x = x * gate
    if groups == 1:
        x = _normed(x, eps) * weight
    else:
        x = _normed(x.unflatten(-1, (groups, -1)), eps).flatten(-2) * weight
    return (x if gate is None or gate_first else x * gate).to(dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    """Written out because PyTorch's own is a dozen operations on a CPU, which in a decode step cost more than
    the arithmetic."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (length * length / x.shape[-1] + eps).rsqrt()

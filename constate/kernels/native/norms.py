"""RMS norms in C, gated or not: one pass over what PyTorch would read half a dozen times."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import shapes
from ..chunked.norms import rms_norm as chunked
from .call import graded, packed, run, stride
from .glue import GatedNorm


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
    if graded((x, weight, gate)) or (groups > 1 and x.ndim > 2):
        return chunked(x, weight, eps, gate=gate, groups=groups, gate_first=gate_first, sigmoid=sigmoid)
    shapes.rms_norm(x, weight, gate, groups)
    width, heads = x.shape[-1], math.prod(x.shape[1:-1])  # each head is a slice, all with the same weight
    values, gates = packed(x), None if gate is None else packed(gate)
    weight, o = packed(weight), torch.empty(x.shape)
    run(
        "gated_norm",
        GatedNorm,
        x=values,
        gate=gates,
        weight=weight,
        o=o,
        rows=x.shape[0],
        groups=heads * groups,
        size=width // groups,
        x_stride=stride(values),
        gate_stride=stride(gates),
        o_stride=heads * width,
        shared=groups == 1,
        gate_first=gate_first,
        sigmoid=sigmoid,
        eps=eps,
    )
    return o.to(x.dtype)

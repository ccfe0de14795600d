"""The product of a linear layer in C: see matrix.c for the walks, reference for the op.

Knows the record of its kernel. What autograd asks for, and float16, goes to the chunked form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from .. import shapes
from ..chunked import linear as chunked
from .call import fields, graded, packed, run

FORMATS: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.int8: 2})
"""What weights may be, by the kernel's number for it."""


class Matrix(ctypes.Structure):
    _fields_ = fields(
        "weight scales bias x norm y", "rows in out x_stride y_stride format add", "eps"
    )  # norm: x is RMS-normed with this weight and eps first; add: y += ...


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x (..., in) by weight (out, in) float32, bfloat16, or int8 with scales; see reference. Sums run in
    float32. Raises ValueError for shapes that disagree."""
    narrow = torch.float16 in (x.dtype, weight.dtype) or weight.dtype not in FORMATS
    if narrow or graded((x, weight, bias, scales)):
        return chunked.linear(x, weight, bias, scales, out)
    shapes.linear(x, weight, bias, scales, out)
    given = packed(x.reshape(-1, x.shape[-1]))
    direct = out is not None and out.ndim == 2 and out.dtype == torch.float32 and out.stride(1) == 1
    y = out if out is not None and direct else torch.empty(given.shape[0], weight.shape[0])
    run(
        "matrix",
        Matrix,
        weight=weight.contiguous(),
        scales=None if scales is None else scales.float().contiguous(),
        bias=None if bias is None else bias.float().contiguous(),
        x=given,
        y=y,
        rows=given.shape[0],
        **{"in": weight.shape[1]},
        out=weight.shape[0],
        x_stride=given.stride(0),
        y_stride=y.stride(0),
        format=FORMATS[weight.dtype],
    )
    if y is out:
        return y
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y.to(x.dtype) if out is None else out.copy_(y)

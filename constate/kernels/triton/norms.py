"""RMS norms as one Triton kernel, gated or not: every number is read once.

A program norms a few slices whole, so that a slice is as wide as a program's registers hold. Knows strides
of slices; what autograd asks for, and wider slices, go to the chunked form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shapes
from ..chunked.norms import rms_norm as chunked
from .launch import Compiled, as_launched, launch, on_device, power, served
from .maths import sigmoid

WIDEST = 16384
"""Channels of the widest slice that a program holds."""

NUMBERS = 2048
"""Numbers that a program of four warps takes where slices are narrow."""


@triton.jit
def gated_norm(
    x,
    gate,
    weight,
    o,
    slices,
    heads,
    groups,
    size,
    x_row,
    x_head,
    x_channel,
    gate_row,
    gate_head,
    gate_channel,
    o_row,
    eps,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    SLICES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Programs (blocks of slices,): x (rows, heads, groups * size), slice by slice, to o of that order."""
    number = tl.program_id(0) * SLICES + tl.arange(0, SLICES)
    group = number % groups
    head = tl.cast(number // groups % heads, tl.int64)
    row = tl.cast(number // groups // heads, tl.int64)
    i = tl.arange(0, SIZE)
    c = tl.cast(group * size, tl.int64)[:, None] + i[None, :]
    real = (number < slices)[:, None] & (i < size)[None, :]
    y = tl.load(x + (row * x_row + head * x_head)[:, None] + c * x_channel, mask=real, other=0.0)
    y = y.to(tl.float32)
    factor = y
    if gate is not None:
        place = (row * gate_row + head * gate_head)[:, None] + c * gate_channel
        factor = tl.load(gate + place, mask=real, other=0.0).to(tl.float32)
        factor = sigmoid(factor) if SIGMOID else factor * sigmoid(factor)
        if GATE_FIRST:
            y = y * factor
    y = y * tl.rsqrt(tl.sum(y * y, 1) / size + eps)[:, None]
    y = y * tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
    if gate is not None and not GATE_FIRST:
        y = y * factor
    place = (row * o_row + head * (groups * size))[:, None] + c
    tl.store(o + place, y.to(o.dtype.element_ty), mask=real)


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
    """x / sqrt(mean(x^2) + eps) * weight over each of `groups` slices of the last axis, in float32.

    x and gate (..., width), weight (width,). A gate multiplies by silu(gate), or with `sigmoid` by its
    sigmoid: after the norm, or with `gate_first` before it. Returns x's shape and dtype. Raises ValueError
    for shapes that disagree.
    """
    shapes.rms_norm(x, weight, gate, groups)
    if x.shape[-1] // groups > WIDEST or not served(0, (x, weight, gate)):
        return chunked(x, weight, eps, gate=gate, groups=groups, gate_first=gate_first, sigmoid=sigmoid)
    on_device(x, weight=weight, gate=gate)
    return _norm(x, weight, eps, gate, groups, gate_first, sigmoid)


@torch.library.custom_op("constate::triton_rms_norm", mutates_args=())
def _norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor | None,
    groups: int,
    gate_first: bool,
    sigmoid: bool,
) -> Tensor:
    o = x.new_empty(x.shape)
    launch_norm(
        _by_heads(x),
        weight.contiguous(),
        eps,
        None if gate is None else _by_heads(gate),
        _by_heads(o),
        groups=groups,
        gate_first=gate_first,
        sigmoid=sigmoid,
    )
    return o


@_norm.register_fake
def _(x, weight, eps, gate, groups, gate_first, sigmoid):
    return x.new_empty(x.shape)


def launch_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor | None,
    o: Tensor,
    *,
    groups: int = 1,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> None:
    """One launch: x and gate (rows, heads, width) of any strides, weight (width,) contiguous, o (rows, heads,
    width) whose rows alone may lie apart."""
    (rows, heads, width), gates = x.shape, (0, 0, 0) if gate is None else gate.stride()
    size = width // groups
    wide = power(size)
    slices = max(1, NUMBERS // wide)
    launch(
        gated_norm,
        (-(-(rows * heads * groups) // slices),),
        x,
        warps=4 if wide <= NUMBERS else 8,
        x=x,
        gate=gate,
        weight=weight,
        o=o,
        slices=rows * heads * groups,
        heads=heads,
        groups=groups,
        size=size,
        x_row=x.stride(0),
        x_head=x.stride(1),
        x_channel=x.stride(2),
        gate_row=gates[0],
        gate_head=gates[1],
        gate_channel=gates[2],
        o_row=o.stride(0),
        eps=eps,
        GATE_FIRST=gate_first,
        SIGMOID=sigmoid,
        SLICES=slices,
        SIZE=wide,
    )


def _by_heads(x: Tensor) -> Tensor:
    """(..., width) as (rows, heads, width), copied only where more axes than that lie askew."""
    if x.ndim == 2:
        return x.unsqueeze(1)
    return x if x.ndim == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def compiled() -> Iterator[Compiled]:
    """Norms of a head's output, gated, and of the residual stream."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float16, "fp16")):
        for size, heads in ((64, 16), (128, 16), (4096, 1)):
            x, weight = torch.empty(32, heads, size, dtype=dtype), torch.empty(size)
            about = {"head": size, "dtype": name, "default": dtype == torch.bfloat16}
            plain, gated = partial(rms_norm, x, weight, 1e-5), partial(rms_norm, x, weight, 1e-5, gate=x)
            yield from as_launched("rms_norm", plain, **about)
            yield from as_launched("rms_norm", gated, **about, note="gated")

"""The product of a linear layer: PyTorch's, and a Triton kernel for int8 weights under few rows.

A decode step's product costs what its weights cost to read: here they are read as the bytes that they are,
once for all rows, and multiplied by their scales on the way. More rows are a matrix product over the
dequantised weights. Knows strides; what autograd asks for goes to the chunked form.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shapes
from ..chunked import linear as chunked
from .launch import Compiled, as_launched, launch, on_device, power, served

MOST = 16
"""Rows that the kernel serves; more go to the chunked form."""

OUTPUTS = 16
"""Outputs of a program."""


@triton.jit
def int8_rows(
    x,
    weight,
    scales,
    bias,
    y,
    rows,
    outputs,
    inputs,
    x_row,
    x_channel,
    weight_row,
    weight_channel,
    scales_row,
    scales_group,
    y_row,
    y_channel,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Programs (blocks of outputs,): y (rows, outputs) = x W^T + bias, a group of weights at a time."""
    r = tl.cast(tl.arange(0, ROWS), tl.int64)
    n = tl.cast(tl.program_id(0), tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    real, asked = n < outputs, r < rows
    # One running sum a place of the group: they are added up once, at the end.
    total = tl.zeros((ROWS, OUTPUTS, GROUP), tl.float32)
    for g in tl.range(0, tl.cdiv(inputs, GROUP), 1, num_stages=4):
        i = tl.cast(g, tl.int64) * GROUP + tl.arange(0, GROUP)
        there = i < inputs
        w = tl.load(
            weight + n[:, None] * weight_row + i[None, :] * weight_channel,
            mask=real[:, None] & there[None, :],
            other=0,
        )
        step = tl.load(scales + n * scales_row + g * scales_group, mask=real, other=0.0)
        given = tl.load(
            x + r[:, None] * x_row + i[None, :] * x_channel, mask=asked[:, None] & there[None, :], other=0.0
        )
        w = w.to(tl.float32) * step[:, None]
        total += w[None, :, :] * given.to(tl.float32)[:, None, :]
    answer = tl.sum(total, 2)
    if bias is not None:
        answer += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[None, :]
    target = y + r[:, None] * y_row + n[None, :] * y_channel
    tl.store(target, answer.to(y.dtype.element_ty), mask=asked[:, None] & real[None, :])


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x (..., in) by weight (out, in), or int8 with scales (out, ceil(in / 64)) float32; see reference. Sums
    run in float32. Raises ValueError for shapes that disagree."""
    shapes.linear(x, weight, bias, scales, out)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if scales is None or not 0 < rows <= MOST or not served(0, (x, bias, scales, out)):
        return chunked.linear(x, weight, bias, scales, out)
    on_device(x, weight=weight, bias=bias, scales=scales, out=out)
    given = x.reshape(rows, x.shape[-1])
    if out is not None and out.ndim == 2:
        _into(given, weight, scales, bias, out)
        return out
    y = x.new_empty(rows, weight.shape[0])
    _into(given, weight, scales, bias, y)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if out is None else out.copy_(y)


@torch.library.custom_op("constate::triton_int8_linear", mutates_args=("y",))
def _into(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    launch_rows(x, weight, scales, None if bias is None else bias.contiguous(), y)


@_into.register_fake
def _(x, weight, scales, bias, y):
    return None


def launch_rows(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """One launch: x (rows, in) to y (rows, out), for at most MOST rows; all of any strides."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    wide = power(rows, 1)
    launch(
        int8_rows,
        (-(-outputs // OUTPUTS),),
        x,
        warps=4 if wide <= 8 else 8,
        **{"x": x, "weight": weight, "scales": scales, "bias": bias, "y": y},
        **{"rows": rows, "outputs": outputs, "inputs": inputs},
        **{"x_row": x.stride(0), "x_channel": x.stride(1)},
        **{"weight_row": weight.stride(0), "weight_channel": weight.stride(1)},
        **{"scales_row": scales.stride(0), "scales_group": scales.stride(1)},
        **{"y_row": y.stride(0), "y_channel": y.stride(1)},
        ROWS=wide,
        OUTPUTS=OUTPUTS,
        GROUP=shapes.GROUP,
    )


def compiled() -> Iterator[Compiled]:
    """One row, and the most."""
    weight, scales, bias = torch.empty(2048, 2048, dtype=torch.int8), torch.empty(2048, 32), torch.empty(2048)
    for rows in (1, 8, MOST):
        call = partial(linear, torch.empty(rows, 2048), weight, bias, scales)
        yield from as_launched("linear", call, dtype="int8", default=rows == 1, note=f"{rows} rows")

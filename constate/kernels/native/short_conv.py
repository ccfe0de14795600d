"""The short convolution in C: see short_conv.c for the walk, reference for the op.

Knows the record of its kernel. What autograd asks for goes to the chunked form.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import short_conv as chunked
from .call import fields, graded, in_place, packed, run

WIDEST = 32
"""More taps than these go to the chunked form."""


class ShortConv(ctypes.Structure):
    _fields_ = fields(
        "x weight bias history o offsets", "rows channels width x_stride o_stride silu history_bf16"
    )


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    *,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """Packed x (n, c) through weight (c, w) and bias (c,) or None; activation is "silu" or None.

    initial (rows, w - 1, c) holds the inputs before each row's first token, oldest first, in a dtype of
    its own; None is zeros in x's dtype. Returns o (n, c) in x's dtype and final, each row's last w - 1
    inputs, in initial's dtype. Sums run in float32. Raises ValueError for shapes that disagree.
    """
    if _elsewhere(x, weight, bias, initial):
        return chunked.short_conv(x, weight, bias, initial, spans, activation=activation)
    held = shapes.conv(x, weight, bias, initial, spans, activation)
    final = held.clone(memory_format=torch.contiguous_format)
    return _run(x, weight, bias, final, spans.cu, activation), final


def short_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, activation: str | None = "silu"
) -> Tensor:
    """One token a row: x (rows, c), history (rows, w - 1, c) shifted in place. Returns o (rows, c)."""
    if _elsewhere(x, weight, bias, history):
        return chunked.short_conv_step(x, weight, bias, history, activation=activation)
    shapes.conv_step(x, weight, bias, history, activation)
    with in_place(history) as held:
        return _run(x, weight, bias, held, torch.arange(x.shape[0] + 1), activation)


def _elsewhere(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None) -> bool:
    """Whether the chunked form serves: autograd, very many taps, or a float16 history."""
    kept = x.dtype if history is None else history.dtype
    odd = kept not in (torch.float32, torch.bfloat16)
    return odd or (weight.ndim == 2 and weight.shape[1] > WIDEST) or graded((x, weight, bias, history))


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, offsets: Tensor, activation: str | None
) -> Tensor:
    given, o = packed(x), torch.empty(x.shape)
    run(
        "short_conv",
        ShortConv,
        x=given,
        weight=weight.float().contiguous(),
        bias=None if bias is None else bias.float().contiguous(),
        history=history,
        o=o,
        offsets=offsets,
        rows=history.shape[0],
        channels=x.shape[1],
        width=weight.shape[1],
        x_stride=given.stride(0),
        o_stride=o.stride(0),
        silu=activation == "silu",
        history_bf16=history.dtype == torch.bfloat16,
    )
    return o.to(x.dtype)

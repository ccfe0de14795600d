"""causal-conv1d's kernels behind our op's signature (1.7.0, https://github.com/Dao-AILab/causal-conv1d).

Knows how that package lays out its tensors, (batch, channels, time) with channels side by side, and what it
takes: widths 2 to 4, channels in eights, rows of one length that is at least the history's, a history of the
inputs' dtype. A call of another kind is served by the chunked form.
"""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import short_conv as chunked
from .entry import graded, on_gpu

WIDTHS = (2, 3, 4)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    *,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """As `reference.short_conv`."""
    on_gpu("causal_conv1d", x=x, weight=weight, bias=bias, initial=initial)
    long = spans.uniform and spans.longest >= weight.shape[-1] - 1 and spans.longest > 0
    if not long or _elsewhere(x, weight, bias, initial):
        return chunked.short_conv(x, weight, bias, initial, spans, activation=activation)
    history = shapes.conv(x, weight, bias, initial, spans, activation)
    o, final = import_module("causal_conv1d").causal_conv1d_fn(
        _eights(x).unflatten(0, (spans.rows, spans.longest)).transpose(1, 2),
        weight.contiguous(),
        None if bias is None else bias.to(weight.dtype).contiguous(),
        initial_states=history.contiguous().transpose(1, 2),
        return_final_states=True,
        activation=activation,
    )
    return o.transpose(1, 2).flatten(0, 1), final.transpose(1, 2).contiguous()


def short_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, activation: str | None = "silu"
) -> Tensor:
    """One token a row; history (rows, w - 1, c) shifted in place."""
    on_gpu("causal_conv1d", x=x, weight=weight, bias=bias, history=history)
    if _elsewhere(x, weight, bias, history):
        return chunked.short_conv_step(x, weight, bias, history, activation=activation)
    shapes.conv_step(x, weight, bias, history, activation)
    update = import_module("causal_conv1d").causal_conv1d_update
    cast = None if bias is None else bias.to(weight.dtype).contiguous()
    return update(x, history.transpose(1, 2), weight.contiguous(), cast, activation)


def _elsewhere(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None) -> bool:
    """Whether the package lacks this call's form."""
    apart = history is not None and history.dtype != x.dtype
    width = weight.shape[-1] if weight.ndim == 2 else 0
    return apart or width not in WIDTHS or x.shape[-1] % 8 > 0 or graded(x, weight, bias, history)


def _eights(x: Tensor) -> Tensor:
    """Channels side by side, and tokens a multiple of eight apart."""
    return x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()

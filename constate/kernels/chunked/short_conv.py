"""The causal depthwise convolution of a few taps, with its history: o_t = act(bias + sum_j w_j x_{t-w+1+j}).

Every row is laid out as [history, tokens] and a tap is one shifted multiply-add over all rows: plain
views for one row or equal rows; where lengths differ, one gather in and one out. Knows no mixer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from ...spans import Spans
from .. import shapes


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
    initial = shapes.conv(x, weight, bias, initial, spans, activation)
    (rows, history, c), n = initial.shape, spans.total
    if spans.uniform:
        lined = torch.cat([initial.float(), x.view(rows, spans.longest, c).float()], 1)
        o = _taps(lined, weight, bias, activation).flatten(0, 1)
        final = lined[:, spans.longest :]
    else:
        # On one axis, row after row; the outputs that mix two rows are dropped on the way out.
        token = torch.arange(n, device=x.device) + spans.row * history
        begin = spans.cu[:-1] + torch.arange(rows, device=x.device) * history
        step = torch.arange(history, device=x.device)
        order = torch.empty(n + rows * history, dtype=torch.int64, device=x.device)
        order[begin[:, None] + step] = torch.arange(rows * history, device=x.device).view(rows, history)
        order[token + history] = torch.arange(n, device=x.device) + rows * history
        lined = torch.cat([initial.flatten(0, 1).float(), x.float()]).index_select(0, order)
        o = _taps(lined[None], weight, bias, activation)[0].index_select(0, token)
        lengths = spans.cu[1:] - spans.cu[:-1]
        final = lined.index_select(0, ((begin + lengths)[:, None] + step).flatten()).view(rows, history, c)
    return o.to(x.dtype), final.to(initial.dtype, copy=True)


def short_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, activation: str | None = "silu"
) -> Tensor:
    """One token a row: x (rows, c), history (rows, w - 1, c) shifted in place. Returns o (rows, c)."""
    shapes.conv_step(x, weight, bias, history, activation)
    lined = torch.cat([history.float(), x[:, None].float()], 1)
    history.copy_(lined[:, 1:])
    o = (lined * weight.float().t()).sum(1)
    if bias is not None:
        o += bias.float()
    return (silu(o, inplace=True) if activation == "silu" else o).to(x.dtype)


def _taps(lined: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """(rows, w - 1 + t, c) float32 to (rows, t, c)."""
    w = weight.shape[1]
    count = lined.shape[1] - w + 1
    columns = weight.float().unbind(1)
    o = lined[:, :count] * columns[0] if bias is None else bias.float().addcmul(lined[:, :count], columns[0])
    for j in range(1, w):
        o.addcmul_(lined[:, j : j + count], columns[j])
    return silu(o, inplace=not o.requires_grad) if activation == "silu" else o

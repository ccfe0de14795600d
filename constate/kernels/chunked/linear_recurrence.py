"""The elementwise linear recurrence, h_t = exp(log_a_t) h_{t-1} + x_t, on packed spans: the scan of RG-LRU.

Knows the op (De et al. 2024, Griffin, arXiv 2402.19427, equation 4) and its step; every channel is alone.
Knows nothing of the gates that make log_a and x.

There is no product to be found in it, only a walk, whose cost is calls unless a step is wide. Rows and
channels give width; where they give too little, a row's tiles are walked side by side from zero, together
with the product of their decays, which then chains the states that enter them. Products of decays never grow,
so nothing overflows and a decay of 0 is an ordinary number.

The gradient of the state is the same recurrence from the end to the start, over decays one token later: the
packed tokens turned round are the rows turned round, and the same walk serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...spans import Spans
from .. import shapes
from .segments import Segment, segments
from .singles import route
from .tiles import Tiles

SIZE = 32
"""Tokens of a tile: its walk is as long, and the chain of a segment's tiles then not much longer."""


def linear_recurrence_scan(
    x: Tensor, log_a: Tensor, initial: Tensor | None, spans: Spans, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_a_t) h_{t-1} + x_t, channel by channel; differentiable in every tensor.

    x (n, channels), what each token adds; log_a (n, channels), natural log of the decay, <= 0, -inf too;
    initial (rows, channels) or None (zeros). Any float dtype; computed in float32. Returns o (n, channels),
    the states, in x's dtype, and final (rows, channels) float32; an empty span hands its initial row on.
    Raises ValueError for shapes and, where `checked`, for a positive log_a.
    """
    shapes.tokens(spans, x=x, log_a=log_a)
    channels = shapes.recurrence(x, log_a, spans.total, checked=checked)
    state = shapes.state("initial", initial, (spans.rows, channels), x)
    if x.shape[0] == 0:
        return torch.zeros_like(x), state.clone()

    def scan(tensors: Sequence[Any], initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        return _Scan.apply(*tensors, initial, spans)

    def one(tensors: Sequence[Any], initial: Tensor) -> tuple[Tensor, Tensor]:
        x, log_a = tensors
        final = torch.addcmul(x, log_a.exp(), initial)
        return final.clone(), final

    o, final = route((x.float(), log_a.float()), state, spans, scan=scan, one=one)
    return o.to(x.dtype), final


def linear_recurrence_step(x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
    """One token a row: x, log_a (rows, channels).

    Updates `state` (rows, channels) float32 in place, strided or not; returns o (rows, channels) in x's
    dtype, never a view of the state.
    """
    shapes.recurrence(x, log_a, state.shape[0])
    shapes.step_state(state, tuple(x.shape))
    state.mul_(log_a.float().exp()).add_(x)
    return state.to(x.dtype, copy=True)


class _Scan(torch.autograd.Function):
    """The scan of float32 tensors, with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_a: Tensor, initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        h, final = _walk(x, log_a, initial, spans)
        ctx.save_for_backward(log_a, h, initial)
        ctx.spans = spans
        return h, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # hidden by the decorator
        log_a, h, initial = ctx.saved_tensors
        d_h, d_final = grads
        spans: Spans = ctx.spans
        full = [row for row, n in enumerate(spans.lengths) if n]
        first = torch.tensor([spans.offsets[row] for row in full], device=h.device)
        # g_t = d_h_t + a_{t+1} g_{t+1}; what reaches the final state reaches the last token as it is.
        later = log_a.roll(-1, 0).index_fill_(0, spans.last[full], 0.0)
        back = Spans.of(reversed(spans.lengths), spans.device)
        g = _walk(d_h.flip(0), later.flip(0), d_final.flip(0), back)[0].flip(0)
        d_initial, d_log_a = d_final.clone(), g * log_a.exp()
        d_initial[full] = d_log_a.index_select(0, first)  # so far of the state before each token
        d_log_a.mul_(h.roll(1, 0).index_copy_(0, first, initial[full]))
        return g, d_log_a, d_initial, None


def _walk(x: Tensor, log_a: Tensor, initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """h (n, c) and the final states (rows, c) of float32 tensors, segment by segment."""
    tiles = Tiles.of(spans, SIZE)
    order = torch.tensor(tiles.order, device=x.device)
    state, h = initial.index_select(0, order), torch.empty_like(x)
    # Levels are walked side by side as long as a segment stays in the cache: wide steps come one by one.
    for part in segments(tiles, tiles.size * x.shape[1], whole=False):
        part.write(h, _segment(part, x, log_a, state).transpose(0, 1))
    return h, state.index_select(0, order.argsort())


def _segment(part: Segment, x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
    """h (size, tiles, c) of a segment from `state` (rows, c), which ends up behind it."""
    # contiguous: a step's tensors lie side by side. A tail's zeros are a decay of 1 and nothing added.
    h, decay = (part.cut(y).transpose(0, 1).clone(memory_format=torch.contiguous_format) for y in (x, log_a))
    decay.exp_()
    alone = len(part.sizes) == 1  # one tile a row, which the true state can enter at once
    before = state[: h.shape[1]] if alone else torch.zeros_like(h[0])
    for add, kept in zip(h.unbind(), decay.unbind(), strict=True):
        before = torch.addcmul(add, kept, before, out=add)
    if alone:
        state[: h.shape[1]] = before
        return h
    since = decay[0]  # the decay from the tile's start, then up to each token
    for kept in decay[1:].unbind():
        since = torch.mul(kept, since, out=kept)
    first = torch.empty_like(before)
    for end, kept, entering in zip(*(y.split(part.sizes) for y in (before, since, first)), strict=True):
        s = state[: len(end)]
        entering.copy_(s)
        torch.addcmul(end, kept, s, out=s)
    return h.addcmul_(decay, first)

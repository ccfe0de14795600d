"""The selective scan's walk through time, forward and back, in segments of bounded size.

Knows h = exp(delta a) h + (delta x) b, o = h c on float32 tensors, and its gradients; skip, gate and softplus
are selective.py's.

A walk over time pays a call for each step of all rows, so its cost is overhead unless a step is wide. Rows
give width; where they give too little, successive tiles of a row are walked side by side too: once from a
zero state, which tells what each tile adds and so, with its total decay exp(a sum(delta)), chains the states
that enter the tiles; then once more from those. No exponent is positive: nothing is divided by a decay.

Kept for the backward pass are inputs and the states between segments; it makes each segment again, so no
(tokens, channels, s) tensor exists but a segment's. Inside, states lie as (s, channels): channels are many.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...spans import Spans
from .segments import Segment, segments
from .tiles import Tiles

BUDGET = 1 << 19
"""Elements of a segment's states: the walk's calls cost more than what then falls out of the second cache."""

SIZE = 16
"""Tokens of a tile, if memory allows: a segment's tensors then fit the second cache."""

WIDE = 1 << 14
"""Elements of state that make a step wide: arithmetic outweighs the cost of the call."""


class Scan(torch.autograd.Function):
    """h = exp(delta a) h + (delta x) b,  o = h c: float32 tensors, delta after its softplus."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        initial: Tensor,
        spans: Spans,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        parts, order = _plan(spans, a)
        at = a.mT.contiguous()
        state = initial.index_select(0, order).mT.contiguous()
        o, borders = torch.empty_like(x), []
        for part in parts:
            if keep:
                borders.append(state[: part.sizes[0]].clone())
            walk = _walk(part, x, delta, at, b, c, state)
            part.write(o, (walk.c.unsqueeze(-2) @ walk.h).squeeze(-2).transpose(0, 1))
        if keep:
            ctx.save_for_backward(x, delta, a, b, c, order, *borders)
            ctx.parts = parts
        return o, state.index_select(0, order.argsort()).mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # hidden by the decorator
        x, delta, a, b, c, order, *borders = ctx.saved_tensors
        d_o, d_final = grads
        d_state = d_final.index_select(0, order).mT.contiguous()
        at = a.mT.contiguous()
        d_x, d_delta, d_a, d_b, d_c = (torch.zeros_like(y) for y in (x, delta, at, b, c))
        for part, border in zip(reversed(ctx.parts), reversed(borders), strict=True):
            walk = _walk(part, x, delta, at, b, c, border.clone())
            d_read = _timed(part.cut(d_o))
            g = walk.c.unsqueeze(-1) * d_read.unsqueeze(-2)
            _walk_back(part, walk, g, d_state)
            d_u = (walk.b.unsqueeze(-2) @ g).squeeze(-2)  # of u = delta x
            part.write(d_x, (d_u * walk.delta).transpose(0, 1))
            part.write(d_b, (g @ walk.u.unsqueeze(-1)).squeeze(-1).transpose(0, 1))
            part.write(d_c, (walk.h @ d_read.unsqueeze(-1)).squeeze(-1).transpose(0, 1))
            g.mul_(walk.decay)  # from here of the exponents delta a: times the decay and the state it met
            g[0].mul_(walk.first)
            g[1:].mul_(walk.h[:-1])
            part.write(d_delta, torch.addcmul((g * at).sum(-2), d_u, walk.x).transpose(0, 1))
            d_a.add_(g.mul_(walk.delta.unsqueeze(-2)).sum((0, 1)))
        return d_x, d_delta, d_a.mT, d_b, d_c, d_state.index_select(0, order.argsort()).mT, None, None


def _plan(spans: Spans, a: Tensor) -> tuple[list[Segment], Tensor]:
    """The segments, and the rows in the order in which they are walked.

    A segment takes more levels while its steps are not wide; where one level is far wider, tiles are short.
    """
    step = a.numel() * sum(n > 0 for n in spans.lengths)
    size = max(4, min(SIZE, BUDGET // step))
    tiles = Tiles.of(spans, 1 << (size.bit_length() - 1))
    width = -(-BUDGET * a.numel() // (2 * WIDE - 1))  # of one tile, in the measure that `segments` takes
    parts = list(segments(tiles, width, whole=False, budget=BUDGET))
    return parts, torch.tensor(tiles.order, device=a.device)


class _Walk(NamedTuple):
    """A segment of m tiles, time first, so that a step's tensors lie side by side."""

    x: Tensor  # (size, m, channels), as delta and u = delta x
    delta: Tensor
    u: Tensor
    b: Tensor  # (size, m, s), as c
    c: Tensor
    decay: Tensor  # (size, m, s, channels), as h, the states after each token
    h: Tensor
    first: Tensor  # (m, s, channels), the state that enters each tile
    total: Tensor | None  # (m, s, channels), each tile's whole decay where a row has more than one


def _walk(part: Segment, x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> _Walk:
    """Through a segment from `state` (rows, s, channels), which ends up behind it; a (s, channels)."""
    x, delta, b, c = (_timed(part.cut(y)) for y in (x, delta, b, c))
    u = delta * x
    decay = (delta.unsqueeze(-2) * a).exp_()
    h = b.unsqueeze(-1) * u.unsqueeze(-2)  # what each token adds, then the states
    adds, decays, total = h.unbind(), decay.unbind(), None
    if len(part.sizes) == 1:
        first = state[: h.shape[1]].clone()
    else:
        end = adds[0].clone()
        for add, kept in zip(adds[1:], decays[1:], strict=True):
            torch.addcmul(add, kept, end, out=end)
        total = (delta.sum(0).unsqueeze(-2) * a).exp_()
        first = _chain(_levels(part.sizes), total, end, state)
    before = first
    for add, kept in zip(adds, decays, strict=True):
        before = torch.addcmul(add, kept, before, out=add)
    if total is None:
        state[: h.shape[1]] = before
    return _Walk(x, delta, u, b, c, decay, h, first, total)


def _walk_back(part: Segment, walk: _Walk, g: Tensor, d_state: Tensor) -> None:
    """Makes g, the gradient that reaches each token's state from its own output, whole; in place.

    `d_state` (rows, s, channels) is the gradient of the states behind the segment, then of those before it.
    """
    gs, decays = g.unbind()[::-1], walk.decay.unbind()[::-1]
    if walk.total is None:
        last = d_state[: g.shape[1]]
    else:
        back = gs[0] * decays[0]
        for own, kept in zip(gs[1:], decays[1:], strict=True):
            back.add_(own).mul_(kept)
        last = _chain(_levels(part.sizes)[::-1], walk.total, back, d_state)
    gs[0].add_(last)
    for later, kept, own in zip(gs, decays, gs[1:], strict=False):
        own.addcmul_(kept, later)
    if walk.total is None:
        torch.mul(decays[-1], gs[-1], out=last)


def _chain(levels: list[slice], total: Tensor, end: Tensor, state: Tensor) -> Tensor:
    """Moves `state` through whole tiles, level by level, in place; returns the state that enters each."""
    first = torch.empty_like(end)
    for level in levels:
        s = state[: level.stop - level.start]
        first[level] = s
        torch.addcmul(end[level], total[level], s, out=s)
    return first


def _levels(sizes: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


def _timed(tiles: Tensor) -> Tensor:
    """(tiles, size, ...) to (size, tiles, ...)."""
    return tiles.transpose(0, 1).contiguous()

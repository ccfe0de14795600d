"""The gated delta rule in tiles: what a tile writes is one triangular solve, what it carries one matrix.

Knows the op `S' = exp(g) S;  S = S' + k (beta (v - S'^T k))^T;  o = scale S^T q` on packed spans, and its
step; not how q, k, g and beta are made. Where a decay is a channel's, gated_delta_vector makes the matrices.

The WY form of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(arXiv 2406.06484), with the decay of "Gated Delta Networks" (arXiv 2412.06464). With c the running sum of g
inside a tile and S the state that enters it, the values that the tile really writes solve

    (I + M) new = beta v - beta exp(c) k S,    M_ij = beta_i (k_i . k_j) exp(c_i - c_j) for j < i,

so with u and w the solutions for `beta v` and `beta exp(c) k`, which do not know S, new = u - w S: the tiles
of a row become a chain of two matrix products each. Every exponent is a difference c_i - c_j <= 0. c is
summed in float64, where neighbours of -1e4 do not drown a -1e-6; g is clamped at -1e4, whose exponential is
0 already, so that -inf is legal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...spans import Spans
from .. import shapes
from . import gated_delta_vector
from .segments import segments
from .singles import route
from .tiles import Tiles

FLOOR = -1e4


def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decays, erases what k holds, then writes v there; differentiable in every tensor, `initial` included.

    q, k (n, hk, dk); v (n, h, dv); log_decay (n, h), or (n, h, dk) on the key axis (KDA), natural log, <= 0,
    or None (DeltaNet); beta (n, h); initial (rows, h, dk, dv) or None (zeros). Value head j reads key head
    j // (h // hk). Any float dtype; computed in float32. Returns o (n, h, dv) in v's dtype and final
    (rows, h, dk, dv) float32; an empty span hands its initial row on. Stable where 0 <= beta |k|^2 <= 2, so k
    is usually of unit length. Raises ValueError for shapes and, `checked`, for a positive log_decay.
    """
    hk, h = shapes.heads(q, k, v)
    n, dk, dv = v.shape[0], q.shape[2], v.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    shapes.exactly("beta", beta, n, h)
    shapes.log_decay(log_decay, n, h, dk, checked=checked)
    state = shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    if n == 0:
        return v.new_empty(0, h, dv), state.clone()
    g = torch.zeros_like(beta) if log_decay is None else log_decay

    def scan(tensors: Sequence[Any], initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = tensors
        return _scan(q, k, v, g, beta, initial, spans, scale)

    def one(tensors: Sequence[Any], initial: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = tensors
        s = _grouped(initial, hk) * _decay(g, hk)
        s = torch.addcmul(s, *_write(k, v, beta, s))
        return _read(q, s, v, scale), s.flatten(1, 2)

    return route((q, k, v, g, beta), state, spans, scan=scan, one=one)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token a row: q, k (b, hk, dk); v (b, h, dv); log_decay (b, h) or (b, h, dk) or None; beta (b, h).

    Updates `state` (b, h, dk, dv) float32 in place, strided or not, and returns o (b, h, dv) in v's dtype.
    """
    hk, h = shapes.heads(q, k, v)
    b, dk, dv = v.shape[0], q.shape[2], v.shape[2]
    shapes.exactly("beta", beta, b, h)
    shapes.log_decay(log_decay, b, h, dk)
    shapes.step_state(state, (b, h, dk, dv))
    s = _grouped(state, hk)
    if log_decay is not None:
        s.mul_(_decay(log_decay, hk))
    s.addcmul_(*_write(k, v, beta, s))
    return _read(q, s, v, scale)


def _grouped(state: Tensor, hk: int) -> Tensor:
    """(b, h, dk, dv) as (b, hk, h // hk, dk, dv): a view, whatever the strides."""
    return state.unflatten(1, (hk, -1))


def _decay(g: Tensor, hk: int) -> Tensor:
    decay = g.float().exp()
    return _grouped(decay[..., None, None] if g.ndim == 2 else decay[..., None], hk)


def _write(k: Tensor, v: Tensor, beta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """What a token adds to the decayed state s, as two factors: the column k, the row beta (v - s^T k)."""
    hk, key = k.shape[1], k.float()[:, :, None, :, None]
    value, rate = (_grouped(x.float(), hk) for x in (v[:, :, None], beta[:, :, None, None]))
    return key, (value - key.mT @ s) * rate


def _read(q: Tensor, s: Tensor, v: Tensor, scale: float) -> Tensor:
    o = q.float()[:, :, None, None, :] @ s
    return (o * scale).reshape(v.shape).to(v.dtype)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    (n, h, dv), dk = v.shape, q.shape[2]
    tiles = Tiles.of(spans, 16 if max(dk, dv) <= 32 else 32)  # measured on CPUs, forward and backward
    order = torch.tensor(tiles.order, device=v.device)
    state = state.index_select(0, order)
    whole = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta, state))
    out = v.new_empty(0 if whole else n, h, dv)
    for segment in segments(tiles, h * max(dk * dv, tiles.size * max(dk, dv)), whole):
        cut = segment.cut
        o, state = _tiles(cut(q), cut(k), cut(v), cut(g), cut(beta), state, segment.sizes, scale)
        if whole:
            out = segment.join(o, v.dtype)
        else:
            segment.write(out, o)
    return out, state.index_select(0, order.argsort())


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, sizes: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Tiles (m, C, heads, dim) of successive levels, `sizes[j]` of them in level j, from (rows, h, dk, dv).

    Returns their outputs (m, C, h, dv) and the states after; rows without a tile in a level keep theirs.
    """
    (m, size, _, dk), (h, dv) = q.shape, v.shape[2:]
    q, k, v = (x.transpose(1, 2).contiguous().float() for x in (q, k, v))
    matrices = _matrices if g.ndim == 3 else gated_delta_vector.matrices
    parts = matrices(q * scale, k, v, g.transpose(1, 2), beta.float().mT)
    u, w, k, decay, reads, q = (x.reshape(m * h, -1, x.shape[-1]) for x in parts)
    new, entering, state = _Walk.apply(u, w, k, decay, state.flatten(0, 1), [rows * h for rows in sizes])
    o = torch.baddbmm(reads @ new, q, entering)
    return o.view(m, h, size, dv).transpose(1, 2), state.view(-1, h, dk, dv)


def _matrices(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """`gated_delta_vector.matrices` for a decay a head: g (m, h, C), the whole decay (m, hk, h // hk, 1, 1);
    the heads of what it returns are flat, or as (hk, h // hk)."""
    g, beta = (x.unflatten(1, (k.shape[1], -1)) for x in (g.double(), beta))
    c = g.clamp(min=FLOOR).cumsum(-1)
    since = c.exp().float()
    until = (c[..., -1:] - c).exp().float()

    # Products of keys are made once a key head, whatever the number of value heads that share it.
    solve, reads = _Squares.apply(k @ k.mT, q @ k.mT, c, beta)
    solve = solve * beta[..., None, :]
    u = solve.flatten(1, 2) @ v
    w = (solve * since[..., None, :]) @ k[:, :, None]
    q, k = q[:, :, None] * since[..., None], k[:, :, None] * until[..., None]
    return u, w, k, since[..., -1:, None], reads, q


class _Squares(torch.autograd.Function):
    """A tile's two (C, C) matrices: (I + M)^-1, and what the query of token i reads of the write of token j.

    kk, qk (m, hk, C, C) are products of keys and queries with keys; c (m, hk, h // hk, C) float64, the sum of
    log-decays so far; beta like c, float32. By hand because an elementwise pass over a square costs as much
    as the product beside it: here there are few, and float64 squares live only within the forward.
    """

    @staticmethod
    def forward(ctx: Any, kk: Tensor, qk: Tensor, c: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        kk, qk, size = kk[:, :, None], qk[:, :, None], c.shape[-1]
        above = torch.ones(size, size, dtype=torch.bool, device=c.device).triu(1)
        ratio = (c[..., :, None] - c[..., None, :]).float()
        ratio.masked_fill_(above, -torch.inf).exp_()  # masked first: above the diagonal c_i - c_j > 0
        system, identity = ratio * kk * beta[..., None], torch.eye(size, device=c.device).expand_as(ratio)
        # "unitriangular" takes the diagonal for ones and reads strictly below it: there lies M.
        solve = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(kk, qk, ratio, beta, solve)
        return solve, ratio * qk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # hidden by the decorator
        kk, qk, ratio, beta, solve = ctx.saved_tensors
        d_solve, d_reads = grads
        d_system = (solve.mT @ d_solve @ solve.mT).tril_(-1).neg_().mul_(ratio)
        d_reads = d_reads * ratio
        d_kk, d_qk = (d_system * beta[..., None]).sum(2), d_reads.sum(2)
        d_system.mul_(kk)
        d_beta = d_system.sum(-1)
        d_exponent = d_system.mul_(beta[..., None]).addcmul_(d_reads, qk)
        return d_kk, d_qk, (d_exponent.sum(-1) - d_exponent.sum(-2)).double(), d_beta


class _Walk(torch.autograd.Function):
    """The chain: new = u - w S, then S <- decay S + k^T new, a level of tiles at a time, in place.

    u (m h, C, dv); w, k (m h, C, dk); decay (m h, 1 or dk, 1); state (rows h, dk, dv); `sizes` counts rows'
    heads. Returns every tile's new (m h, C, dv), the S that entered it (m h, dk, dv) and the states after.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, w: Tensor, k: Tensor, decay: Tensor, state: Tensor, sizes: list[int]):
        new, entering = torch.empty_like(u), u.new_empty(len(u), *state.shape[1:])
        state = state.clone()
        for level in _levels(sizes):
            s = state[: level.stop - level.start]
            entering[level] = s
            torch.baddbmm(u[level], w[level], s, alpha=-1, out=new[level])
            s.mul_(decay[level]).baddbmm_(k[level].mT, new[level])
        ctx.save_for_backward(w, k, decay, new, entering)
        ctx.sizes = sizes
        return new, entering, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # hidden by the decorator
        w, k, decay, new, entering = ctx.saved_tensors
        d_new, d_entering, d_state = grads
        d_u, d_left, d_state = torch.empty_like(new), torch.empty_like(entering), d_state.clone()
        for level in reversed(_levels(ctx.sizes)):
            d = d_state[: level.stop - level.start]
            d_left[level] = d
            torch.baddbmm(d_new[level], k[level], d, out=d_u[level])
            d.mul_(decay[level]).add_(d_entering[level]).baddbmm_(w[level].mT, d_u[level], alpha=-1)
        d_decay = (d_left * entering).sum(-1, keepdim=True).sum_to_size(decay.shape)
        return d_u, -(d_u @ entering.mT), new @ d_left.mT, d_decay, d_state, None


def _levels(sizes: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]

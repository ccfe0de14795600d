"""The delta rule whose transition is diagonal plus low rank, in tiles: RWKV-7, and decays a channel.

Knows the op `S <- diag(exp(g)) S + b (a^T S) + k v^T;  o = scale S^T q` on packed spans, and its step; a
reads S before it decays. Knows nothing of how a, b and g are made.

What token i reads of the state before it, u_i = S_{i-1}^T a_i, is a value that it writes at b_i: so b stands
beside k as a second key with the value u, a beside q as a second query, and the op is a gated linear scan
with a decay a channel and two of each. Within a tile the pairs of the queries with the keys come from
`gated_linear_vector.join`, all of whose factors are products of decays: nothing overflows, and a decay of 0
is an ordinary number. Then, with S the state that enters the tile,

    (I - ab) u = ak v + a S,

one triangular solve that does not know S, so that a tile takes S to a matrix times S plus a matrix, and the
tiles of a row are a chain of one matrix product each (the WY form of Yang et al. 2024, arXiv 2406.06484, for
the transition of Peng et al. 2025, arXiv 2503.14456).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from .gated_linear_vector import join
from .segments import Chain, Segment, segments
from .singles import route
from .tiles import Tiles


def dplr_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Reads with a what the state holds, decays it, writes that at b and v at k; differentiable in every
    tensor, `initial` included.

    q, k (n, hk, dk); v (n, h, dv); a, b (n, h, dk); log_decay (n, h, dk), natural log, <= 0, or (n, h), or
    None (no decay); initial (rows, h, dk, dv) or None (zeros). Value head j reads key head j // (h // hk).
    RWKV-7: q = r, a = -kappa, b = kappa * rate with |kappa| = 1. A delta step that decays a channel, erases
    and writes: a = exp(g) * k, b = -beta k, and beta k for k. Any float dtype; computed in float32. Returns
    o (n, h, dv) in v's dtype and final (rows, h, dk, dv) float32; an empty span hands its initial row on.
    Stable where diag(exp(g)) + b a^T shrinks. Raises ValueError for shapes and, `checked`, for a positive
    log_decay.
    """
    _, h = shapes.heads(q, k, v)
    (n, _, dv), dk = v.shape, q.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, a=a, b=b)
    shapes.log_decay(log_decay, n, h, dk, checked=checked)
    shapes.exactly("a", a, n, h, dk)
    shapes.exactly("b", b, n, h, dk)
    state = shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    if n == 0:
        return v.new_empty(0, h, dv), state.clone()
    if log_decay is None:
        log_decay = torch.zeros_like(a)
    elif log_decay.ndim == 2:
        log_decay = log_decay[..., None].expand_as(a)

    def scan(tensors: Sequence[Any], initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        return _scan(tensors, initial, spans, scale)

    def one(tensors: Sequence[Any], initial: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, a, b = tensors
        fresh = _columns(b, k, h) @ _rows(a, v, initial)
        s = torch.addcmul(fresh, g.float().exp()[..., None], initial)
        return _read(q, s, v, scale), s

    return route((q, k, v, log_decay, a, b), state, spans, scan=scan, one=one)


def dplr_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token a row: q, k (rows, hk, dk); v (rows, h, dv); a, b (rows, h, dk); log_decay as in the scan.

    Updates `state` (rows, h, dk, dv) float32 in place, strided or not; returns o (rows, h, dv) in v's dtype.
    """
    _, h = shapes.heads(q, k, v)
    rows, dk = q.shape[0], q.shape[2]
    shapes.log_decay(log_decay, rows, h, dk)
    shapes.exactly("a", a, rows, h, dk)
    shapes.exactly("b", b, rows, h, dk)
    shapes.step_state(state, (rows, h, dk, v.shape[2]))
    fresh = _columns(b, k, h) @ _rows(a, v, state)
    if log_decay is not None:
        decay = log_decay.float().exp()
        state.mul_(decay[..., None] if decay.ndim == 3 else decay[..., None, None])
    state.add_(fresh)
    return _read(q, state, v, scale)


def _spread(x: Tensor, h: int) -> Tensor:
    """(n, hk, dk) float32 to (n, h, dk): a copy only where value heads share key heads."""
    return x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], 1)


def _columns(b: Tensor, k: Tensor, h: int) -> Tensor:
    """(rows, h, dk, 2): the two keys at which a token writes."""
    return torch.stack([b.float(), _spread(k, h).float()], -1)


def _rows(a: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """(rows, h, 2, dv): what it writes there, which are what a reads of s, and v."""
    return torch.cat([a.float()[:, :, None] @ s, v.float()[:, :, None]], 2)


def _read(q: Tensor, s: Tensor, v: Tensor, scale: float) -> Tensor:
    o = q.float()[:, :, None, None, :] @ s.unflatten(1, (q.shape[1], -1))
    return (o * scale).reshape(v.shape).to(v.dtype)


def _scan(tensors: Sequence[Any], initial: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    _, _, v, _, a, _ = tensors
    (_, h, dv), dk = v.shape, a.shape[2]
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, initial))
    tiles = Tiles.of(spans, 16 if max(dk, dv) <= 32 else 32)  # measured on CPUs, forward and backward
    size, chain = tiles.size, Chain(tiles, initial)
    parts = segments(tiles, h * max(4 * size * size, 2 * size * max(dk, dv), dk * dk, dk * dv), whole=graded)
    if graded:
        (part,) = parts
        out = part.join(_segment(part, chain, tensors, scale), v.dtype)
    else:
        out = v.new_empty(v.shape)
        for part in parts:
            part.write(out, _segment(part, chain, tensors, scale))
    return out, chain.final()


def _segment(part: Segment, chain: Chain, tensors: Sequence[Tensor], scale: float) -> Tensor:
    """o (tiles, size, h, dv) float32 of a segment's tiles; the chain moves past them."""
    q, k, v, g, a, b = (part.cut(t).float().transpose(1, 2) for t in tensors)  # (tiles, heads, size, dim)
    q, k = _spread(q * scale, v.shape[1]), _spread(k, v.shape[1])
    decay, keys = g.exp(), torch.stack([b, k], 3)
    own = (q[..., None, :] * keys).sum(-1)  # q reads what its own token writes, a does not
    pairs = torch.stack([torch.zeros_like(own), own], 3)
    queries = torch.stack([a, q * decay], 3)
    pairs, queries, keys, whole = join(pairs, queries, keys, decay[..., None, :])
    (ab, ak), (qb, qk) = (rows.unflatten(-1, (-1, 2)).unbind(-1) for rows in _two(pairs))
    (a, q), (b, k) = _two(queries), _two(keys)

    # "unitriangular" takes the diagonal for ones and reads strictly below it.
    solved = torch.linalg.solve_triangular(-ab, torch.cat([ak @ v, a], -1), upper=False, unitriangular=True)
    u, w = solved.split([v.shape[3], a.shape[3]], -1)
    transition = torch.diag_embed(whole.squeeze(2)) + b.mT @ w
    first = chain.walk(part.sizes, transition, b.mT @ u + k.mT @ v, _through)
    o = qb @ (u + w @ first) + qk @ v + q @ first
    return o.transpose(1, 2)


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    """(tiles, h, 2 size, ...), two to a token, as the first and the second of each token."""
    one, other = x.unflatten(2, (-1, 2)).unbind(3)
    return one, other


def _through(update: Tensor, transition: Tensor, state: Tensor) -> Tensor:
    """The state (rows, h, dk, dv) behind a tile."""
    return update + transition @ state

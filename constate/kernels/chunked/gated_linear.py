"""The gated linear scan with one decay a head, in tiles: Mamba-2 (SSD), RetNet, lightning attention.

S_t = exp(g_t) S_{t-1} + k_t v_t^T,  o_t = scale S_t^T q_t. Within a tile o is (q k^T * L) v with
L_ij = exp(g_{j+1} + ... + g_i), and only states cross tiles (Dao & Gu 2024, section 6). Key heads shared
by a group of value heads are multiplied once. A decay of its own for every channel is gated_linear_vector's.

Exponents are never positive: they are differences of float64 prefix sums, with entries clamped at -1e4,
whose exp is 0 in float32; a float32 prefix sum would lose a decay of -1e-6 that stands beside one of -1e4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from . import gated_linear_vector
from .segments import Chain, Segment, segments
from .singles import route
from .tiles import Tiles

SMALL_TILE, TILE = 32, 64
SMALL_STATE = 4096
"""A longer tile saves states and costs pairs: up to this dk * dv a head, 32 tokens measured faster."""


def gated_linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Packed q, k (n, hk, dk) and v (n, h, dv) through S <- exp(g) S + k v^T; o = scale S^T q.

    log_decay (n, h), or (n, h, dk) on the key axis, or None for no decay; initial (rows, h, dk, dv) or
    None for zeros. Returns o (n, h, dv) in v's dtype and final (rows, h, dk, dv) float32.
    Raises ValueError for shapes that disagree and, checked, for a positive log-decay.
    """
    _, h = shapes.heads(q, k, v)
    (n, _, dv), dk = v.shape, q.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay)
    vector = shapes.log_decay(log_decay, n, h, dk, checked=checked)
    state = shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    if n == 0:
        return torch.zeros_like(v), state.clone()
    tiled = gated_linear_vector.scan if vector else _scan

    def scan(tensors: Sequence[Tensor | None], initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        q, k, v, g = tensors
        assert q is not None and k is not None and v is not None
        return tiled(q, k, v, g, initial, spans, scale)

    def one(tensors: Sequence[Tensor | None], initial: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g = tensors
        assert q is not None and k is not None and v is not None
        final = initial.clone() if g is None else initial * _expand(g)
        return _write_read(q, k, v, final, scale), final

    return route((q, k, v, log_decay), state, spans, scan=scan, one=one)


def gated_linear_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, *, scale: float = 1.0
) -> Tensor:
    """One token a row: q, k (rows, hk, dk), v (rows, h, dv), log_decay (rows, h) or (rows, h, dk) or None.

    `state` (rows, h, dk, dv) float32, of any strides, is updated in place; returns o (rows, h, dv).
    """
    _, h = shapes.heads(q, k, v)
    rows, dk = q.shape[0], q.shape[2]
    shapes.log_decay(log_decay, rows, h, dk)
    shapes.step_state(state, (rows, h, dk, v.shape[2]))
    if log_decay is not None:
        state.mul_(_expand(log_decay))
    return _write_read(q, k, v, state, scale)


def _expand(g: Tensor) -> Tensor:
    """exp(g), (rows, h) or (rows, h, dk), to multiply a (rows, h, dk, dv) state."""
    decay = g.float().exp()
    return decay[..., None, None] if g.ndim == 2 else decay[..., None]


def _write_read(q: Tensor, k: Tensor, v: Tensor, state: Tensor, scale: float) -> Tensor:
    """Adds k v^T to the decayed state in place, then reads it: o (rows, h, dv)."""
    grouped = state.unflatten(1, (q.shape[1], -1))
    value = v.float().unflatten(1, (q.shape[1], -1))
    grouped.addcmul_(k.float()[:, :, None, :, None], value[:, :, :, None, :])
    return ((q.float() * scale)[:, :, None, None, :] @ grouped).flatten(1, 3).view(v.shape).to(v.dtype)


@lru_cache(maxsize=16)
def _later(size: int, device: torch.device) -> Tensor:
    """True where the column comes after the row."""
    with torch.inference_mode(False):  # kept between calls: a training may follow, and saves it for backward
        return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    (_, hk, _), (_, h, dv) = q.shape, v.shape
    graded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, g, initial))
    tiles = Tiles.of(spans, SMALL_TILE if q.shape[2] * dv <= SMALL_STATE else TILE)
    # The chain holds states as (rows, hk, dk, h / hk, dv): a group's value heads side by side.
    chain = Chain(tiles, initial.unflatten(1, (hk, -1)).transpose(2, 3))
    parts = segments(tiles, tiles.size * h * max(tiles.size, dv), whole=graded)
    if graded:
        (part,) = parts
        out = part.join(_segment(part, chain, q, k, v, g, scale), v.dtype)
    else:
        out = v.new_empty(v.shape)
        for part in parts:
            part.write(out, _segment(part, chain, q, k, v, g, scale))
    return out, chain.final().transpose(2, 3).flatten(1, 2)


def _segment(
    part: Segment, chain: Chain, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float
) -> Tensor:
    """o (tiles, size, h, dv) float32 of a segment's tiles; the chain moves past them."""
    hk = q.shape[1]
    query = part.cut(q).float().transpose(1, 2) * scale  # (tiles, hk, size, dk)
    key = part.cut(k).float().transpose(1, 2)
    value = part.cut(v).float().unflatten(2, (hk, -1)).transpose(1, 2)  # (tiles, hk, size, group, dv)
    scores = (query @ key.mT)[:, :, None]
    tiles, _, size, group, _ = value.shape
    later = _later(size, v.device)
    if g is None:
        weights, carried, kept = scores.masked_fill(later, 0.0), value, value.new_ones(tiles, 1, 1, 1, 1)
        grown = None
    else:
        clamped = part.cut(g).double().clamp(min=-1e4).unflatten(2, (hk, -1))
        upto = clamped.cumsum(1).permute(0, 2, 3, 1)  # (tiles, hk, group, size)
        decay = (upto[..., :, None] - upto[..., None, :]).float().masked_fill_(later, -torch.inf).exp_()
        weights = decay * scores
        total = upto[..., -1:]
        carried = value * (total - upto).float().exp().transpose(2, 3)[..., None]
        kept = total.float().exp().transpose(2, 3)[:, :, None, 0, :, None]  # (tiles, hk, 1, group, 1)
        grown = upto.float().exp().transpose(2, 3)[..., None]
    update = (key.mT @ carried.flatten(3)).unflatten(3, (group, -1))
    first = chain.walk(part.sizes, kept.expand(tiles, hk, 1, group, 1), update)
    past = (query @ first.flatten(3)).unflatten(3, (group, -1))
    near = (weights @ value.transpose(2, 3)).transpose(2, 3)  # (tiles, hk, size, group, dv)
    o = near + past if grown is None else torch.addcmul(near, past, grown)
    return o.transpose(1, 2).flatten(2, 3)

"""What a gated delta tile is before it meets the state, where a decay is a head's; a program a tile and head.

With c the running sum of log-decays inside a tile, M_ij = beta_i (k_i . k_j) exp(c_i - c_j) for j < i and
T = (I + M)^-1, it leaves u = T beta v and w = T beta exp(c) k, which do not know the state S that enters:
what the tile really writes is u - w S (Yang et al. 2024, arXiv 2406.06484; decays as in 2412.06464). Beside
them what the query of token i reads of the write of token j <= i, (q_i . k_j) exp(c_i - c_j), and exp(c) and
exp(c_end - c) themselves. Sums of log-decays are float64, and their differences never lose a -1e-6 that
stands beside a -1e4. Knows nothing of states, which are gated_delta_walk's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_delta_parts import FLOOR, Cut, Prepared, Sizes, inverse, ranged
from .launch import launch, power, precision, strides


@triton.jit
def delta_tiles(
    q,
    k,
    v,
    log_decay,
    beta,
    u,
    w,
    reads,
    since,
    until,
    cu,
    tile_row,
    tile_start,
    q_token,
    q_head,
    q_channel,
    k_token,
    k_head,
    k_channel,
    v_token,
    v_head,
    v_channel,
    decay_token,
    decay_head,
    decay_channel,
    beta_token,
    beta_head,
    beta_channel,
    h,
    group,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """u (n, h, dv), w (n, h, dk) and reads (n, h, SIZE) in v's dtype, or u in a wider one; since and until
    (n, h) float32, which with log_decay are None where nothing decays."""
    tile, head = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64)
    kind = v.dtype.element_ty
    start, end = tl.load(tile_start + tile), tl.load(cu + tl.load(tile_row + tile) + 1)
    i = tl.arange(0, SIZE)
    token = start + i
    live = token < end
    shared = head // group
    q += token[:, None] * q_token + shared * q_head
    k += token[:, None] * k_token + shared * k_head
    v += token[:, None] * v_token + head * v_head

    kk = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    qk = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)[None, :]
        there = live[:, None] & (d < DK)
        far = tl.cast(d, tl.int64)
        key = tl.load(k + far * k_channel, mask=there, other=0.0).to(kind)
        query = tl.load(q + far * q_channel, mask=there, other=0.0).to(kind)
        kk += tl.dot(key, tl.trans(key), input_precision=PRECISION)
        qk += tl.dot(query, tl.trans(key), input_precision=PRECISION)

    rate = tl.load(beta + token * beta_token + head * beta_head, mask=live, other=0.0).to(tl.float32)
    own = token * h + head
    enters = rate
    if log_decay is not None:
        g = tl.load(log_decay + token * decay_token + head * decay_head, mask=live, other=0.0)
        g = tl.maximum(g.to(tl.float32), FLOOR).to(tl.float64)
        c = tl.cumsum(g, axis=0)
        # A float64 sum as two float32: their differences are as good, and a square of them half as large.
        high = c.to(tl.float32)
        low = (c - high.to(tl.float64)).to(tl.float32)
        apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        ratio = tl.exp(tl.minimum(apart, 0.0))
        kk, qk = kk * ratio, qk * ratio
        reached = tl.exp(high)
        enters = rate * reached
        tl.store(since + own, reached, mask=live)
        tl.store(until + own, tl.exp((tl.sum(g, axis=0) - c).to(tl.float32)), mask=live)
    square = own[:, None] * SIZE + i[None, :]
    qk = tl.where(i[:, None] >= i[None, :], qk, 0.0)
    tl.store(reads + square, qk.to(kind), mask=live[:, None])

    t = inverse(tl.where(i[:, None] > i[None, :], kk * rate[:, None], 0.0), SIZE, PRECISION)
    written, entered = (t * rate[None, :]).to(kind), (t * enters[None, :]).to(kind)
    for first in range(0, DV, BV):
        d = first + tl.arange(0, BV)[None, :]
        there = live[:, None] & (d < DV)
        value = tl.load(v + tl.cast(d, tl.int64) * v_channel, mask=there, other=0.0)
        value = tl.dot(written, value, input_precision=PRECISION)
        tl.store(u + own[:, None] * DV + d, value.to(u.dtype.element_ty), mask=there)
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)[None, :]
        there = live[:, None] & (d < DK)
        far = tl.cast(d, tl.int64)
        key = tl.load(k + far * k_channel, mask=there, other=0.0).to(kind)
        key = tl.dot(entered, key, input_precision=PRECISION)
        tl.store(w + own[:, None] * DK + d, key.to(kind), mask=there)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, cut: Cut, by: Sizes
) -> Prepared:
    """One launch: q, k (n, hk, dk), v (n, h, dv), log_decay (n, h) or None, beta (n, h), of any strides."""
    (n, h, dv), dk = v.shape, k.shape[2]
    u = v.new_empty(n, h, dv, dtype=ranged(v.dtype))
    w, reads = (v.new_empty(n, h, width) for width in (dk, by.size))
    since, until = (None, None) if log_decay is None else v.new_empty(2, n, h, dtype=torch.float32).unbind()
    launch(
        delta_tiles,
        (cut.row.shape[0], h),
        v,
        warps=by.tile_warps,
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        u=u,
        w=w,
        reads=reads,
        since=since,
        until=until,
        cu=cut.cu,
        tile_row=cut.row,
        tile_start=cut.start,
        **strides(q=q, k=k, v=v, decay=log_decay, beta=beta),
        h=h,
        group=h // k.shape[1],
        DK=dk,
        DV=dv,
        BK=min(power(dk), by.bk),
        BV=min(power(dv), by.bv),
        SIZE=by.size,
        PRECISION=precision(v.dtype),
    )
    return Prepared(q, k, u, w, reads, since, until)

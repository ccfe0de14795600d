"""What a delta tile is before it meets the state, where every channel of a key has a decay of its own.

Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692) and, with `a`, the diagonal plus low rank rule of
RWKV-7 (Peng et al. 2025, arXiv 2503.14456), whose erase reads at `a` the state before it decays and writes at
`b`. What token i reads of what token j < i wrote is sum_d x_id y_jd exp(g_{j+1,d} + ... + g_id), which does
not factor over a tile. It does between the two halves of any block, at their border: so the pairs are made
by halves of 1, 2, 4 ... tokens, each a product of matrices whose factors decay from the border on, and every
factor is exp of a sum of log-decays alone, never of a difference. One program a tile and head; knows nothing
of states, which are gated_delta_walk's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_delta_parts import FLOOR, Cut, Prepared, Sizes, inverse, ranged
from .launch import launch, power, precision, strides


@triton.jit
def vector_tiles(
    q,
    k,
    v,
    log_decay,
    beta,
    a,
    b,
    u,
    w,
    queries,
    keys,
    also,
    whole,
    reads,
    local,
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
    a_token,
    a_head,
    a_channel,
    b_token,
    b_head,
    b_channel,
    h,
    group,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For gated_delta_walk: u (n, h, dv), w (n, h, dk), queries decayed from the tile's start and keys to its
    end (n, h, dk), whole (tiles, h, dk) float32, reads (n, h, SIZE); SIZE is 2^LEVELS.

    With `a` and `b`, and beta None: `keys` are b's, `also` (n, h, dk) k's, and local (n, h, dv) what queries
    read of the tile's own v at k, without the scale. Else a, b, also and local are None.
    """
    tile, head = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64)
    kind = v.dtype.element_ty
    start, end = tl.load(tile_start + tile), tl.load(cu + tl.load(tile_row + tile) + 1)
    i = tl.arange(0, SIZE)
    token = start + i
    live = token < end
    own = (token * h + head)[:, None]
    shared = head // group
    q += token[:, None] * q_token + shared * q_head
    k += token[:, None] * k_token + shared * k_head
    v += token[:, None] * v_token + head * v_head
    log_decay += token[:, None] * decay_token + head * decay_head
    if a is not None:
        a += token[:, None] * a_token + head * a_head
        b += token[:, None] * b_token + head * b_head

    erased = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    read = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    erased_also = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    read_also = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    diagonal = i[:, None] == i[None, :]
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)[None, :]
        there = live[:, None] & (d < DK)
        far = tl.cast(d, tl.int64)
        query = tl.load(q + far * q_channel, mask=there, other=0.0).to(tl.float32)
        key = tl.load(k + far * k_channel, mask=there, other=0.0).to(tl.float32)
        g = tl.load(log_decay + far * decay_channel, mask=there, other=0.0).to(tl.float32)
        # Sums of log-decays over a token's block: all, up to the token, before it, and after it.
        total = tl.maximum(g, FLOOR)
        upto, before, after = total, tl.zeros_like(total), tl.zeros_like(total)
        if a is not None:
            eraser = tl.load(a + far * a_channel, mask=there, other=0.0).to(tl.float32)
            target = tl.load(b + far * b_channel, mask=there, other=0.0).to(tl.float32)
        else:
            eraser, target = key, key
        half = 1
        for _ in range(LEVELS):
            later = ((i & half) != 0)[:, None]
            border = 2 * half - 1
            same = (i[:, None] | border) == (i[None, :] | border)
            factor = tl.exp(tl.where(later, upto, after))
            right = tl.trans(tl.where(later, 0.0, target * factor).to(kind))
            left = tl.where(later, query * factor, 0.0).to(kind)
            read += tl.where(same, tl.dot(left, right, input_precision=PRECISION), 0.0)
            if a is not None:
                also_right = tl.trans(tl.where(later, 0.0, key * factor).to(kind))
                read_also += tl.where(same, tl.dot(left, also_right, input_precision=PRECISION), 0.0)
                left = tl.where(later, eraser * tl.exp(before), 0.0).to(kind)
                erased_also += tl.where(same, tl.dot(left, also_right, input_precision=PRECISION), 0.0)
            else:
                left = tl.where(later, eraser * factor, 0.0).to(kind)
            erased += tl.where(same, tl.dot(left, right, input_precision=PRECISION), 0.0)
            other = tl.gather(total, tl.broadcast_to((i ^ half)[:, None], (SIZE, BK)), 0)
            upto += tl.where(later, other, 0.0)
            before += tl.where(later, other, 0.0)
            after += tl.where(later, 0.0, other)
            total += other
            half *= 2
        read += tl.where(diagonal, tl.sum(query * target, axis=1)[:, None], 0.0)
        tl.store(queries + own * DK + d, (query * tl.exp(upto)).to(kind), mask=there)
        tl.store(keys + own * DK + d, (target * tl.exp(after)).to(kind), mask=there)
        if a is not None:
            read_also += tl.where(diagonal, tl.sum(query * key, axis=1)[:, None], 0.0)
            tl.store(also + own * DK + d, (key * tl.exp(after)).to(kind), mask=there)
            upto = before
        tl.store(w + own * DK + d, (eraser * tl.exp(upto)).to(kind), mask=there)
        decayed = whole + (tl.cast(tile, tl.int64) * h + head) * DK + d
        tl.store(decayed + i[:, None] * 0, tl.exp(total), mask=(i[:, None] == 0) & (d < DK))
    tl.store(reads + own * SIZE + i[None, :], read.to(kind), mask=live[:, None])

    if a is not None:
        t = inverse(-erased, SIZE, PRECISION)
        entered = -t
        written = tl.dot(t, erased_also, input_precision=PRECISION)
    else:
        rate = tl.load(beta + token * beta_token + head * beta_head, mask=live, other=0.0).to(tl.float32)
        t = inverse(erased * rate[:, None], SIZE, PRECISION)
        entered = t * rate[None, :]
        written = entered
    entered, written, read_also = entered.to(kind), written.to(kind), read_also.to(kind)
    for first in range(0, DV, BV):
        d = first + tl.arange(0, BV)[None, :]
        there = live[:, None] & (d < DV)
        value = tl.load(v + tl.cast(d, tl.int64) * v_channel, mask=there, other=0.0)
        new = tl.dot(written, value, input_precision=PRECISION)
        tl.store(u + own * DV + d, new.to(u.dtype.element_ty), mask=there)
        if a is not None:
            new = tl.dot(read_also, value, input_precision=PRECISION)
            tl.store(local + own * DV + d, new.to(kind), mask=there)
    tl.debug_barrier()  # w holds what erases reads, decayed, as other threads of this program wrote it
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)[None, :]
        there = live[:, None] & (d < DK)
        eraser = tl.load(w + own * DK + d, mask=there, other=0.0)
        eraser = tl.dot(entered, eraser, input_precision=PRECISION)
        tl.debug_barrier()  # what is written over has been read by all
        tl.store(w + own * DK + d, eraser.to(kind), mask=there)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    cut: Cut,
    by: Sizes,
    *,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
) -> Prepared:
    """One launch: q, k (n, hk, dk), v (n, h, dv), log_decay (n, h, dk), with beta (n, h) or with a and b
    (n, h, dk), of any strides."""
    (n, h, dv), dk, tiles = v.shape, k.shape[2], cut.row.shape[0]
    u = v.new_empty(n, h, dv, dtype=ranged(v.dtype))
    w, reads, queries, keys = (v.new_empty(n, h, width) for width in (dk, by.size, dk, dk))
    also, local = (None, None) if a is None else (v.new_empty(n, h, width) for width in (dk, dv))
    whole = v.new_empty(tiles, h, dk, dtype=torch.float32)
    launch(
        vector_tiles,
        (tiles, h),
        v,
        warps=by.tile_warps,
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        a=a,
        b=b,
        u=u,
        w=w,
        queries=queries,
        keys=keys,
        also=also,
        whole=whole,
        reads=reads,
        local=local,
        cu=cut.cu,
        tile_row=cut.row,
        tile_start=cut.start,
        **strides(q=q, k=k, v=v, decay=log_decay, beta=beta, a=a, b=b),
        h=h,
        group=h // k.shape[1],
        DK=dk,
        DV=dv,
        BK=min(power(dk), by.bk),
        BV=min(power(dv), by.bv),
        SIZE=by.size,
        LEVELS=by.size.bit_length() - 1,
        PRECISION=precision(v.dtype),
    )
    return Prepared(
        queries, keys, u, w, reads, whole=whole, also=also, v=None if a is None else v, local=local
    )

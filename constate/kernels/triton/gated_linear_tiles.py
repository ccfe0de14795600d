"""What a tile is before it meets the state, where every channel of a key decays by itself: GLA, HGRN-2.

What token i reads of what token j < i wrote is sum_d q_id k_jd exp(g_{j+1,d} + ... + g_id), which does not
factor over a tile. It does between the two halves of any block, at their border: so the pairs are made by
halves of 1, 2, 4 ... tokens, each a product of matrices whose factors decay from the border on, and every
factor is exp of a sum of log-decays alone, never of a difference. One program a tile and head; knows nothing
of states, which are gated_linear_walk's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_linear_pass import VECTOR
from .gated_linear_walk import FLOOR, Decays, Sizes
from .launch import launch, power, precision, strides


@triton.jit
def linear_tiles(
    q,
    k,
    log_decay,
    queries,
    keys,
    pairs,
    whole,
    cu,
    tile_row,
    tile_start,
    q_token,
    q_head,
    q_channel,
    k_token,
    k_head,
    k_channel,
    decay_token,
    decay_head,
    decay_channel,
    h,
    group,
    DK: tl.constexpr,
    BK: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs (tiles, h): queries decayed from the tile's start and keys to its end (n, h, dk), pairs
    (n, h, SIZE), the three in one dtype, and whole (tiles, h, dk) float32; SIZE is 2^LEVELS."""
    tile, head = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64)
    kind = queries.dtype.element_ty
    start, end = tl.load(tile_start + tile), tl.load(cu + tl.load(tile_row + tile) + 1)
    i = tl.arange(0, SIZE)
    token = start + i
    live = token < end
    own = (token * h + head)[:, None]
    shared = head // group
    q += token[:, None] * q_token + shared * q_head
    k += token[:, None] * k_token + shared * k_head
    log_decay += token[:, None] * decay_token + head * decay_head

    read = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for begin in range(0, DK, BK):
        d = begin + tl.arange(0, BK)[None, :]
        far = tl.cast(d, tl.int64)
        there = live[:, None] & (d < DK)
        query = tl.load(q + far * q_channel, mask=there, other=0.0).to(tl.float32)
        key = tl.load(k + far * k_channel, mask=there, other=0.0).to(tl.float32)
        g = tl.load(log_decay + far * decay_channel, mask=there, other=0.0)
        # Sums of log-decays over a token's block, which doubles: all, up to the token, and after it.
        total = tl.maximum(g.to(tl.float32), FLOOR)
        upto, after = total, tl.zeros_like(total)
        half = 1
        for _ in range(LEVELS):
            later = ((i & half) != 0)[:, None]
            border = 2 * half - 1
            same = (i[:, None] | border) == (i[None, :] | border)
            factor = tl.exp(tl.where(later, upto, after))
            left = tl.where(later, query * factor, 0.0).to(kind)
            right = tl.where(later, 0.0, key * factor).to(kind)
            read += tl.where(same, tl.dot(left, tl.trans(right), input_precision=PRECISION), 0.0)
            other = tl.gather(total, tl.broadcast_to((i ^ half)[:, None], (SIZE, BK)), 0)
            upto += tl.where(later, other, 0.0)
            after += tl.where(later, 0.0, other)
            total += other
            half *= 2
        read += tl.where(i[:, None] == i[None, :], tl.sum(query * key, axis=1)[:, None], 0.0)
        tl.store(queries + own * DK + d, (query * tl.exp(upto)).to(kind), mask=there)
        tl.store(keys + own * DK + d, (key * tl.exp(after)).to(kind), mask=there)
        decayed = whole + (tl.cast(tile, tl.int64) * h + head) * DK + d
        tl.store(decayed + i[:, None] * 0, tl.exp(total), mask=(i[:, None] == 0) & (d < DK))
    tl.store(pairs + own * SIZE + i[None, :], read.to(kind), mask=live[:, None])


def prepare(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    cu: Tensor,
    first: Tensor,
    row: Tensor,
    start: Tensor,
    kind: torch.dtype,
    by: Sizes,
) -> tuple[Tensor, Tensor, Decays]:
    """Queries and keys decayed, a value head each, in dtype `kind`, and what else gated_linear_walk reads."""
    n, h, dk = log_decay.shape
    queries, keys = (q.new_empty(n, h, dk, dtype=kind) for _ in range(2))
    pairs = q.new_empty(n, h, by.size, dtype=kind)
    whole = q.new_empty(row.shape[0], h, dk, dtype=torch.float32)
    launch(
        linear_tiles,
        (row.shape[0], h),
        q,
        warps=by.tile_warps,
        q=q,
        k=k,
        log_decay=log_decay,
        queries=queries,
        keys=keys,
        pairs=pairs,
        whole=whole,
        cu=cu,
        tile_row=row,
        tile_start=start,
        **strides(q=q, k=k, decay=log_decay),
        h=h,
        group=h // k.shape[1],
        DK=dk,
        BK=min(power(dk), by.bk),
        SIZE=by.size,
        LEVELS=by.size.bit_length() - 1,
        PRECISION=precision(),
    )
    return queries, keys, Decays(VECTOR, pairs=pairs, whole=whole, first=first)

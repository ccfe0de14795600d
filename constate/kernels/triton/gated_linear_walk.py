"""The gated linear scan's walk over tiles with the state in registers: one program a piece, head and block.

A piece is a row (one pass) or a stretch of one (chunk-parallel: the walk runs twice, first for each
stretch's own state from zero, and, once gated_linear_pass has joined those, for the outputs). Within a tile
o = ((q k^T) * L) v + exp(G) q S and then S <- exp(G_end) S + k^T (exp(G_end - G) v), with L_ij =
exp(g_{j+1} + ... + g_i): Dao & Gu 2024, section 6. Where every channel decays by itself gated_linear_tiles
has put L and the decays into q, k and their products before. Knows nothing of why a piece is what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_linear_pass import NONE, VECTOR, join, state_strides
from .launch import launch, power, precision, strides

FLOOR = tl.constexpr(-128.0)
"""Log-decays are clamped here, whose exponential is 0 in float32 already: -inf is legal."""


@triton.jit
def linear_walk(
    q,
    k,
    v,
    log_decay,
    pairs,
    whole,
    initial,
    o,
    final,
    kept,
    cu,
    first,
    piece_row,
    piece_start,
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
    initial_row,
    initial_head,
    initial_key,
    initial_value,
    length,
    scale,
    h,
    group,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SIZE: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs (pieces * h * blocks of BV channels,): o (n, h, dv), final (pieces, h, dk, dv) float32 and, of
    stretches, kept: the product of their decays, (pieces, h) or (pieces, h, dk) float32.

    Without `o` it makes states alone. piece_row and piece_start are None where pieces are rows; else a
    piece is `length` tokens from its start, or to its row's end. With DECAY == 2 q and k are decayed
    already and there are pairs (n, h, SIZE) and whole (tiles, h, dk); `first` numbers each row's first tile.
    """
    number = tl.program_id(0)
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    head = tl.cast(number // BLOCKS % h, tl.int64)
    piece = tl.cast(number // BLOCKS // h, tl.int64)
    row, begin = piece, tl.load(cu + piece)
    end = tl.load(cu + piece + 1)
    if piece_row is not None:
        row = tl.load(piece_row + piece)
        begin = tl.load(piece_start + piece)
        end = tl.minimum(tl.load(cu + row + 1), begin + length)
    shared = head // group
    kind = v.dtype.element_ty if q.dtype == k.dtype and k.dtype == v.dtype else tl.float32
    i = tl.arange(0, SIZE)
    key, value = tl.arange(0, BK), number % BLOCKS * BV + tl.arange(0, BV)
    in_key, in_value = key < DK, value < DV
    far_key, far_value = tl.cast(key, tl.int64)[:, None], tl.cast(value, tl.int64)[None, :]
    q += shared * q_head + tl.cast(key, tl.int64)[None, :] * q_channel
    k += shared * k_head + tl.cast(key, tl.int64)[None, :] * k_channel
    v += head * v_head + far_value * v_channel
    in_state = in_key[:, None] & in_value[None, :]
    s = tl.zeros((BK, BV), dtype=tl.float32)
    if initial is not None:
        begun = initial + piece * initial_row + head * initial_head
        begun += far_key * initial_key + far_value * initial_value
        s = tl.load(begun, mask=in_state, other=0.0)
    if DECAY == 1:
        total = tl.zeros((1,), dtype=tl.float64)
    if DECAY == 2:
        total = tl.full((BK,), 1.0, dtype=tl.float32)
        tile = tl.load(first + row) + (begin - tl.load(cu + row)) // SIZE

    tiles = tl.cast((end - begin + SIZE - 1) // SIZE, tl.int32)
    for number in range(tiles):
        t = begin + tl.cast(number, tl.int64) * SIZE + i
        live = t < end
        there = live[:, None] & in_key[None, :]
        written = live[:, None] & in_value[None, :]
        kt = tl.load(k + t[:, None] * k_token, mask=there, other=0.0).to(kind)
        vt = tl.load(v + t[:, None] * v_token, mask=written, other=0.0).to(kind)
        if DECAY == 1:
            g = tl.load(log_decay + t * decay_token + head * decay_head, mask=live, other=0.0)
            g = tl.maximum(g.to(tl.float32), FLOOR).to(tl.float64)
            upto, sums = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        if o is not None:
            qt = tl.load(q + t[:, None] * q_token, mask=there, other=0.0).to(kind)
            if kind == tl.float16:  # whose range a sum over many tokens leaves; TF32 has as many digits
                past = tl.dot(qt.to(tl.float32), s, input_precision="tf32")
            else:
                past = tl.dot(qt, s.to(kind), input_precision=PRECISION)
            if DECAY == 2:
                at = (t * h + head)[:, None] * SIZE + i[None, :]
                near = tl.load(pairs + at, mask=live[:, None], other=0.0)
            else:
                near = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
                near = tl.where(i[:, None] >= i[None, :], near, 0.0)
            if DECAY == 1:
                # A float64 sum as two of float32: their differences are as good as its own.
                high = upto.to(tl.float32)
                low = (upto - high.to(tl.float64)).to(tl.float32)
                apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
                near *= tl.exp(tl.minimum(apart, 0.0))
                past *= tl.exp(high)[:, None]
            past = tl.dot(near.to(kind), vt, past, input_precision=PRECISION) * scale
            at = (t * h + head)[:, None] * DV + value[None, :]
            tl.store(o + at, past.to(o.dtype.element_ty), mask=written)
        if DECAY == 1:
            vt = (vt.to(tl.float32) * tl.exp((sums - upto).to(tl.float32))[:, None]).to(kind)
            s *= tl.exp(sums.to(tl.float32))
            total += sums
        if DECAY == 2:
            decay = tl.load(whole + (tile * h + head) * DK + key, mask=in_key, other=1.0)
            s *= decay[:, None]
            total *= decay
            tile += 1
        s = tl.dot(tl.trans(kt), vt, s, input_precision=PRECISION)

    if final is not None:
        place = (piece * h + head) * (DK * DV)
        tl.store(final + place + far_key * DV + far_value, s, mask=in_state)
    if kept is not None:
        if DECAY == 1:
            tl.store(kept + (piece * h + head) + tl.arange(0, 1), tl.exp(total.to(tl.float32)))
        if DECAY == 2:
            tl.store(kept + (piece * h + head) * DK + key, total, mask=in_key)


@dataclass(frozen=True)
class Sizes:
    """`size` tokens a tile; blocks of `bk` key channels where tiles are prepared, and of `bv` value channels
    where they are walked; warps of both kernels' programs."""

    size: int
    bk: int
    bv: int
    tile_warps: int
    walk_warps: int


@dataclass(frozen=True)
class Decays:
    """What decays: `kind` NONE; SCALAR, by log_decay (n, h); or VECTOR, where q and k have it in them already
    and there are pairs (n, h, size), whole (tiles, h, dk) and each row's first tile."""

    kind: int
    log_decay: Tensor | None = None
    pairs: Tensor | None = None
    whole: Tensor | None = None
    first: Tensor | None = None


class Pieces(NamedTuple):
    """Rows cut into stretches of `length` tokens, on the device: see SpanTiles."""

    first: Tensor
    row: Tensor
    start: Tensor
    length: int


def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Decays,
    initial: Tensor | None,
    cu: Tensor,
    pieces: Pieces | None,
    scale: float,
    by: Sizes,
) -> tuple[Tensor, Tensor]:
    """o and final of the scan: in one pass over rows, or over their stretches twice with a pass between."""
    (_, h, dv), (hk, dk), rows = v.shape, k.shape[1:], cu.shape[0] - 1
    o, final = v.new_empty(v.shape), v.new_empty(rows, h, dk, dv, dtype=torch.float32)

    def once(count: int, initial: Tensor | None, o: Tensor | None, final: Tensor | None, kept: Tensor | None):
        launch(
            linear_walk,
            (count * h * -(-dv // by.bv),),
            v,
            warps=by.walk_warps,
            q=q,
            k=k,
            v=v,
            log_decay=decays.log_decay,
            pairs=decays.pairs,
            whole=decays.whole,
            initial=initial,
            o=o,
            final=final,
            kept=kept,
            cu=cu,
            first=decays.first,
            piece_row=None if pieces is None else pieces.row,
            piece_start=None if pieces is None else pieces.start,
            **strides(q=q, k=k, v=v, decay=decays.log_decay),
            **state_strides(initial),
            length=0 if pieces is None else pieces.length,
            scale=scale,
            h=h,
            group=h // hk,
            DK=dk,
            DV=dv,
            BK=power(dk),
            BV=by.bv,
            SIZE=by.size,
            DECAY=decays.kind,
            PRECISION=precision(),
        )

    if pieces is None:
        once(rows, initial, o, final, None)
        return o, final
    count = pieces.row.shape[0]
    states, kept = v.new_empty(count, h, dk, dv, dtype=torch.float32), None
    if decays.kind != NONE:
        kept = v.new_empty(count, h, dk if decays.kind == VECTOR else 1, dtype=torch.float32)
    once(count, None, None, states, kept)
    join(states, kept, initial, final, pieces.first, decays.kind)
    once(count, states, o, None, None)
    return o, final

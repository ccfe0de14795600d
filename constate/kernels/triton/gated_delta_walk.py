"""The chain of a row's tiles, with the state in registers, and what the queries read of it.

With S the state that enters a tile, a tile writes new = u - w S at its keys, takes S to
decay S + k^T new [+ also^T v], and its queries read o = scale (q S + reads new [+ local]). Two forms:
`delta_walk` alone, tiles one after another with their outputs; or `delta_walk` for the states that enter and
the writes, then `delta_outputs` for all tiles side by side, where the chains alone would not fill the device.
Knows no decay's making: tiles were prepared by gated_delta_tiles or gated_delta_vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_delta_parts import Cut, Prepared, Sizes
from .launch import launch, multiprocessors, power, precision, strides


@triton.jit
def _of(x, s, acc, PRECISION: tl.constexpr):
    """acc + x s, of x's dtype; but what a state holds may leave float16's range, and TF32 has its digits."""
    if x.dtype == tl.float16:
        return tl.dot(x.to(tl.float32), s.to(tl.float32), acc=acc, input_precision=PRECISION)
    return tl.dot(x, s.to(x.dtype), acc=acc, input_precision=PRECISION)


@triton.jit
def delta_walk(
    q,
    k,
    v,
    also,
    u,
    w,
    reads,
    local,
    since,
    until,
    whole,
    initial,
    final,
    states,
    o,
    cu,
    tile_first,
    q_token,
    q_head,
    q_channel,
    k_token,
    k_head,
    k_channel,
    v_token,
    v_head,
    v_channel,
    initial_row,
    initial_head,
    initial_k,
    initial_v,
    h,
    group,
    scale,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs (rows * h * blocks of BV value channels,); BK holds all of a key.

    u (n, h, dv) and w (n, h, dk), reads (n, h, SIZE), local (n, h, dv) or None, since and until (n, h)
    where the decay is a head's, whole (tiles, h, dk) where it is a channel's, contiguous. also (n, h, dk)
    and v are the second keys and values, or None. Where `states` (tiles, h, dk, dv) is given each tile's
    entering state goes there and its writes over u, and o, q, reads and local are not touched.
    """
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    unit, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    row, head = tl.cast(unit // h, tl.int64), tl.cast(unit % h, tl.int64)
    kind = w.dtype.element_ty
    d = tl.arange(0, BK)
    e = block * BV + tl.arange(0, BV)
    inside = (d[:, None] < DK) & (e[None, :] < DV)
    at = d[:, None] * DV + e[None, :]
    if initial is None:
        s = tl.zeros((BK, BV), dtype=tl.float32)
    else:
        place = row * initial_row + head * initial_head
        place += tl.cast(d, tl.int64)[:, None] * initial_k + tl.cast(e, tl.int64)[None, :] * initial_v
        s = tl.load(initial + place, mask=inside, other=0.0).to(tl.float32)

    begin, end = tl.load(cu + row), tl.load(cu + row + 1)
    number = tl.load(tile_first + row)
    tiles = tl.cast(tl.load(tile_first + row + 1) - number, tl.int32)
    i = tl.arange(0, SIZE)
    k += head // group * k_head + tl.cast(d, tl.int64)[None, :] * k_channel
    if states is None:
        q += head // group * q_head + tl.cast(d, tl.int64)[None, :] * q_channel
    if also is not None:
        v += head * v_head + tl.cast(e, tl.int64)[None, :] * v_channel
    for step in range(tiles):
        token = begin + tl.cast(step, tl.int64) * SIZE + i
        live = token < end
        keys = live[:, None] & (d[None, :] < DK)
        values = live[:, None] & (e[None, :] < DV)
        own = (token * h + head)[:, None]
        if states is not None:
            entering = states + ((number + step) * h + head) * (DK * DV) + at
            tl.store(entering, s.to(states.dtype.element_ty), mask=inside)
        read = tl.load(w + own * DK + d[None, :], mask=keys, other=0.0)
        new = tl.load(u + own * DV + e[None, :], mask=values, other=0.0).to(tl.float32)
        nothing = tl.zeros((SIZE, BV), dtype=tl.float32)
        new -= _of(read, s, nothing, PRECISION)
        key = tl.load(k + token[:, None] * k_token, mask=keys, other=0.0).to(kind)
        if states is not None:
            tl.store(u + own * DV + e[None, :], new.to(u.dtype.element_ty), mask=values)
        else:
            query = tl.load(q + token[:, None] * q_token, mask=keys, other=0.0).to(kind)
            out = _of(query, s, nothing, PRECISION)
            if since is not None:
                out *= tl.load(since + token * h + head, mask=live, other=0.0)[:, None]
            if local is not None:
                out += tl.load(local + own * DV + e[None, :], mask=values, other=0.0).to(tl.float32)
            pairs = tl.load(reads + own * SIZE + i[None, :], mask=live[:, None], other=0.0)
            out = _of(pairs, new, out, PRECISION) * scale
            tl.store(o + own * DV + e[None, :], out.to(kind), mask=values)
        if whole is not None:
            s *= tl.load(whole + ((number + step) * h + head) * DK + d, mask=d < DK, other=1.0)[:, None]
        if since is not None:
            last = tl.minimum(begin + tl.cast(step + 1, tl.int64) * SIZE, end) - 1
            s *= tl.load(since + last * h + head)
            new *= tl.load(until + token * h + head, mask=live, other=0.0)[:, None]
        s = _of(tl.trans(key), new, s, PRECISION)
        if also is not None:
            second = tl.load(also + own * DK + d[None, :], mask=keys, other=0.0)
            value = tl.load(v + token[:, None] * v_token, mask=values, other=0.0)
            s = tl.dot(tl.trans(second), value, acc=s, input_precision=PRECISION)
    held = final + tl.cast(unit, tl.int64) * (DK * DV) + at
    tl.store(held, s, mask=inside)


@triton.jit
def delta_outputs(
    q,
    u,
    reads,
    local,
    since,
    states,
    o,
    cu,
    tile_row,
    tile_start,
    q_token,
    q_head,
    q_channel,
    h,
    group,
    scale,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a tile, head and block of BV value channels, from the states (tiles, h, dk, dv) that
    entered and the writes u (n, h, dv) that `delta_walk` left; o (n, h, dv). BK is a block of keys."""
    tile, head, block = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64), tl.program_id(2)
    kind = reads.dtype.element_ty
    start, end = tl.load(tile_start + tile), tl.load(cu + tl.load(tile_row + tile) + 1)
    i = tl.arange(0, SIZE)
    e = block * BV + tl.arange(0, BV)[None, :]
    token = start + i
    live = token < end
    own = (token * h + head)[:, None]
    states += (tl.cast(tile, tl.int64) * h + head) * (DK * DV) + e
    q += token[:, None] * q_token + head // group * q_head
    out = tl.zeros((SIZE, BV), dtype=tl.float32)
    for first in range(0, DK, BK):
        d = first + tl.arange(0, BK)
        far = tl.cast(d, tl.int64)[None, :] * q_channel
        query = tl.load(q + far, mask=live[:, None] & (d[None, :] < DK), other=0.0).to(kind)
        s = tl.load(states + d[:, None] * DV, mask=(d[:, None] < DK) & (e < DV), other=0.0)
        out = _of(query, s, out, PRECISION)
    values = live[:, None] & (e < DV)
    if since is not None:
        out *= tl.load(since + token * h + head, mask=live, other=0.0)[:, None]
    if local is not None:
        out += tl.load(local + own * DV + e, mask=values, other=0.0).to(tl.float32)
    pairs = tl.load(reads + own * SIZE + i[None, :], mask=live[:, None], other=0.0)
    new = tl.load(u + own * DV + e, mask=values, other=0.0)
    out = _of(pairs, new, out, PRECISION) * scale
    tl.store(o + own * DV + e, out.to(kind), mask=values)


def walk(
    x: Prepared, initial: Tensor | None, cut: Cut, scale: float, by: Sizes, *, apart: bool
) -> tuple[Tensor, Tensor]:
    """o (n, h, dv) in the tiles' dtype, final (rows, h, dk, dv) float32, in one pass or in two (`apart`)."""
    (n, h, dv), dk, tiles, rows = x.u.shape, x.k.shape[2], cut.row.shape[0], cut.cu.shape[0] - 1
    o = x.reads.new_empty(n, h, dv)
    final = x.u.new_empty(rows, h, dk, dv, dtype=torch.float32)
    states = x.u.new_empty(tiles, h, dk, dv) if apart else None
    blocks = -(-dv // by.walked)
    common = {"q": x.q, "u": x.u, "reads": x.reads, "local": x.local, "since": x.since, "o": o}
    common |= {"states": states, "cu": cut.cu, "h": h, "group": h // x.k.shape[1], "scale": scale}
    common |= {"DK": dk, "DV": dv, "SIZE": by.size, "PRECISION": precision(x.reads.dtype), "BV": by.walked}
    places = (0,) * 4 if initial is None else initial.stride()
    launch(
        delta_walk,
        (rows * h * blocks,),
        x.u,
        warps=by.walk_warps,
        **common,
        k=x.k,
        v=x.v,
        also=x.also,
        w=x.w,
        until=x.until,
        whole=x.whole,
        initial=initial,
        final=final,
        tile_first=cut.first,
        **strides(q=x.q, k=x.k, v=x.v),
        **dict(zip(("initial_row", "initial_head", "initial_k", "initial_v"), places, strict=True)),
        BK=power(dk),
    )
    if apart:
        launch(
            delta_outputs,
            (tiles, h, blocks),
            x.u,
            warps=by.walk_warps,
            **common,
            tile_row=cut.row,
            tile_start=cut.start,
            **strides(q=x.q),
            BK=min(power(dk), 64),
        )
    return o, final


def walks_apart(rows: int, h: int, dv: int, most: int, by: Sizes, device: torch.device) -> bool:
    """Whether the outputs are to be made apart: the chains, of `most` tiles, would not fill the device."""
    return most > 2 and rows * h * -(-dv // by.walked) < multiprocessors(device)

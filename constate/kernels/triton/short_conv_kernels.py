"""The kernels of the causal depthwise convolution: a tile of a row's tokens with new histories, one token.

o_t = act(bias + sum_j w_j x_{t-w+1+j}). A program takes some tokens of one row and some channels, and reads
each tap where it lies: in x, or before the row's first token in its history; the last programs leave the new
histories. Knows strides; how spans are cut into tiles is short_conv.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import silu


@triton.jit
def short_conv_tiles(
    x,
    weight,
    bias,
    history,
    o,
    final,
    offsets,
    tile_row,
    tile_start,
    tiles,
    channels,
    x_token,
    x_channel,
    weight_channel,
    weight_tap,
    history_row,
    history_tap,
    history_channel,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Programs (tiles + rows, blocks of channels): one for each tile, then one for each row's history."""
    number = tl.program_id(0)
    c = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < channels
    if number < tiles:
        row = tl.load(tile_row + number)
        t = tl.load(tile_start + number) + tl.arange(0, TOKENS)
        begin = tl.load(offsets + row)
        held = (t < tl.load(offsets + row + 1))[:, None] & real[None, :]
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        if bias is not None:
            total += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)[None, :]
        for j in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]  # the compiler's own loop
            source = t - (WIDTH - 1) + j
            own = source >= begin
            place = source[:, None] * x_token + c[None, :] * x_channel
            tap = tl.load(x + place, mask=held & own[:, None], other=0.0).to(tl.float32)
            if j < WIDTH - 1:
                past = (source - begin + WIDTH - 1)[:, None] * history_tap + c[None, :] * history_channel
                kept = held & (source < begin)[:, None]
                tap += tl.load(history + row * history_row + past, mask=kept, other=0.0).to(tl.float32)
            w = tl.load(weight + c * weight_channel + j * weight_tap, mask=real, other=0.0)
            total += w.to(tl.float32)[None, :] * tap
        if SILU:
            total = silu(total)
        place = t[:, None] * channels + c[None, :]
        tl.store(o + place, total.to(o.dtype.element_ty), mask=held)
    else:
        # Other names than above: what both branches name has to be of one type.
        mine = tl.cast(number - tiles, tl.int64)
        first = tl.load(offsets + mine)
        end = tl.load(offsets + mine + 1)
        for i in tl.static_range(WIDTH - 1):  # pyright: ignore[reportGeneralTypeIssues]  # as above
            at = end - (WIDTH - 1) + i + 0 * c  # a block: 3.9.0's interpreter spreads no single truth
            new = real & (at >= first)
            value = tl.load(x + at * x_token + c * x_channel, mask=new, other=0.0)
            older = history + mine * history_row + (at - first + WIDTH - 1) * history_tap
            old = tl.load(older + c * history_channel, mask=real & (at < first), other=0.0)
            value = tl.where(new, value.to(final.dtype.element_ty), old.to(final.dtype.element_ty))
            tl.store(final + (mine * (WIDTH - 1) + i) * channels + c, value, mask=real)


@triton.jit
def short_conv_one(
    x,
    weight,
    bias,
    history,
    o,
    channels,
    x_row,
    x_channel,
    weight_channel,
    weight_tap,
    history_row,
    history_tap,
    history_channel,
    o_row,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Programs (rows, blocks of channels): one token a row, the history shifted in place."""
    row = tl.cast(tl.program_id(0), tl.int64)
    c = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < channels
    total = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    held = history + row * history_row + c * history_channel
    taps = weight + c * weight_channel
    for j in tl.static_range(WIDTH - 1):
        past = tl.load(held + j * history_tap, mask=real, other=0.0)
        total += tl.load(taps + j * weight_tap, mask=real, other=0.0).to(tl.float32) * past.to(tl.float32)
        if j > 0:  # its thread has read that place already
            tl.store(held + (j - 1) * history_tap, past, mask=real)
    now = tl.load(x + row * x_row + c * x_channel, mask=real, other=0.0)
    w = tl.load(taps + (WIDTH - 1) * weight_tap, mask=real, other=0.0)
    total += w.to(tl.float32) * now.to(tl.float32)
    if WIDTH > 1:
        tl.store(held + (WIDTH - 2) * history_tap, now.to(history.dtype.element_ty), mask=real)
    if SILU:
        total = silu(total)
    tl.store(o + row * o_row + c, total.to(o.dtype.element_ty), mask=real)

"""The kernels of the selective scan (Mamba-1): the walk along a row, the chain through its pieces, one token.

delta = softplus(dt + dt_bias), h = exp(delta a) h + delta b x, o = (h c + d x) silu(z). Every channel of
every state place decays alone, so that there is no matrix product in it: a program carries the states of some
channels in registers and combines a tile of tokens by an associative scan, whose axis and the sum over states
stay within a thread. Knows strides; whether rows are cut in pieces is selective.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import compose, silu, softplus


@triton.jit
def selective_walk(
    x,
    dt,
    a,
    b,
    c,
    initial,
    d,
    z,
    dt_bias,
    o,
    final,
    totals,
    offsets,
    piece_row,
    piece_start,
    piece,
    channels,
    states,
    x_token,
    x_channel,
    dt_token,
    dt_channel,
    a_channel,
    a_state,
    b_token,
    b_state,
    c_token,
    c_state,
    z_token,
    z_channel,
    initial_row,
    initial_channel,
    initial_state,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Programs (rows, or pieces of `piece` tokens where piece_row is given; blocks of channels).

    Without `o` only the end state is wanted, from a zero one where `initial` is None; `totals` then takes the
    sum of a piece's steps delta. `initial` and `final` are by row or, over pieces, by piece.
    """
    number = tl.cast(tl.program_id(0), tl.int64)
    k = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    s = tl.arange(0, STATES)
    real = k < channels
    kept = s < states
    both = kept[:, None] & real[None, :]  # states first: a thread then holds a channel's, and sums them
    if piece_row is not None:
        begin = tl.load(piece_start + number)
        end = tl.minimum(begin + piece, tl.load(offsets + tl.load(piece_row + number) + 1))
    else:
        begin = tl.load(offsets + number)
        end = tl.load(offsets + number + 1)
    h = tl.zeros((STATES, CHANNELS), tl.float32)
    if initial is not None:
        place = k[None, :] * initial_channel + s[:, None] * initial_state
        h = tl.load(initial + number * initial_row + place, mask=both, other=0.0)
    rate = tl.load(a + k[None, :] * a_channel + s[:, None] * a_state, mask=both, other=0.0).to(tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    for start in tl.range(begin, end, TOKENS, num_stages=2):
        t = tl.cast(start, tl.int64) + tl.arange(0, TOKENS)
        inside = t < end
        held = inside[:, None] & real[None, :]
        seen = inside[:, None] & kept[None, :]
        fed = tl.load(x + t[:, None] * x_token + k[None, :] * x_channel, mask=held, other=0.0).to(tl.float32)
        step = tl.load(dt + t[:, None] * dt_token + k[None, :] * dt_channel, mask=held, other=0.0)
        write = tl.load(b + t[:, None] * b_token + s[None, :] * b_state, mask=seen, other=0.0).to(tl.float32)
        delta = step.to(tl.float32)
        if dt_bias is not None:
            delta += tl.load(dt_bias + k, mask=real, other=0.0).to(tl.float32)[None, :]
        delta = tl.where(held, softplus(delta), 0.0)  # behind the end a decay of 1 and nothing added
        decay = tl.exp(delta[:, None, :] * rate[None, :, :])
        added = (delta * fed)[:, None, :] * write[:, :, None]
        decay, added = tl.associative_scan((decay, added), 0, compose)
        hs = decay * h[None, :, :] + added
        last = tl.arange(0, TOKENS) == TOKENS - 1
        h = tl.sum(tl.where(last[:, None, None], hs, 0.0), 0)
        if totals is not None:
            total += tl.sum(delta, 0)
        if o is not None:
            read = tl.load(c + t[:, None] * c_token + s[None, :] * c_state, mask=seen, other=0.0)
            y = tl.sum(hs * read.to(tl.float32)[:, :, None], 1)
            if d is not None:
                y += tl.load(d + k, mask=real, other=0.0).to(tl.float32)[None, :] * fed
            if z is not None:
                gate = tl.load(z + t[:, None] * z_token + k[None, :] * z_channel, mask=held, other=0.0)
                y *= silu(gate.to(tl.float32))
            tl.store(o + t[:, None] * channels + k[None, :], y.to(o.dtype.element_ty), mask=held)
    if totals is not None:
        tl.store(totals + number * channels + k, total, mask=real)
    if final is not None:
        place = (number * channels + k)[None, :] * states + s[:, None]
        tl.store(final + place, h, mask=both)


@triton.jit
def selective_chain(
    a,
    initial,
    ends,
    totals,
    firsts,
    final,
    first,
    channels,
    states,
    a_channel,
    a_state,
    initial_row,
    initial_channel,
    initial_state,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Programs (rows, blocks of channels): the state that enters each piece of a row, and its last one."""
    row = tl.cast(tl.program_id(0), tl.int64)
    k = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    s = tl.arange(0, STATES)
    real = k < channels
    both = real[:, None] & (s < states)[None, :]
    place = k[:, None] * initial_channel + s[None, :] * initial_state
    h = tl.load(initial + row * initial_row + place, mask=both, other=0.0)
    rate = tl.load(a + k[:, None] * a_channel + s[None, :] * a_state, mask=both, other=0.0).to(tl.float32)
    inner = k[:, None] * states + s[None, :]
    for i in range(tl.load(first + row), tl.load(first + row + 1)):
        number = tl.cast(i, tl.int64)
        place = number * channels * states + inner
        tl.store(firsts + place, h, mask=both)
        total = tl.load(totals + number * channels + k, mask=real, other=0.0)
        h = tl.exp(total[:, None] * rate) * h + tl.load(ends + place, mask=both, other=0.0)
    tl.store(final + row * channels * states + inner, h, mask=both)


@triton.jit
def selective_one(
    x,
    dt,
    a,
    b,
    c,
    state,
    d,
    z,
    dt_bias,
    o,
    channels,
    states,
    x_row,
    x_channel,
    dt_row,
    dt_channel,
    a_channel,
    a_state,
    b_row,
    b_state,
    c_row,
    c_state,
    z_row,
    z_channel,
    state_row,
    state_channel,
    state_state,
    o_row,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Programs (rows, blocks of channels): one token a row, the state updated in place."""
    row = tl.cast(tl.program_id(0), tl.int64)
    k = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    s = tl.arange(0, STATES)
    real = k < channels
    kept = s < states
    both = real[:, None] & kept[None, :]
    place = state + row * state_row + k[:, None] * state_channel + s[None, :] * state_state
    h = tl.load(place, mask=both, other=0.0)
    rate = tl.load(a + k[:, None] * a_channel + s[None, :] * a_state, mask=both, other=0.0).to(tl.float32)
    fed = tl.load(x + row * x_row + k * x_channel, mask=real, other=0.0).to(tl.float32)
    delta = tl.load(dt + row * dt_row + k * dt_channel, mask=real, other=0.0).to(tl.float32)
    if dt_bias is not None:
        delta += tl.load(dt_bias + k, mask=real, other=0.0).to(tl.float32)
    delta = softplus(delta)
    write = tl.load(b + row * b_row + s * b_state, mask=kept, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_row + s * c_state, mask=kept, other=0.0).to(tl.float32)
    h = tl.exp(delta[:, None] * rate) * h + (delta * fed)[:, None] * write[None, :]
    if CHANNELS * STATES < 256:  # a place is then held by several threads: all have read it
        tl.debug_barrier()
    tl.store(place, h, mask=both)
    y = tl.sum(h * read[None, :], 1)
    if d is not None:
        y += tl.load(d + k, mask=real, other=0.0).to(tl.float32) * fed
    if z is not None:
        y *= silu(tl.load(z + row * z_row + k * z_channel, mask=real, other=0.0).to(tl.float32))
    tl.store(o + row * o_row + k, y.to(o.dtype.element_ty), mask=real)

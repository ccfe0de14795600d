"""The kernels of the elementwise linear recurrence, h_t = exp(log_a_t) h_{t-1} + x_t: the walk along a row,
the chain through its pieces, one token.

A program carries some channels through a row, a tile of tokens at a time; each thread scans its own channels.
Knows strides; whether rows are cut in pieces is linear_recurrence.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import compose


@triton.jit
def recurrence_walk(
    x,
    log_a,
    initial,
    o,
    final,
    totals,
    offsets,
    piece_row,
    piece_start,
    piece,
    channels,
    x_token,
    x_channel,
    decay_token,
    decay_channel,
    initial_row,
    initial_channel,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Programs (rows, or pieces of `piece` tokens where piece_row is given; blocks of channels).

    Without `o` only the end state is wanted, from a zero one where `initial` is None; `totals` then takes the
    sum of a piece's log-decays. `initial` and `final` are by row or, over pieces, by piece.
    """
    number = tl.cast(tl.program_id(0), tl.int64)
    k = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    real = k < channels
    if piece_row is not None:
        begin = tl.load(piece_start + number)
        end = tl.minimum(begin + piece, tl.load(offsets + tl.load(piece_row + number) + 1))
    else:
        begin = tl.load(offsets + number)
        end = tl.load(offsets + number + 1)
    h = tl.zeros((CHANNELS,), tl.float32)
    if initial is not None:
        h = tl.load(initial + number * initial_row + k * initial_channel, mask=real, other=0.0)
    total = tl.zeros((CHANNELS,), tl.float32)
    last = tl.arange(0, TOKENS) == TOKENS - 1
    for start in tl.range(begin, end, TOKENS, num_stages=3):
        t = tl.cast(start, tl.int64) + tl.arange(0, TOKENS)
        held = (t < end)[:, None] & real[None, :]  # behind the end a decay of 1 and nothing added
        fed = tl.load(x + t[:, None] * x_token + k[None, :] * x_channel, mask=held, other=0.0)
        place = t[:, None] * decay_token + k[None, :] * decay_channel
        decay = tl.load(log_a + place, mask=held, other=0.0).to(tl.float32)
        if totals is not None:
            total += tl.sum(decay, 0)
        kept, hs = tl.associative_scan((tl.exp(decay), fed.to(tl.float32)), 0, compose)
        hs = kept * h[None, :] + hs
        h = tl.sum(tl.where(last[:, None], hs, 0.0), 0)
        if o is not None:
            tl.store(o + t[:, None] * channels + k[None, :], hs.to(o.dtype.element_ty), mask=held)
    if totals is not None:
        tl.store(totals + number * channels + k, total, mask=real)
    if final is not None:
        tl.store(final + number * channels + k, h, mask=real)


@triton.jit
def recurrence_chain(
    initial,
    ends,
    totals,
    firsts,
    final,
    first,
    channels,
    initial_row,
    initial_channel,
    CHANNELS: tl.constexpr,
):
    """Programs (rows, blocks of channels): the state that enters each piece of a row, and its last one."""
    row = tl.cast(tl.program_id(0), tl.int64)
    k = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    real = k < channels
    h = tl.load(initial + row * initial_row + k * initial_channel, mask=real, other=0.0)
    for i in range(tl.load(first + row), tl.load(first + row + 1)):
        place = tl.cast(i, tl.int64) * channels + k
        tl.store(firsts + place, h, mask=real)
        decay = tl.exp(tl.load(totals + place, mask=real, other=0.0))
        h = decay * h + tl.load(ends + place, mask=real, other=0.0)
    tl.store(final + row * channels + k, h, mask=real)


@triton.jit
def recurrence_one(
    x,
    log_a,
    state,
    o,
    channels,
    x_row,
    x_channel,
    decay_row,
    decay_channel,
    state_row,
    state_channel,
    o_row,
    CHANNELS: tl.constexpr,
):
    """Programs (rows, blocks of channels): one token a row, the state updated in place."""
    row = tl.cast(tl.program_id(0), tl.int64)
    k = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    real = k < channels
    place = state + row * state_row + k * state_channel
    decay = tl.load(log_a + row * decay_row + k * decay_channel, mask=real, other=0.0)
    fed = tl.load(x + row * x_row + k * x_channel, mask=real, other=0.0)
    h = tl.exp(decay.to(tl.float32)) * tl.load(place, mask=real, other=0.0) + fed.to(tl.float32)
    tl.store(place, h, mask=real)
    tl.store(o + row * o_row + k, h.to(o.dtype.element_ty), mask=real)

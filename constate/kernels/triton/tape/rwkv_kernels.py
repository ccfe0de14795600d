"""What RWKV-7 makes of a token before its products, and of them before its scan, as kernels. See
native/rwkv7.c and linear_attn/rwkv7.py for the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..maths import sigmoid

CHANNELS = 256
"""Channels that a program mixes."""


@triton.jit
def mixtures(
    x,
    before,
    mix,
    o,
    width,
    x_row,
    before_row,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Programs (blocks of channels, rows): o[i] = x + (before - x) mix[i], mix (COUNT, width), each o[i]
    (rows, width); `before` (rows, width) is then x."""
    row = tl.cast(tl.program_id(1), tl.int64)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < width
    now = tl.load(x + row * x_row + c, mask=inside, other=0.0).to(tl.float32)
    held = before + row * before_row + c
    apart = tl.load(held, mask=inside, other=0.0).to(tl.float32) - now
    for i in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]  # the compiler's own loop
        mixed = now + apart * tl.load(mix + i * width + c, mask=inside, other=0.0)
        tl.store(o[i] + row * width + c, mixed.to(o[i].dtype.element_ty), mask=inside)
    tl.store(held, now.to(before.dtype.element_ty), mask=inside)


@triton.jit
def delta_operands(
    decay,
    rate,
    k,
    v,
    reads,
    share,
    first,
    kappa_scale,
    rate_share,
    key_row,
    value_row,
    strongest,
    eps,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Programs (heads, rows). In place: `decay` and `rate` become the log-decay and what removal writes, k
    the key, v its mixture with the first layer's by sigmoid(share), where there is one; `reads` is -kappa."""
    head = tl.program_id(0)
    row = tl.cast(tl.program_id(1), tl.int64)
    i = tl.arange(0, BK)
    inside = i < DK
    own = head * DK + i
    at = row * key_row + own
    key = tl.load(k + at, mask=inside, other=0.0)
    kappa = key * tl.load(kappa_scale + own, mask=inside, other=0.0)
    kappa *= 1.0 / tl.sqrt(tl.sum(kappa * kappa, 0) + eps)
    given = sigmoid(tl.load(rate + at, mask=inside, other=0.0))
    tl.store(decay + at, strongest * sigmoid(tl.load(decay + at, mask=inside, other=0.0)), mask=inside)
    tl.store(reads + at, -kappa, mask=inside)
    tl.store(rate + at, kappa * given, mask=inside)
    kept = 1.0 + (given - 1.0) * tl.load(rate_share + own, mask=inside, other=0.0)
    tl.store(k + at, key * kept, mask=inside)
    if share is not None:
        j = tl.arange(0, BV)
        at = row * value_row + head * DV + j
        value = tl.load(v + at, mask=j < DV, other=0.0)
        other = tl.load(first + at, mask=j < DV, other=0.0)
        by = sigmoid(tl.load(share + at, mask=j < DV, other=0.0))
        tl.store(v + at, value + by * (other - value), mask=j < DV)

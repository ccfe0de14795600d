"""One token a row through the gated linear recurrence: the state is read once and written once, in place.

A program holds all keys of a head against a block of its values. What a family does right before the step
or behind it can be done on the way, so that a decode step needs no launch for it: values scaled by a step
size, a share of the value added to the output, and what job.py calls leaving. Knows nothing of tapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .job import leave
from .launch import launch, power, strides

LARGEST = 16384
"""Numbers of a state that a program of eight warps holds."""


def step_block(dk: int, dv: int) -> tuple[int, int]:
    """How many value channels a program takes, and its warps: a whole head where its registers hold one."""
    bv = max(16, min(power(dv), LARGEST // power(dk)))
    return bv, 8 if power(dk) * bv > LARGEST // 2 else 4


@triton.jit
def linear_step(
    q,
    k,
    v,
    log_decay,
    state,
    o,
    v_scale,
    skip,
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
    state_row,
    state_head,
    state_key,
    state_value,
    o_row,
    v_scale_row,
    scale,
    h,
    group,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    P,
    LEAVING: tl.constexpr,
):
    """Programs (rows * h * blocks of BV channels,): state (rows, h, dk, dv) float32, o (rows, h, dv) with
    `o_row` numbers from row to row. DECAY: 0 none, 1 log_decay (rows, h), 2 (rows, h, dk).

    v_scale (rows, h) multiplies v first; skip (h,) adds that much of the unscaled v to the output; each may
    be None. LEAVING and its pointers P: what a decode step does with o before the next product, see job.py.
    """
    number = tl.program_id(0)
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    head = tl.cast(number // BLOCKS % h, tl.int64)
    row = tl.cast(number // BLOCKS // h, tl.int64)
    shared = head // group
    key, value = tl.arange(0, BK), number % BLOCKS * BV + tl.arange(0, BV)
    in_key, in_value = key < DK, value < DV
    real = in_key[:, None] & in_value[None, :]
    far_key, far_value = tl.cast(key, tl.int64), tl.cast(value, tl.int64)
    at = state + row * state_row + head * state_head
    at += far_key[:, None] * state_key + far_value[None, :] * state_value
    s = tl.load(at, mask=real, other=0.0)
    query = tl.load(q + row * q_token + shared * q_head + far_key * q_channel, mask=in_key, other=0.0)
    given = tl.load(k + row * k_token + shared * k_head + far_key * k_channel, mask=in_key, other=0.0)
    fed = tl.load(v + row * v_token + head * v_head + far_value * v_channel, mask=in_value, other=0.0)
    fed = fed.to(tl.float32)
    written = fed
    if DECAY == 1:
        g = tl.load(log_decay + row * decay_token + head * decay_head).to(tl.float32)
        s *= tl.exp(g)
    if DECAY == 2:
        g = log_decay + row * decay_token + head * decay_head + far_key * decay_channel
        s *= tl.exp(tl.load(g, mask=in_key, other=0.0).to(tl.float32))[:, None]
    if v_scale is not None:
        written *= tl.load(v_scale + row * v_scale_row + head).to(tl.float32)
    s += given.to(tl.float32)[:, None] * written[None, :]
    tl.store(at, s, mask=real)
    y = scale * tl.sum(s * query.to(tl.float32)[:, None], axis=0)
    if skip is not None:
        y += fed * tl.load(skip + head).to(tl.float32)
    tl.store(o + row * o_row + head * DV + value, y.to(o.dtype.element_ty), mask=in_value)
    if LEAVING is not None:
        leave(P, LEAVING, row, tl.cast(head, tl.int32), BLOCKS)


STATE_AXES = ("state_row", "state_head", "state_key", "state_value")


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    o: Tensor,
    scale: float,
    *,
    v_scale: Tensor | None = None,
    skip: Tensor | None = None,
    P: Any = None,
    LEAVING: Any = None,
) -> Callable[[], None]:
    """The launch of a step to o (rows, h, dv), its heads side by side, made ready; for the options see
    linear_step."""
    (rows, h, dv), (hk, dk) = v.shape, k.shape[1:]
    bv, warps = step_block(dk, dv)
    return partial(
        launch,
        linear_step,
        (rows * h * -(-dv // bv),),
        v,
        warps=warps,
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        state=state,
        o=o,
        v_scale=v_scale,
        skip=skip,
        **strides(q=q, k=k, v=v, decay=log_decay),
        **dict(zip(STATE_AXES, state.stride(), strict=True)),
        o_row=o.stride(0),
        v_scale_row=0 if v_scale is None else v_scale.stride(0),
        scale=scale,
        h=h,
        group=h // hk,
        DK=dk,
        DV=dv,
        BK=power(dk),
        BV=bv,
        DECAY=0 if log_decay is None else log_decay.ndim - 1,
        P=P,
        LEAVING=LEAVING,
    )

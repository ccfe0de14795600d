"""One token a row through a delta rule: the state is read once and written once, in place.

The gated delta rule decays, erases and writes at its key; with `a` and `b` it is the diagonal plus low rank
rule (RWKV-7), which reads at a before the decay, and writes that at b. A program holds all keys of a head
against a block of its values. Knows nothing of tapes, but for how their leaving is put behind a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .gated_linear_step import STATE_AXES
from .job import leave
from .launch import launch, power, strides

NUMBERS = 4096
"""Numbers of a state that a program holds: few enough that several programs share a multiprocessor, and some
load while others store."""


@triton.jit
def delta_step(
    q,
    k,
    v,
    log_decay,
    beta,
    a,
    b,
    state,
    o,
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
    state_row,
    state_head,
    state_key,
    state_value,
    o_row,
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
    `o_row` numbers from row to row. DECAY: 0 none, 1 log_decay (rows, h), 2 (rows, h, dk). Either beta
    (rows, h) is given or a and b (rows, h, dk). LEAVING and its pointers P say what a decode step does with o
    before the next product, see job.py.
    """
    number = tl.program_id(0)
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    head = tl.cast(number // BLOCKS % h, tl.int64)
    row = tl.cast(number // BLOCKS // h, tl.int64)
    key, value = tl.arange(0, BK), number % BLOCKS * BV + tl.arange(0, BV)
    in_key, in_value = key < DK, value < DV
    real = in_key[:, None] & in_value[None, :]
    far_key, far_value = tl.cast(key, tl.int64), tl.cast(value, tl.int64)
    at = state + row * state_row + head * state_head
    at += far_key[:, None] * state_key + far_value[None, :] * state_value
    s = tl.load(at, mask=real, other=0.0)
    query = q + row * q_token + head // group * q_head + far_key * q_channel
    query = tl.load(query, mask=in_key, other=0.0).to(tl.float32)
    writes = k + row * k_token + head // group * k_head + far_key * k_channel
    writes = tl.load(writes, mask=in_key, other=0.0).to(tl.float32)
    fed = v + row * v_token + head * v_head + far_value * v_channel
    fed = tl.load(fed, mask=in_value, other=0.0).to(tl.float32)
    decay = 1.0
    if DECAY == 1:
        decay = tl.exp(tl.load(log_decay + row * decay_token + head * decay_head).to(tl.float32))
    if DECAY == 2:
        g = log_decay + row * decay_token + head * decay_head + far_key * decay_channel
        decay = tl.exp(tl.load(g, mask=in_key, other=0.0).to(tl.float32))[:, None]
    if a is not None:
        reads = a + row * a_token + head * a_head + far_key * a_channel
        reads = tl.load(reads, mask=in_key, other=0.0).to(tl.float32)
        places = b + row * b_token + head * b_head + far_key * b_channel
        places = tl.load(places, mask=in_key, other=0.0).to(tl.float32)
        seen = tl.sum(s * reads[:, None], axis=0)
        s = s * decay + places[:, None] * seen[None, :]
    else:
        rate = tl.load(beta + row * beta_token + head * beta_head).to(tl.float32)
        s *= decay
        fed = rate * (fed - tl.sum(s * writes[:, None], axis=0))
    s += writes[:, None] * fed[None, :]
    tl.store(at, s, mask=real)
    y = scale * tl.sum(s * query[:, None], axis=0)
    tl.store(o + row * o_row + head * DV + value, y.to(o.dtype.element_ty), mask=in_value)
    if LEAVING is not None:
        leave(P, LEAVING, row, tl.cast(head, tl.int32), BLOCKS)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    o: Tensor,
    scale: float,
    *,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    P: Any = None,
    LEAVING: Any = None,
) -> Callable[[], None]:
    """The launch of a step to o (rows, h, dv), its heads side by side, made ready; for the options see
    delta_step."""
    (rows, h, dv), (hk, dk) = v.shape, k.shape[1:]
    bv = min(power(dv), max(16, NUMBERS // power(dk)))
    return partial(
        launch,
        delta_step,
        (rows * h * -(-dv // bv),),
        v,
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        a=a,
        b=b,
        state=state,
        o=o,
        **strides(q=q, k=k, v=v, decay=log_decay, beta=beta, a=a, b=b),
        **dict(zip(STATE_AXES, state.stride(), strict=True)),
        o_row=o.stride(0),
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

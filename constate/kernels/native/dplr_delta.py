"""The diagonal plus low rank delta rule in C: see dplr_delta.c for the walk, reference for the op.

Knows the record of its kernel. What autograd asks for goes to the chunked form.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import dplr_delta as chunked
from .call import fields, in_place, packed, run
from .heads import elsewhere, operands, states


class DplrDelta(ctypes.Structure):
    _fields_ = fields(
        "q k v log_decay a b state o offsets",
        "rows hk h dk dv q_stride k_stride v_stride decay_stride a_stride b_stride o_stride decay_kind",
        "scale",
    )


def dplr_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Reads with a what the state holds, decays it, writes that at b and v at k.

    q, k (n, hk, dk); v (n, h, dv); a, b (n, h, dk); log_decay (n, h, dk), natural log, <= 0, or (n, h), or
    None (no decay); initial (rows, h, dk, dv) or None (zeros). Value head j reads key head j // (h // hk).
    Any float dtype; computed in float32. Returns o (n, h, dv) in v's dtype and final (rows, h, dk, dv)
    float32; an empty span hands its initial row on. Raises ValueError for shapes and, `checked`, for a
    positive log_decay.
    """
    if elsewhere(q, k, v, log_decay, a, b, initial):
        return chunked.dplr_delta_scan(q, k, v, log_decay, a, b, initial, spans, scale=scale, checked=checked)
    _, h = shapes.heads(q, k, v)
    n, dk = v.shape[0], q.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, a=a, b=b)
    shapes.log_decay(log_decay, n, h, dk, checked=checked)
    shapes.exactly("a", a, n, h, dk)
    shapes.exactly("b", b, n, h, dk)
    final = states(q, v, initial, spans)
    return _run(q, k, v, log_decay, a, b, final, spans.cu, scale), final


def dplr_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token a row: q, k (rows, hk, dk); v (rows, h, dv); a, b (rows, h, dk); log_decay as in the scan.

    Updates `state` (rows, h, dk, dv) float32 in place, strided or not; returns o (rows, h, dv) in v's dtype.
    """
    if elsewhere(q, k, v, log_decay, a, b, state):
        return chunked.dplr_delta_step(q, k, v, log_decay, a, b, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    rows, dk = q.shape[0], q.shape[2]
    shapes.log_decay(log_decay, rows, h, dk)
    shapes.exactly("a", a, rows, h, dk)
    shapes.exactly("b", b, rows, h, dk)
    shapes.step_state(state, (rows, h, dk, v.shape[2]))
    with in_place(state) as held:
        return _run(q, k, v, log_decay, a, b, held, torch.arange(rows + 1), scale)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    offsets: Tensor,
    scale: float,
) -> Tensor:
    given, read, write = operands(q, k, v, g, state, offsets, scale), packed(a), packed(b)
    strides = {"a_stride": read.stride(0), "b_stride": write.stride(0)}
    run("dplr_delta", DplrDelta, a=read, b=write, **strides, **given)
    return given["o"].to(v.dtype)

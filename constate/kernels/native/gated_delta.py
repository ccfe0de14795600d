"""The gated delta scan in C: see gated_delta.c for the walk, reference for the op.

Knows the record of its kernel. What autograd asks for goes to the chunked form.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import gated_delta as chunked
from .call import fields, in_place, packed, run
from .heads import elsewhere, operands, states


class GatedDelta(ctypes.Structure):
    _fields_ = fields(
        "q k v log_decay beta state o offsets",
        "rows hk h dk dv q_stride k_stride v_stride decay_stride beta_stride o_stride decay_kind",
        "scale",
    )


def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decays, erases what k holds, then writes v there.

    q, k (n, hk, dk); v (n, h, dv); log_decay (n, h), or (n, h, dk) on the key axis, natural log, <= 0, or
    None (DeltaNet); beta (n, h); initial (rows, h, dk, dv) or None (zeros). Value head j reads key head
    j // (h // hk). Any float dtype; computed in float32. Returns o (n, h, dv) in v's dtype and final
    (rows, h, dk, dv) float32; an empty span hands its initial row on. Raises ValueError for shapes and, where
    `checked`, for a positive log_decay.
    """
    if elsewhere(q, k, v, log_decay, beta, initial):
        return chunked.gated_delta_scan(
            q, k, v, log_decay, beta, initial, spans, scale=scale, checked=checked
        )
    _, h = shapes.heads(q, k, v)
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    shapes.exactly("beta", beta, v.shape[0], h)
    shapes.log_decay(log_decay, v.shape[0], h, q.shape[2], checked=checked)
    final = states(q, v, initial, spans)
    return _run(q, k, v, log_decay, beta, final, spans.cu, scale), final


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token a row: q, k (b, hk, dk); v (b, h, dv); log_decay (b, h) or (b, h, dk) or None; beta (b, h).

    Updates `state` (b, h, dk, dv) float32 in place, strided or not, and returns o (b, h, dv) in v's dtype.
    """
    if elsewhere(q, k, v, log_decay, beta, state):
        return chunked.gated_delta_step(q, k, v, log_decay, beta, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    rows = v.shape[0]
    shapes.exactly("beta", beta, rows, h)
    shapes.log_decay(log_decay, rows, h, q.shape[2])
    shapes.step_state(state, (rows, h, q.shape[2], v.shape[2]))
    with in_place(state) as held:
        return _run(q, k, v, log_decay, beta, held, torch.arange(rows + 1), scale)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor,
    offsets: Tensor,
    scale: float,
) -> Tensor:
    given, write = operands(q, k, v, g, state, offsets, scale), packed(beta)
    run("gated_delta", GatedDelta, beta=write, beta_stride=write.stride(0), **given)
    return given["o"].to(v.dtype)

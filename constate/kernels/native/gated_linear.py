"""The gated linear scan in C: see gated_linear.c for the walk, reference for the op.

Knows the record of its kernel. What autograd asks for goes to the chunked form.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import gated_linear as chunked
from .call import fields, in_place, run
from .heads import elsewhere, operands, states


class GatedLinear(ctypes.Structure):
    _fields_ = fields(
        "q k v log_decay state o v_scale skip offsets",
        "rows hk h dk dv q_stride k_stride v_stride decay_stride o_stride v_scale_stride decay_kind",
        "scale",
    )


def gated_linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Packed q, k (n, hk, dk) and v (n, h, dv) through S <- exp(g) S + k v^T; o = scale S^T q.

    log_decay (n, h), or (n, h, dk) on the key axis, or None for no decay; initial (rows, h, dk, dv) or
    None for zeros. Returns o (n, h, dv) in v's dtype and final (rows, h, dk, dv) float32.
    Raises ValueError for shapes that disagree and, checked, for a positive log-decay.
    """
    if elsewhere(q, k, v, log_decay, initial):
        return chunked.gated_linear_scan(q, k, v, log_decay, initial, spans, scale=scale, checked=checked)
    _, h = shapes.heads(q, k, v)
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay)
    shapes.log_decay(log_decay, v.shape[0], h, q.shape[2], checked=checked)
    final = states(q, v, initial, spans)
    given = operands(q, k, v, log_decay, final, spans.cu, scale)
    run("gated_linear", GatedLinear, **given)
    return given["o"].to(v.dtype), final


def gated_linear_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, *, scale: float = 1.0
) -> Tensor:
    """One token a row: q, k (rows, hk, dk), v (rows, h, dv), log_decay (rows, h) or (rows, h, dk) or None.

    `state` (rows, h, dk, dv) float32, of any strides, is updated in place; returns o (rows, h, dv).
    """
    if elsewhere(q, k, v, log_decay, state):
        return chunked.gated_linear_step(q, k, v, log_decay, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    rows, dk = q.shape[0], q.shape[2]
    shapes.log_decay(log_decay, rows, h, dk)
    shapes.step_state(state, (rows, h, dk, v.shape[2]))
    with in_place(state) as held:
        given = operands(q, k, v, log_decay, held, torch.arange(rows + 1), scale)
        run("gated_linear", GatedLinear, **given)
    return given["o"].to(v.dtype)

"""The elementwise linear recurrence in C: see linear_recurrence.c for the walk, reference for the op.

Knows the record of its kernel. What autograd asks for goes to the chunked form.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import linear_recurrence as chunked
from .call import fields, graded, in_place, packed, run


class LinearRecurrence(ctypes.Structure):
    _fields_ = fields("x log_a state o offsets", "rows channels x_stride decay_stride o_stride")


def linear_recurrence_scan(
    x: Tensor, log_a: Tensor, initial: Tensor | None, spans: Spans, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_a_t) h_{t-1} + x_t, channel by channel.

    x, log_a (n, channels), log_a a natural log, <= 0, -inf too; initial (rows, channels) or None (zeros). Any
    float dtype; computed in float32. Returns o (n, channels), the states, in x's dtype, and final (rows,
    channels) float32; an empty span hands its initial row on. Raises ValueError for shapes and, where
    `checked`, for a positive log_a.
    """
    if graded((x, log_a, initial)):
        return chunked.linear_recurrence_scan(x, log_a, initial, spans, checked=checked)
    shapes.tokens(spans, x=x, log_a=log_a)
    channels = shapes.recurrence(x, log_a, spans.total, checked=checked)
    state = shapes.state("initial", initial, (spans.rows, channels), x)
    final = state.clone(memory_format=torch.contiguous_format)
    return _run(x, log_a, final, spans.cu), final


def linear_recurrence_step(x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
    """One token a row: x, log_a (rows, channels).

    Updates `state` (rows, channels) float32 in place, strided or not; returns o (rows, channels) in x's
    dtype, never a view of the state.
    """
    if graded((x, log_a, state)):
        return chunked.linear_recurrence_step(x, log_a, state)
    shapes.recurrence(x, log_a, state.shape[0])
    shapes.step_state(state, tuple(x.shape))
    with in_place(state) as held:
        return _run(x, log_a, held, torch.arange(x.shape[0] + 1))


def _run(x: Tensor, log_a: Tensor, state: Tensor, offsets: Tensor) -> Tensor:
    given, decay, o = packed(x), packed(log_a), torch.empty(x.shape)
    run(
        "linear_recurrence",
        LinearRecurrence,
        x=given,
        log_a=decay,
        state=state,
        o=o,
        offsets=offsets,
        rows=state.shape[0],
        channels=x.shape[1],
        x_stride=given.stride(0),
        decay_stride=decay.stride(0),
        o_stride=o.stride(0),
    )
    return o.to(x.dtype)

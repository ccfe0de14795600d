"""The elementwise linear recurrence by Triton, the scan of RG-LRU: see linear_recurrence_kernels.py for the
walk, reference for the op.

Where rows and channels are too few to fill the card, rows are cut in pieces: each is summed up from zero, the
pieces of a row are chained, and all then run side by side from the states that enter them. Knows packed spans
and strides; what autograd asks for goes to the chunked form.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import linear_recurrence as chunked
from .launch import Compiled, as_launched, launch, multiprocessors, on_device, power, served
from .linear_recurrence_kernels import recurrence_chain, recurrence_one, recurrence_walk

TOKENS, CHANNELS, WARPS = 16, 64, 2
"""A scan program's tile: a lane has whole channels."""

STEP_CHANNELS = 256

SHORTEST = 256
"""Tokens of a piece at the least: a piece is read twice."""


def linear_recurrence_scan(
    x: Tensor, log_a: Tensor, initial: Tensor | None, spans: Spans, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_a_t) h_{t-1} + x_t, channel by channel.

    x, log_a (n, channels), log_a a natural log, <= 0, -inf too; initial (rows, channels) or None (zeros).
    Float32, bfloat16 or float16; computed in float32. Returns o (n, channels), the states, in x's dtype, and
    final (rows, channels) float32; an empty span hands its initial row on. Raises ValueError for shapes and,
    where `checked`, for a positive log_a.
    """
    shapes.tokens(spans, x=x, log_a=log_a)
    channels = shapes.recurrence(x, log_a, spans.total, checked=checked)
    if not served(0, (x, log_a, initial)):
        return chunked.linear_recurrence_scan(x, log_a, initial, spans)
    on_device(x, log_a=log_a, initial=initial, spans=spans.cu)
    state = shapes.state("initial", initial, (spans.rows, channels), x)
    size = piece(spans, channels, x.device)
    if size is None:
        return _scan(x, log_a, state, spans.cu, None, None, None, 0)
    cut = spans.tiles(size)
    return _scan(x, log_a, state, spans.cu, cut.row, cut.start, cut.first, size)


def piece(spans: Spans, channels: int, device: torch.device) -> int | None:
    """Tokens of the pieces that rows are cut into; None where whole rows fill the card, or are short."""
    room, blocks = multiprocessors(device), -(-channels // CHANNELS)
    if spans.rows * blocks >= 4 * room or spans.longest < 2 * SHORTEST:
        return None
    return max(SHORTEST, power(spans.total * blocks // (8 * room)))


def linear_recurrence_step(x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
    """One token a row: x, log_a (rows, channels).

    Updates `state` (rows, channels) float32 in place, strided or not; returns o (rows, channels) in x's
    dtype, never a view of the state.
    """
    shapes.recurrence(x, log_a, state.shape[0])
    shapes.step_state(state, tuple(x.shape))
    if not served(0, (x, log_a, state)):
        return chunked.linear_recurrence_step(x, log_a, state)
    on_device(x, log_a=log_a, state=state)
    return _step(x, log_a, state)


@torch.library.custom_op("constate::triton_linear_recurrence_scan", mutates_args=())
def _scan(
    x: Tensor,
    log_a: Tensor,
    initial: Tensor,
    offsets: Tensor,
    piece_row: Tensor | None,
    piece_start: Tensor | None,
    first: Tensor | None,
    piece: int,
) -> tuple[Tensor, Tensor]:
    rows, channels = initial.shape
    o, final = x.new_empty(x.shape), initial.new_empty(initial.shape)
    walk: dict[str, Any] = {
        **{"x": x, "log_a": log_a, "offsets": offsets, "channels": channels},
        **{"piece_row": piece_row, "piece_start": piece_start, "piece": piece},
        **{"x_token": x.stride(0), "x_channel": x.stride(1)},
        **{"decay_token": log_a.stride(0), "decay_channel": log_a.stride(1)},
        **{"TOKENS": TOKENS, "CHANNELS": CHANNELS, "warps": WARPS},
    }
    given: dict[str, Any] = {
        "initial": initial,
        "initial_row": initial.stride(0),
        "initial_channel": initial.stride(1),
    }
    blocks = -(-channels // CHANNELS)
    if piece_row is None or first is None:
        launch(recurrence_walk, (rows, blocks), x, **walk, **given, o=o, final=final, totals=None)
        return o, final
    count = piece_row.shape[0]
    ends, totals, firsts = (initial.new_empty(count, channels) for _ in range(3))
    entering = {"initial_row": channels, "initial_channel": 1}
    sums = {"initial": None, "o": None, "final": ends, "totals": totals}
    launch(recurrence_walk, (count, blocks), x, **walk, **entering, **sums)
    launch(
        recurrence_chain,
        (rows, blocks),
        x,
        **given,
        ends=ends,
        totals=totals,
        firsts=firsts,
        final=final,
        first=first,
        channels=channels,
        CHANNELS=CHANNELS,
    )
    outputs = {"initial": firsts, "o": o, "final": None, "totals": None}
    launch(recurrence_walk, (count, blocks), x, **walk, **entering, **outputs)
    return o, final


@_scan.register_fake
def _(x, log_a, initial, offsets, piece_row, piece_start, first, piece):
    return x.new_empty(x.shape), initial.new_empty(initial.shape)


@torch.library.custom_op("constate::triton_linear_recurrence_step", mutates_args=("state",))
def _step(x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
    o = x.new_empty(x.shape)
    launch_step(x, log_a, state, o)
    return o


@_step.register_fake
def _(x, log_a, state):
    return x.new_empty(x.shape)


def launch_step(x: Tensor, log_a: Tensor, state: Tensor, o: Tensor) -> None:
    """One launch: operands of any strides to o (rows, channels), whose channels lie side by side."""
    rows, channels = x.shape
    launch(
        recurrence_one,
        (rows, -(-channels // STEP_CHANNELS)),
        x,
        **{"x": x, "log_a": log_a, "state": state, "o": o, "channels": channels},
        **{"x_row": x.stride(0), "x_channel": x.stride(1)},
        **{"decay_row": log_a.stride(0), "decay_channel": log_a.stride(1)},
        **{"state_row": state.stride(0), "state_channel": state.stride(1), "o_row": o.stride(0)},
        CHANNELS=STEP_CHANNELS,
    )


def compiled() -> Iterator[Compiled]:
    """Depthwise kernels know no head size: one case a dtype."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float16, "fp16")):
        about = {"dtype": name, "default": dtype == torch.bfloat16}
        x, state = torch.empty(1024, 2048, dtype=dtype), torch.empty(32, 2048)
        for rows, note in ((32, "whole rows"), (1, "pieces")):
            scan = partial(linear_recurrence_scan, x, x, state[:rows], Spans.of((1024 // rows,) * rows))
            yield from as_launched("linear_recurrence_scan", scan, **about, note=note)
        step = partial(linear_recurrence_step, x[:32], x[:32], state)
        yield from as_launched("linear_recurrence_step", step, **about)

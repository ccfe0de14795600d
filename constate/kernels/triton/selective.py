"""The selective scan (Mamba-1) by Triton: see selective_kernels.py for the walk, reference for the op.

Where rows and channels are too few to fill the card, rows are cut in pieces: each is summed up from a zero
state, the pieces of a row are chained, and all then run side by side from the states that enter them. Knows
packed spans and strides; what autograd asks for goes to the chunked form.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import selective as chunked
from .launch import Compiled, as_launched, launch, multiprocessors, on_device, power, served
from .selective_kernels import selective_chain, selective_one, selective_walk

WIDEST = 256
"""More states than these go to the chunked form."""

CHANNELS, STEP_CHANNELS = 64, 32
"""Channels of a program. In a scan a lane has two whole channels: no sum over states or tokens leaves it."""

SHORTEST = 256
"""Tokens of a piece at the least: a piece is read twice, and its state written and read."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence over packed tokens.

    x, dt, z (n, channels), dt before its softplus; a (channels, s), negative; b, c (n, s); d, dt_bias
    (channels,); initial (rows, channels, s) or None (zeros). Float32, bfloat16 or float16; computed in
    float32. Returns o (n, channels) in x's dtype and final (rows, channels, s) float32; an empty span hands
    its initial row on. Raises ValueError for shapes and, where `checked`, for a positive a.
    """
    channels, s = shapes.selective(x, dt, a, b, c, spans, d=d, z=z, dt_bias=dt_bias, checked=checked)
    if s > WIDEST or not served(0, (x, dt, a, b, c, initial, d, z, dt_bias)):
        return chunked.selective_scan(x, dt, a, b, c, initial, spans, d=d, z=z, dt_bias=dt_bias)
    on_device(x, dt=dt, a=a, b=b, c=c, initial=initial, d=d, z=z, dt_bias=dt_bias, spans=spans.cu)
    state = shapes.state("initial", initial, (spans.rows, channels, s), x)
    size = piece(spans, channels, x.device)
    if size is None:
        return _scan(x, dt, a, b, c, state, spans.cu, d, z, dt_bias, None, None, None, 0)
    cut = spans.tiles(size)
    return _scan(x, dt, a, b, c, state, spans.cu, d, z, dt_bias, cut.row, cut.start, cut.first, size)


def piece(spans: Spans, channels: int, device: torch.device) -> int | None:
    """Tokens of the pieces that rows are cut into; None where whole rows fill the card, or are short."""
    room, blocks = multiprocessors(device), -(-channels // CHANNELS)
    if spans.rows * blocks >= 2 * room or spans.longest < 2 * SHORTEST:
        return None
    return max(SHORTEST, power(spans.total * blocks // (4 * room)))


def selective_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    """One token a row: x, dt, z (rows, channels); b, c (rows, s); a, d, dt_bias as in the scan.

    Updates `state` (rows, channels, s) float32 in place, strided or not; returns o (rows, channels).
    """
    shapes.selective(x, dt, a, b, c, Spans.ones(x.shape[0]), d=d, z=z, dt_bias=dt_bias)
    shapes.step_state(state, (x.shape[0], *a.shape))
    if a.shape[1] > WIDEST or not served(0, (x, dt, a, b, c, state, d, z, dt_bias)):
        return chunked.selective_step(x, dt, a, b, c, state, d=d, z=z, dt_bias=dt_bias)
    on_device(x, dt=dt, a=a, b=b, c=c, state=state, d=d, z=z, dt_bias=dt_bias)
    return _step(x, dt, a, b, c, state, d, z, dt_bias)


@torch.library.custom_op("constate::triton_selective_scan", mutates_args=())
def _scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor,
    offsets: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    piece_row: Tensor | None,
    piece_start: Tensor | None,
    first: Tensor | None,
    piece: int,
) -> tuple[Tensor, Tensor]:
    (rows, channels, states), wide = initial.shape, power(a.shape[1], 1)
    o, final = x.new_empty(x.shape), initial.new_empty(initial.shape)
    tokens, warps = tile(wide)
    fixed = {"CHANNELS": CHANNELS, "STATES": wide}
    sizes = {"channels": channels, "states": states}
    walk = {
        **{"x": x, "dt": dt, "a": a, "b": b, "c": c, "z": z, "offsets": offsets},
        **{"d": d if d is None else d.contiguous()},
        **{"dt_bias": dt_bias if dt_bias is None else dt_bias.contiguous()},
        **{"piece_row": piece_row, "piece_start": piece_start, "piece": piece},
        **sizes,
        **strides(x=x, dt=dt, z=z, places=("token", "channel")),
        **strides(b=b, c=c, places=("token", "state")),
        **(of_a := strides(a=a, places=("channel", "state"))),
        **fixed,
        "TOKENS": tokens,
        "warps": warps,
    }
    blocks = -(-channels // CHANNELS)
    if piece_row is None or first is None:
        given = strides(initial=initial, places=("row", "channel", "state"))
        launch(
            selective_walk, (rows, blocks), x, **walk, **given, initial=initial, o=o, final=final, totals=None
        )
        return o, final
    count = piece_row.shape[0]
    ends = initial.new_empty(count, channels, states)
    totals, firsts = initial.new_empty(count, channels), torch.empty_like(ends)
    given = strides(initial=firsts, places=("row", "channel", "state"))
    launch(
        selective_walk, (count, blocks), x, **walk, **given, initial=None, o=None, final=ends, totals=totals
    )
    launch(
        selective_chain,
        (rows, blocks),
        x,
        **{"a": a, "initial": initial, "ends": ends, "totals": totals, "firsts": firsts, "final": final},
        first=first,
        **sizes,
        **of_a,
        **strides(initial=initial, places=("row", "channel", "state")),
        **fixed,
        warps=warps,
    )
    launch(selective_walk, (count, blocks), x, **walk, **given, initial=firsts, o=o, final=None, totals=None)
    return o, final


@_scan.register_fake
def _(x, dt, a, b, c, initial, offsets, d, z, dt_bias, piece_row, piece_start, first, piece):
    return x.new_empty(x.shape), initial.new_empty(initial.shape)


@torch.library.custom_op("constate::triton_selective_step", mutates_args=("state",))
def _step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
) -> Tensor:
    o = x.new_empty(x.shape)
    d, dt_bias = (y if y is None else y.contiguous() for y in (d, dt_bias))
    launch_step(x, dt, a, b, c, state, o, d=d, z=z, dt_bias=dt_bias)
    return o


@_step.register_fake
def _(x, dt, a, b, c, state, d, z, dt_bias):
    return x.new_empty(x.shape)


def launch_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    o: Tensor,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> None:
    """One launch: operands of any strides to o (rows, channels), whose channels lie side by side."""
    channels, states = a.shape
    launch(
        selective_one,
        (x.shape[0], -(-channels // STEP_CHANNELS)),
        x,
        **{"x": x, "dt": dt, "a": a, "b": b, "c": c, "state": state, "d": d, "z": z, "dt_bias": dt_bias},
        o=o,
        channels=channels,
        states=states,
        **strides(x=x, dt=dt, z=z, places=("row", "channel")),
        **strides(b=b, c=c, places=("row", "state")),
        **strides(a=a, places=("channel", "state")),
        **strides(state=state, places=("row", "channel", "state")),
        o_row=o.stride(0),
        CHANNELS=STEP_CHANNELS,
        STATES=power(states, 1),
    )


def strides(*, places: tuple[str, ...], **tensors: Tensor | None) -> dict[str, int]:
    """`name_place` for each axis of each tensor, 0 for None: how a kernel names strides."""
    return {
        f"{name}_{place}": 0 if x is None else x.stride(axis)
        for name, x in tensors.items()
        for axis, place in enumerate(places)
    }


def tile(states: int) -> tuple[int, int]:
    """Tokens of a tile, and warps of a scan's program, by how many states a channel has: a thread then holds
    64 decays, and with what is made of them no more registers than it has."""
    tokens = min(16, max(4, 64 // states), max(1, 256 // states))
    return tokens, min(8, max(1, tokens * states // 32))


def compiled() -> Iterator[Compiled]:
    """Depthwise kernels know no head size: one case a dtype, and one of many states."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float16, "fp16")):
        for states in (16, 64, 128):
            about = {
                "dtype": name,
                "default": dtype == torch.bfloat16 and states == 16,
                "note": f"{states} states",
            }
            x, b = torch.empty(1024, 2048, dtype=dtype), torch.empty(1024, states, dtype=dtype)
            a, d, state = torch.empty(2048, states), torch.empty(2048), torch.empty(16, 2048, states)
            for rows, how in ((16, "whole rows"), (1, "pieces")):
                spans = Spans.of((1024 // rows,) * rows)
                scan = partial(selective_scan, x, x, a, b, b, state[:rows], spans, d=d, z=x, dt_bias=d)
                yield from as_launched("selective_scan", scan, **{**about, "note": f"{states} states, {how}"})
            step = partial(selective_step, x[:16], x[:16], a, b[:16], b[:16], state, d=d, z=x[:16], dt_bias=d)
            yield from as_launched("selective_step", step, **about)

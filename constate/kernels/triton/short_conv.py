"""The causal depthwise convolution of a few taps as Triton kernels: o_t = act(bias + sum_j w_j x_{t-w+1+j}).

A program takes a tile of one row's tokens and some channels, and reads each tap where it lies: in x, or
before the row's first token in its history. The last programs leave the new histories. Knows packed spans
and strides; what autograd asks for goes to the chunked form.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import short_conv as chunked
from .launch import Compiled, as_launched, launch, on_device, served
from .maths import silu

WIDEST = 32
"""More taps than these go to the chunked form: they are unrolled."""

TOKENS, CHANNELS, STEP_CHANNELS = 16, 64, 256
"""A program's tile of a forward, and its channels of a step; any head size or dtype."""


@triton.jit
def short_conv_tiles(
    x,
    weight,
    bias,
    history,
    o,
    final,
    offsets,
    tile_row,
    tile_start,
    tiles,
    channels,
    x_token,
    x_channel,
    weight_channel,
    weight_tap,
    history_row,
    history_tap,
    history_channel,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Programs (tiles + rows, blocks of channels): one for each tile, then one for each row's history."""
    number = tl.program_id(0)
    c = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < channels
    if number < tiles:
        row = tl.load(tile_row + number)
        t = tl.load(tile_start + number) + tl.arange(0, TOKENS)
        begin = tl.load(offsets + row)
        held = (t < tl.load(offsets + row + 1))[:, None] & real[None, :]
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        if bias is not None:
            total += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)[None, :]
        for j in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]  # the compiler's own loop
            source = t - (WIDTH - 1) + j
            own = source >= begin
            place = source[:, None] * x_token + c[None, :] * x_channel
            tap = tl.load(x + place, mask=held & own[:, None], other=0.0).to(tl.float32)
            if j < WIDTH - 1:
                past = (source - begin + WIDTH - 1)[:, None] * history_tap + c[None, :] * history_channel
                kept = held & (source < begin)[:, None]
                tap += tl.load(history + row * history_row + past, mask=kept, other=0.0).to(tl.float32)
            w = tl.load(weight + c * weight_channel + j * weight_tap, mask=real, other=0.0)
            total += w.to(tl.float32)[None, :] * tap
        if SILU:
            total = silu(total)
        place = t[:, None] * channels + c[None, :]
        tl.store(o + place, total.to(o.dtype.element_ty), mask=held)
    else:
        # Other names than above: what both branches name has to be of one type.
        mine = tl.cast(number - tiles, tl.int64)
        first = tl.load(offsets + mine)
        end = tl.load(offsets + mine + 1)
        for i in tl.static_range(WIDTH - 1):  # pyright: ignore[reportGeneralTypeIssues]  # as above
            at = end - (WIDTH - 1) + i + 0 * c  # a block: 3.9.0's interpreter spreads no single truth
            new = real & (at >= first)
            value = tl.load(x + at * x_token + c * x_channel, mask=new, other=0.0)
            older = history + mine * history_row + (at - first + WIDTH - 1) * history_tap
            old = tl.load(older + c * history_channel, mask=real & (at < first), other=0.0)
            value = tl.where(new, value.to(final.dtype.element_ty), old.to(final.dtype.element_ty))
            tl.store(final + (mine * (WIDTH - 1) + i) * channels + c, value, mask=real)


@triton.jit
def short_conv_one(
    x,
    weight,
    bias,
    history,
    o,
    channels,
    x_row,
    x_channel,
    weight_channel,
    weight_tap,
    history_row,
    history_tap,
    history_channel,
    o_row,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Programs (rows, blocks of channels): one token a row, the history shifted in place."""
    row = tl.cast(tl.program_id(0), tl.int64)
    c = tl.cast(tl.program_id(1), tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < channels
    total = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    held = history + row * history_row + c * history_channel
    taps = weight + c * weight_channel
    for j in tl.static_range(WIDTH - 1):
        past = tl.load(held + j * history_tap, mask=real, other=0.0)
        total += tl.load(taps + j * weight_tap, mask=real, other=0.0).to(tl.float32) * past.to(tl.float32)
        if j > 0:  # its thread has read that place already
            tl.store(held + (j - 1) * history_tap, past, mask=real)
    now = tl.load(x + row * x_row + c * x_channel, mask=real, other=0.0)
    w = tl.load(taps + (WIDTH - 1) * weight_tap, mask=real, other=0.0)
    total += w.to(tl.float32) * now.to(tl.float32)
    if WIDTH > 1:
        tl.store(held + (WIDTH - 2) * history_tap, now.to(history.dtype.element_ty), mask=real)
    if SILU:
        total = silu(total)
    tl.store(o + row * o_row + c, total.to(o.dtype.element_ty), mask=real)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    *,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """Packed x (n, c) through weight (c, w) and bias (c,) or None; activation is "silu" or None.

    initial (rows, w - 1, c) holds the inputs before each row's first token, oldest first, in a dtype of
    its own; None is zeros in x's dtype. Returns o (n, c) in x's dtype and final, each row's last w - 1
    inputs, in initial's dtype. Sums run in float32. Raises ValueError for shapes that disagree.
    """
    held = shapes.conv(x, weight, bias, initial, spans, activation)
    if not _serves(x, weight, bias, held):
        return chunked.short_conv(x, weight, bias, initial, spans, activation=activation)
    on_device(x, weight=weight, bias=bias, initial=initial, spans=spans.cu)
    tiles = spans.tiles(TOKENS)
    return _forward(x, weight, bias, held, spans.cu, tiles.row, tiles.start, TOKENS, activation == "silu")


def short_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, activation: str | None = "silu"
) -> Tensor:
    """One token a row: x (rows, c), history (rows, w - 1, c) shifted in place. Returns o (rows, c)."""
    shapes.conv_step(x, weight, bias, history, activation)
    if not _serves(x, weight, bias, history):
        return chunked.short_conv_step(x, weight, bias, history, activation=activation)
    on_device(x, weight=weight, bias=bias, history=history)
    return _step(x, weight, bias, history, activation == "silu")


def _serves(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor) -> bool:
    return weight.shape[1] <= WIDEST and served(0, (x, weight, bias, history))


@torch.library.custom_op("constate::triton_short_conv", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor,
    offsets: Tensor,
    tile_row: Tensor,
    tile_start: Tensor,
    size: int,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """`size` is that of the tiles."""
    (n, channels), rows, tiles = x.shape, history.shape[0], tile_row.shape[0]
    o, final = x.new_empty(n, channels), history.new_empty(history.shape)
    launch(
        short_conv_tiles,
        (tiles + rows, -(-channels // CHANNELS)),
        x,
        x=x,
        weight=weight,
        bias=None if bias is None else bias.contiguous(),
        history=history,
        o=o,
        final=final,
        offsets=offsets,
        tile_row=tile_row,
        tile_start=tile_start,
        tiles=tiles,
        channels=channels,
        x_token=x.stride(0),
        x_channel=x.stride(1),
        weight_channel=weight.stride(0),
        weight_tap=weight.stride(1),
        history_row=history.stride(0),
        history_tap=history.stride(1),
        history_channel=history.stride(2),
        WIDTH=weight.shape[1],
        SILU=silu,
        TOKENS=size,
        CHANNELS=CHANNELS,
    )
    return o, final


@_forward.register_fake
def _(x, weight, bias, history, offsets, tile_row, tile_start, size, silu):
    return x.new_empty(x.shape), history.new_empty(history.shape)


@torch.library.custom_op("constate::triton_short_conv_step", mutates_args=("history",))
def _step(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, silu: bool) -> Tensor:
    o = x.new_empty(x.shape)
    launch_step(x, weight, None if bias is None else bias.contiguous(), history, o, silu)
    return o


@_step.register_fake
def _(x, weight, bias, history, silu):
    return x.new_empty(x.shape)


def launch_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, o: Tensor, silu: bool
) -> None:
    """One launch: x (rows, c) of any strides to o (rows, c), whose channels lie side by side."""
    channels = x.shape[1]
    launch(
        short_conv_one,
        (x.shape[0], -(-channels // STEP_CHANNELS)),
        x,
        x=x,
        weight=weight,
        bias=bias,
        history=history,
        o=o,
        channels=channels,
        x_row=x.stride(0),
        x_channel=x.stride(1),
        weight_channel=weight.stride(0),
        weight_tap=weight.stride(1),
        history_row=history.stride(0),
        history_tap=history.stride(1),
        history_channel=history.stride(2),
        o_row=o.stride(0),
        WIDTH=weight.shape[1],
        SILU=silu,
        CHANNELS=STEP_CHANNELS,
    )


def compiled() -> Iterator[Compiled]:
    """Depthwise kernels know no head size: one case a dtype and width."""
    spans = Spans.of((100, 28))
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float16, "fp16")):
        for width in (4, 2):
            about = {"dtype": name, "default": dtype == torch.bfloat16, "note": f"{width} taps"}
            x, weight, bias = (
                torch.empty(*shape, dtype=dtype) for shape in ((128, 2048), (2048, width), (2048,))
            )
            history = x.new_empty(128, width - 1, 2048)
            forward = partial(short_conv, x, weight, bias, history[:2], spans)
            yield from as_launched("short_conv", forward, **about)
            yield from as_launched(
                "short_conv_step", partial(short_conv_step, x, weight, bias, history), **about
            )

"""The causal depthwise convolution of a few taps by Triton: see short_conv_kernels.py for the kernels,
reference for the op.

Knows packed spans and strides; what autograd asks for goes to the chunked form.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import short_conv as chunked
from .launch import Compiled, as_launched, launch, on_device, served
from .short_conv_kernels import short_conv_one, short_conv_tiles

WIDEST = 32
"""More taps than these go to the chunked form: they are unrolled."""

TOKENS, CHANNELS, STEP_CHANNELS = 16, 64, 256
"""A program's tile of a forward, and its channels of a step; any head size or dtype."""


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

"""The short causal depthwise convolution in front of a recurrence, with its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .mixer import Call

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


class ShortConv(nn.Module):
    """y_t = act(bias + sum_j weight[:, j] x_{t - w + 1 + j}), weight (channels, w).

    `history` (rows, w - 1, channels) holds the inputs before x, oldest first, and is left holding the
    last ones; without it every row starts from zeros. The op runs over packed rows.
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False, activation: str | None = "silu"):
        super().__init__()
        if width < 1:
            raise ValueError(f"a convolution of width {width}: at least 1 is wanted")
        if activation not in (None, "silu"):
            raise ValueError(f"a convolution's activation {activation!r}: 'silu' or none is what the op has")
        self.weight = nn.Parameter(torch.randn(channels, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.activation = activation

    def init_history(self, rows: int) -> Tensor:
        channels, width = self.weight.shape
        return self.weight.new_zeros(rows, width - 1, channels, requires_grad=False)

    def forward(self, x: Tensor, call: Call, history: Tensor | None = None) -> Tensor:
        """x (n, channels) packed by call.spans."""
        conv = call.ops.short_conv
        y, final = conv(x, self.weight, self.bias, history, call.spans, activation=self.activation)
        if history is not None:
            history.copy_(final)
        return y

    def step(self, x: Tensor, call: Call, history: Tensor) -> Tensor:
        """x (rows, channels), one token a row."""
        step = call.ops.short_conv_step
        return step(x, self.weight, self.bias, history, activation=self.activation)

    def record(self, tape: Tape, x: Tensor, history: Tensor) -> Tensor:
        """`step` written onto a tape."""
        weight, bias = tape.constant(self.weight), self.bias
        silu = self.activation == "silu"
        return tape.short_conv(x, weight, None if bias is None else tape.constant(bias), history, silu=silu)

    def flops(self, new: int) -> int:
        return 2 * new * self.weight.numel()

    @property
    def history_bytes(self) -> int:
        channels, width = self.weight.shape
        return (width - 1) * channels * self.weight.element_size()

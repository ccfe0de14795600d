"""A short convolution as a mixer of its own: a causal depthwise filter over the last few tokens.

y_t = sum_j w_j x_{t - W + 1 + j}, channel by channel, without projections or gates (the operator that
Arora et al., 2312.04927, section 4.2, put before attention). It remembers W - 1 inputs and nothing else. A
layer of it before every other mixer lets all of them see which token stood before this one, attention
without positions too, and that is what recall by content is learned from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cost import Cost, carried, read_weights
from .mixer import Call, Mixer
from .short_conv import ShortConv
from .state import Conv, State

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class ConvolutionSpec:
    """The filter's width; `act` silu or none."""

    conv: int = 4
    bias: bool = False
    act: str | None = None


class Convolution(Mixer):
    """One depthwise convolution with its history."""

    def __init__(self, d: int, spec: ConvolutionSpec):
        super().__init__()
        self.conv = ShortConv(d, spec.conv, bias=spec.bias, activation=spec.act)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return Conv(self.conv.init_history(rows))

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        return self.conv(x, call, state.conv if isinstance(state, Conv) else None)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, Conv)
        return self.conv.step(x, call, state.conv)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, Conv)
        return self.conv.record(tape, x, state.conv)

    def cost(self, new: int, past: int) -> Cost:
        own = Cost({"conv": self.conv.flops(new)}, read_weights(*self.parameters()))
        return own + carried("conv", self.conv.history_bytes, new)

"""Mamba (Gu & Dao, 2312.00752): a selective state-space model with a decay for every channel and state.

h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t (algorithm 2), gated by SiLU(z). Holds the
mixer; a checkpoint's config and names are not known here yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..core.cost import Cost, carried, matmul, read_weights, selective_scan
from ..core.decay import step_bias
from ..core.mixer import Call, Mixer
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32


@dataclass(frozen=True)
class MambaSpec:
    """inner channels with state_size states each; dt comes from rank numbers a token (None: d / 16)."""

    inner: int
    state_size: int = 16
    rank: int | None = None
    conv: int = 4
    bias: bool = False
    conv_bias: bool = True


class Mamba(Mixer):
    """In-projection to x and gate; convolution over x; dt, B and C from x; scan; out."""

    float32: ClassVar[frozenset[str]] = frozenset({"a_log", "dt_bias", "d"})

    def __init__(self, d: int, spec: MambaSpec):
        super().__init__()
        self.inner, self.s = spec.inner, spec.state_size
        self.rank = spec.rank or math.ceil(d / 16)
        self.in_proj = nn.Linear(d, 2 * self.inner, bias=spec.bias)
        self.conv = ShortConv(self.inner, spec.conv, bias=spec.conv_bias)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * self.s, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.inner, bias=False)
        self.dt_bias = nn.Parameter(step_bias(self.inner))
        self.a_log = nn.Parameter(torch.arange(1, self.s + 1).float().log().repeat(self.inner, 1))
        self.d = nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, d, bias=spec.bias)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        ssm = torch.zeros(rows, self.inner, self.s, dtype=dtype, device=self.like.device)
        return ConvSSM(self.conv.init_history(rows), ssm)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        x, z = self._enter(x)
        x = self.conv(x, call, conv)
        dt, b, c = self._operands(x)
        o, final = call.ops.selective_scan(
            x, dt, -self.a_log.exp(), b, c, ssm, call.spans, d=self.d, z=z, dt_bias=self.dt_bias
        )
        if ssm is not None:
            ssm.copy_(final)
        return self.out_proj(o.to(z.dtype))

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        x, z = self._enter(x)
        x = self.conv.step(x, call, state.conv)
        dt, b, c = self._operands(x)
        with in_float32(state.ssm) as ssm:
            o = call.ops.selective_step(
                x, dt, -self.a_log.exp(), b, c, ssm, d=self.d, z=z, dt_bias=self.dt_bias
            )
        return self.out_proj(o.to(z.dtype))

    def cost(self, new: int, past: int) -> Cost:
        projections = (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)
        flops = {
            "projection": matmul(new, *(p.weight for p in projections)),
            "conv": self.conv.flops(new),
            "scan": selective_scan(new, self.inner, self.s),
        }
        state = carried("state", 4 * self.inner * self.s, new) + carried("conv", self.conv.history_bytes, new)
        return Cost(flops, read_weights(*self.parameters())) + state

    @property
    def like(self) -> Tensor:
        return self.in_proj.weight

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, z = self.in_proj(x).chunk(2, dim=-1)
        return x, z

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, b, c = self.x_proj(x).split([self.rank, self.s, self.s], dim=-1)
        return self.dt_proj(low), b, c

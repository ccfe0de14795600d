"""The recurrent block of Griffin (De et al., 2402.19427): a real-gated linear recurrent unit beside a GELU
branch.

h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t), channel by channel (equation 4), with log a_t = -8
softplus(rate) r_t and r, i sigmoids of block-diagonal products of x_t (equations 1 to 3); x comes through a
short convolution without an activation, and h leaves multiplied by gelu(y) (section 2.3). Odd points of the
published models: the first token of a sequence enters unscaled, as behind a decay of 0; every product has a
bias. Departures: the products to y and x are one, those to both gates too; 1 - a^2 is -expm1(2 log a), which
keeps its digits where a is near 1, and at least 1e-12 (the published code clips the gradient of its root
instead). No architecture by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.cost import Cost, carried, matmul, read_weights, recurrence_scan
from ..core.decay import inverse_softplus
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.mlp import activation
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape

SHARPNESS = 8.0
"""The constant c of equation 3."""

LEAST = 1e-12
"""What 1 - a^2 is at least, so that its root has a gradient."""


@dataclass(frozen=True)
class RGLRUSpec:
    """`width` channels whose gates are made in `heads` blocks; conv is the convolution's width."""

    width: int
    heads: int
    conv: int = 4
    act: str = "gelu_pytorch_tanh"


class RGLRU(Mixer):
    """One in-projection to y and x; convolution over x; gates; scan; times act(y); out.

    gates (heads, block, 2 block) holds each block's input gate, then its recurrence gate; gate_bias (heads,
    2 block) too; rate (width,).
    """

    float32: ClassVar[frozenset[str]] = frozenset({"rate"})

    def __init__(self, d: int, spec: RGLRUSpec):
        super().__init__()
        self.width, self.heads = spec.width, spec.heads
        if spec.width % spec.heads:
            raise ValueError(f"{spec.width} channels do not fall into {spec.heads} equal blocks")
        block = spec.width // spec.heads
        self.in_proj = Linear(d, 2 * spec.width)
        self.conv = ShortConv(spec.width, spec.conv, bias=True, activation=None)
        self.gates = nn.Parameter(torch.randn(spec.heads, block, 2 * block) * block**-0.5)
        self.gate_bias = nn.Parameter(torch.zeros(spec.heads, 2 * block))
        kept = 0.9 + 0.099 * torch.rand(spec.width)  # a^8 in [0.9, 0.999] where r is 1 (section 2.4)
        self.rate = nn.Parameter(inverse_softplus(-kept.log() / SHARPNESS))
        self.out_proj = Linear(spec.width, d)
        self.act, self.act_name = activation(spec.act), spec.act

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        ssm = torch.zeros(rows, self.width, dtype=dtype, device=self.like.device)
        return ConvSSM(self.conv.init_history(rows), ssm)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        y, x = self.in_proj(x).chunk(2, dim=-1)
        fed, log_a = self._operands(self.conv(x, call, conv), call)
        h, final = call.ops.linear_recurrence_scan(fed, log_a, ssm, call.spans)
        if ssm is not None:
            ssm.copy_(final)
        return self._leave(h, y)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        y, x = self.in_proj(x).chunk(2, dim=-1)
        fed, log_a = self._operands(self.conv.step(x, call, state.conv), call)
        with in_float32(state.ssm) as ssm:
            h = call.ops.linear_recurrence_step(fed, log_a, ssm)
        return self._leave(h, y)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        y, x = self.in_proj.record(tape, x).chunk(2, dim=-1)
        x, gates = self.conv.record(tape, x, state.conv), tape.vector(2 * self.width)
        block, bias = self.width // self.heads, tape.constant(self.gate_bias)
        tape.heads(self.gates, x, block, gates, 2 * block, bias=bias)
        fed, log_a = tape.real_gate(gates, x, tape.constant(self.log_rate), self.heads, LEAST)
        h = tape.linear_recurrence(fed, log_a, state.ssm)
        return self.out_proj.record(tape, tape.activate(self.act_name, y, h))

    def cost(self, new: int, past: int) -> Cost:
        flops = {
            "projection": matmul(new, self.in_proj, self.gates, self.out_proj),
            "conv": self.conv.flops(new),
            "scan": recurrence_scan(new, self.width),
        }
        state, history = carried("state", 4 * self.width, new), carried("conv", self.conv.history_bytes, new)
        return Cost(flops, read_weights(*self.parameters())) + state + history

    @property
    def log_rate(self) -> Tensor:
        """log a where the recurrence gate is 1, (width,)."""
        return -SHARPNESS * F.softplus(self.rate)

    @property
    def like(self) -> Tensor:
        return self.in_proj.like

    def _operands(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """From convolved x (n, width), what each token adds and the log of its decay, (n, width) float32."""
        i, r = self._gates(x)
        log_a = self.log_rate * r
        share = (-torch.expm1(2 * log_a)).clamp(min=LEAST).sqrt()
        share = torch.where((call.positions == 0)[:, None], 1.0, share)
        return x.float() * i * share, log_a

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input's and the recurrence's, each (n, width) float32."""
        blocks = x.unflatten(-1, (self.heads, -1)).transpose(0, 1)
        gates = torch.baddbmm(self.gate_bias[:, None], blocks, self.gates).transpose(0, 1)
        i, r = gates.float().sigmoid().chunk(2, dim=-1)
        return i.flatten(1), r.flatten(1)

    def _leave(self, h: Tensor, y: Tensor) -> Tensor:
        return self.out_proj(h.to(y.dtype) * self.act(y))

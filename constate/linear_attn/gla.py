"""Gated linear attention (Yang et al., 2312.06635): a data-dependent decay for every key channel.

S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t (equation 3), alpha from a low-rank projection
with a temperature (section 4.4); the output is normed a head and gated. Departure: the projections of
q, k, v, gate and decay are one product, and a short convolution over q, k, v may stand in front. Holds
the mixer; a checkpoint's config and names are not known here yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.cost import Cost, carried, linear_scan, matmul, read_weights
from ..core.mixer import Call, Mixer
from ..core.norms import GatedRMSNorm
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32


@dataclass(frozen=True)
class GLASpec:
    """heads with key_dim and value_dim channels; the decay comes from rank numbers a token and is the
    temperature-th root of a sigmoid; conv 0 means no convolution."""

    heads: int
    key_dim: int
    value_dim: int
    rank: int = 16
    temperature: float = 16.0
    conv: int = 0
    norm_eps: float = 1e-5


class GLA(Mixer):
    """One in-projection to q, k, v, gate and the decay's low-rank factor; scan; gated norm; out."""

    def __init__(self, d: int, spec: GLASpec):
        super().__init__()
        self.h, self.dk, self.dv = spec.heads, spec.key_dim, spec.value_dim
        self.keys, self.values = self.h * self.dk, self.h * self.dv
        self.rank, self.temperature = spec.rank, spec.temperature
        self.in_proj = nn.Linear(d, 2 * self.keys + 2 * self.values + self.rank, bias=False)
        self.decay_proj = nn.Linear(self.rank, self.keys, bias=True)
        self.conv = ShortConv(2 * self.keys + self.values, spec.conv) if spec.conv else None
        self.norm = GatedRMSNorm(self.dv, spec.norm_eps, before=True)
        self.out_proj = nn.Linear(self.values, d, bias=False)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        ssm = torch.zeros(rows, self.h, self.dk, self.dv, dtype=dtype, device=self.like.device)
        if self.conv is None:
            return ConvSSM(self.like.new_zeros(rows, 0, 2 * self.keys + self.values), ssm)
        return ConvSSM(self.conv.init_history(rows), ssm)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        qkv, gate, low = self._enter(x)
        q, k, v, decay = self._operands(self.conv(qkv, call, conv) if self.conv else qkv, low)
        o, final = call.ops.gated_linear_scan(q, k, v, decay, ssm, call.spans, scale=self.dk**-0.5)
        if ssm is not None:
            ssm.copy_(final)
        return self._leave(o, gate)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, gate, low = self._enter(x)
        q, k, v, decay = self._operands(self.conv.step(qkv, call, state.conv) if self.conv else qkv, low)
        with in_float32(state.ssm) as ssm:
            o = call.ops.gated_linear_step(q, k, v, decay, ssm, scale=self.dk**-0.5)
        return self._leave(o, gate)

    def cost(self, new: int, past: int) -> Cost:
        flops = {
            "projection": matmul(new, self.in_proj.weight, self.decay_proj.weight, self.out_proj.weight),
            "conv": self.conv.flops(new) if self.conv else 0,
            "scan": linear_scan(new, self.h, self.dk, self.dv),
        }
        history = self.conv.history_bytes if self.conv else 0
        state = carried("state", 4 * self.h * self.dk * self.dv, new) + carried("conv", history, new)
        return Cost(flops, read_weights(*self.parameters())) + state

    @property
    def like(self) -> Tensor:
        return self.in_proj.weight

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [2 * self.keys + self.values, self.values, self.rank]
        qkv, gate, low = self.in_proj(x).split(sizes, dim=-1)
        return qkv, gate, low

    def _operands(self, qkv: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = qkv.split([self.keys, self.keys, self.values], dim=-1)
        decay = F.logsigmoid(self.decay_proj(low).float()) / self.temperature
        q, k, v, decay = (t.unflatten(-1, (self.h, -1)) for t in (q, k, v, decay))
        return q, k, v, decay

    def _leave(self, o: Tensor, gate: Tensor) -> Tensor:
        o = self.norm(o, gate.unflatten(-1, (self.h, -1)))
        return self.out_proj(o.flatten(1).to(gate.dtype))

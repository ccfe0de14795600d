"""Gated DeltaNet (Yang et al., 2412.06464): a state that decays, then replaces what a key held.

S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t (equation 10), with q and k
of unit length, alpha = exp(-exp(A) softplus(a + bias)) as in Mamba-2 and beta a sigmoid, doubled where
negative eigenvalues are allowed (Grazzi et al., 2411.12537). Several value heads may share a key head.
Departure: all projections are one product. Holds the mixer; a checkpoint's config and names are not
known here yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.cost import Cost, carried, delta_scan, matmul, read_weights
from ..core.decay import log_rates, step_bias
from ..core.mixer import Call, Mixer
from ..core.norms import GatedRMSNorm
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """heads key heads of key_dim, value_heads (None: as many) of value_dim; negative doubles beta."""

    heads: int
    key_dim: int
    value_dim: int
    value_heads: int | None = None
    conv: int = 4
    negative: bool = False
    norm_eps: float = 1e-5


class GatedDeltaNet(Mixer):
    """One in-projection to q, k, v, gate, beta and decay; convolution over q, k, v; scan; gated norm; out."""

    float32: ClassVar[frozenset[str]] = frozenset({"a_log", "dt_bias"})

    def __init__(self, d: int, spec: GatedDeltaNetSpec):
        super().__init__()
        self.hk, self.h = spec.heads, spec.value_heads or spec.heads
        if self.h % self.hk:
            raise ValueError(f"{self.h} value heads cannot share {self.hk} key heads evenly")
        self.dk, self.dv = spec.key_dim, spec.value_dim
        self.keys, self.values = self.hk * self.dk, self.h * self.dv
        self.negative = spec.negative
        self.in_proj = nn.Linear(d, 2 * self.keys + 2 * self.values + 2 * self.h, bias=False)
        self.conv = ShortConv(2 * self.keys + self.values, spec.conv)
        self.a_log = nn.Parameter(log_rates(self.h))
        self.dt_bias = nn.Parameter(step_bias(self.h))
        self.norm = GatedRMSNorm(self.dv, spec.norm_eps, before=True)
        self.out_proj = nn.Linear(self.values, d, bias=False)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        ssm = torch.zeros(rows, self.h, self.dk, self.dv, dtype=dtype, device=self.like.device)
        return ConvSSM(self.conv.init_history(rows), ssm)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        qkv, gate, ba = self._enter(x)
        q, k, v, decay, beta = self._operands(self.conv(qkv, call, conv), ba)
        o, final = call.ops.gated_delta_scan(q, k, v, decay, beta, ssm, call.spans, scale=self.dk**-0.5)
        if ssm is not None:
            ssm.copy_(final)
        return self._leave(o, gate)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, gate, ba = self._enter(x)
        q, k, v, decay, beta = self._operands(self.conv.step(qkv, call, state.conv), ba)
        with in_float32(state.ssm) as ssm:
            o = call.ops.gated_delta_step(q, k, v, decay, beta, ssm, scale=self.dk**-0.5)
        return self._leave(o, gate)

    def cost(self, new: int, past: int) -> Cost:
        flops = {
            "projection": matmul(new, self.in_proj.weight, self.out_proj.weight),
            "conv": self.conv.flops(new),
            "scan": delta_scan(new, self.h, self.dk, self.dv),
        }
        state = carried("state", 4 * self.h * self.dk * self.dv, new)
        history = carried("conv", self.conv.history_bytes, new)
        return Cost(flops, read_weights(*self.parameters())) + state + history

    @property
    def like(self) -> Tensor:
        return self.in_proj.weight

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [2 * self.keys + self.values, self.values, 2 * self.h]
        qkv, gate, ba = self.in_proj(x).split(sizes, dim=-1)
        return qkv, gate, ba

    def _operands(self, qkv: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        qk, v = qkv.split([2 * self.keys, self.values], dim=-1)
        q, k = unit(qk.float().unflatten(-1, (2 * self.hk, -1))).chunk(2, dim=1)
        b, a = ba.float().chunk(2, dim=-1)
        beta = b.sigmoid() * 2 if self.negative else b.sigmoid()
        decay = -self.a_log.exp() * F.softplus(a + self.dt_bias)
        return q, k, v.unflatten(-1, (self.h, -1)), decay, beta

    def _leave(self, o: Tensor, gate: Tensor) -> Tensor:
        o = self.norm(o, gate.unflatten(-1, (self.h, -1)))
        return self.out_proj(o.flatten(1).to(gate.dtype))


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x scaled to length 1 on its last axis, eps inside the root as the published kernels have it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)

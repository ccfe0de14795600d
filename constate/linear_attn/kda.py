"""Kimi Delta Attention (Kimi Team, 2510.26692): the gated delta rule with a decay for every key channel.

S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t (equation 1), with q
and k convolved and of unit length, beta a sigmoid a head, and log alpha = -exp(A) softplus(x + bias), A a
head's and x, from a product of low rank, a channel's (section 4). The output is normed a head, then gated by
a sigmoid, also of low rank. Departures: all projections from the token are one product; `bound` takes the
other form of the decay, which some kernels and later models have. No architecture by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ..core.cost import Cost, delta_scan
from ..core.decay import bounded_decay, log_rates, softplus_decay, step_bias
from ..core.linear import Linear
from ..core.mixer import Call
from ..core.norms import GatedRMSNorm, unit
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32
from .recurrence import Recurrence

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class KDASpec:
    """heads key heads of key_dim, value_heads (None: as many) of value_dim; decay and gate come through
    `rank` channels. `bound`, negative, is the least log of a decay in the bounded form, None takes the
    softplus form."""

    heads: int
    key_dim: int
    value_dim: int
    rank: int
    value_heads: int | None = None
    conv: int = 4
    bound: float | None = None
    norm_eps: float = 1e-5


class KDA(Recurrence):
    """One in-projection to q, k, v, two low ranks, beta; convolution over q, k, v; scan; norm; gate; out."""

    float32: ClassVar[frozenset[str]] = frozenset({"a_log", "dt_bias"})

    def __init__(self, d: int, spec: KDASpec):
        super().__init__()
        self.hk, self.h = spec.heads, spec.value_heads or spec.heads
        if self.h % self.hk:
            raise ValueError(f"{self.h} value heads cannot share {self.hk} key heads evenly")
        if spec.conv < 1:
            raise ValueError(f"conv {spec.conv}: Kimi Delta Attention convolves q, k and v, so at least 1")
        if spec.bound is not None and not spec.bound < 0:
            raise ValueError(f"bound {spec.bound}: the least log of a decay is negative")
        self.dk, self.dv, self.bound = spec.key_dim, spec.value_dim, spec.bound
        keys, values = self.hk * self.dk, self.h * self.dv
        self.convolved = 2 * keys + values
        self.sizes = [self.convolved, spec.rank, spec.rank, self.h]
        self.in_proj = Linear(d, sum(self.sizes), bias=False)
        self.conv = ShortConv(self.convolved, spec.conv)
        self.decay_proj = Linear(spec.rank, self.h * self.dk, bias=False)
        self.gate_proj = Linear(spec.rank, values, bias=False)
        self.a_log = nn.Parameter(log_rates(self.h))
        self.dt_bias = nn.Parameter(step_bias(self.h * self.dk))
        self.norm = GatedRMSNorm(self.dv, spec.norm_eps, before=True, sigmoid=True)
        self.out_proj = Linear(values, d, bias=False)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        qkv, low, gate, b = self.in_proj(x).split(self.sizes, dim=-1)
        q, k, v = self._heads(self.convolve(qkv, call, conv))
        decay, beta = self._rates(low, b)
        o, final = call.ops.gated_delta_scan(q, k, v, decay, beta, ssm, call.spans, scale=self.dk**-0.5)
        if ssm is not None:
            ssm.copy_(final)
        return self.leave(o, self.gate_proj(gate))

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, low, gate, b = self.in_proj(x).split(self.sizes, dim=-1)
        q, k, v = self._heads(self.convolve_step(qkv, call, state.conv))
        decay, beta = self._rates(low, b)
        with in_float32(state.ssm) as ssm:
            o = call.ops.gated_delta_step(q, k, v, decay, beta, ssm, scale=self.dk**-0.5)
        return self.leave(o, self.gate_proj(gate))

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, low, gate, b = self.in_proj.record(tape, x).split(self.sizes, dim=-1)
        keys, rates = self.hk * self.dk, tape.constant(self.a_log.exp().repeat_interleave(self.dk))
        with tape.side_by_side():
            qkv = self.record_conv(tape, qkv, state.conv)
            low, gate = self.decay_proj.record(tape, low), self.gate_proj.record(tape, gate)
            beta = tape.activate("sigmoid", b)
        with tape.side_by_side():
            tape.unit(qkv[:, : 2 * keys], 2 * self.hk)
            _, decay = tape.decays(low, self.dt_bias, rates, bound=self.bound)
        q, k, v = qkv.split([keys, keys, self.h * self.dv], dim=-1)
        o = tape.gated_delta(q, k, v, decay, beta, state.ssm, heads=self.hk, scale=self.dk**-0.5)
        return self.record_leave(tape, o, gate)

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        first, rank = self.sizes[0], self.sizes[1]
        made = [slice(first, first + rank), slice(-self.h, None)]  # the decays' low rank, beta
        return {"in_proj": made, "decay_proj": [slice(None)]}

    def cost(self, new: int, past: int) -> Cost:
        scan = delta_scan(new, self.h, self.dk, self.dv)
        return self.price(new, scan, self.decay_proj, self.gate_proj)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (n, hk, dk) of unit length and v (n, h, dv)."""
        keys = 2 * self.hk * self.dk
        q, k = unit(qkv[:, :keys].float().unflatten(-1, (2 * self.hk, -1))).chunk(2, dim=1)
        return q, k, qkv[:, keys:].unflatten(-1, (self.h, -1))

    def _rates(self, low: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Log of the decays (n, h, dk) and beta (n, h), float32."""
        x, bias = self.decay_proj(low).unflatten(-1, (self.h, -1)), self.dt_bias.view(self.h, -1)
        a_log, beta = self.a_log[:, None], torch.sigmoid(b.float())
        if self.bound is None:
            return softplus_decay(x, a_log, bias), beta
        return bounded_decay(x, a_log, bias, self.bound), beta

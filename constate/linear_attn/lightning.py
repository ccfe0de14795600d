"""Lightning attention (Qin et al., 2405.17381) as MiniMax-01 has it (2501.08313, section 2.2): linear
attention whose memory fades at a fixed rate, one a head and a layer.

S_t = exp(-s) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, without a scale; q, k and v pass a SiLU first, the output
is normed over all heads together and gated by a sigmoid of the layer's input. The slope of head j (from 1) of
h is s = share 2^(-8 j / h): `share` is 1 in the first layer and almost 0 in the last, where next to nothing
is forgotten. Departure: q, k, v and the gate are one product. No architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.cost import Cost, carried, linear_scan, matmul, read_weights
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.mlp import activation
from ..core.norms import RMSNorm
from ..core.state import Matrix, State, in_float32

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class LightningSpec:
    """heads of head_dim channels each for q, k and v; `share` scales the layer's slopes."""

    heads: int
    head_dim: int
    share: float = 1.0
    act: str = "silu"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if not self.share >= 0:
            raise ValueError(f"share {self.share}: slopes below 0 would make the memory grow")


class LightningAttention(Mixer):
    """One in-projection to q, k, v and gate; scan with constant decay; norm, gate; out."""

    def __init__(self, d: int, spec: LightningSpec):
        super().__init__()
        self.h, self.dim, self.share = spec.heads, spec.head_dim, spec.share
        self.act, self.act_name = activation(spec.act), spec.act
        inner = self.h * self.dim
        self.in_proj = Linear(d, 4 * inner, bias=False)
        self.norm = RMSNorm(inner, spec.norm_eps)
        self.out_proj = Linear(inner, d, bias=False)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return Matrix(torch.zeros(rows, self.h, self.dim, self.dim, dtype=dtype, device=self.like.device))

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        s = state.s if isinstance(state, Matrix) else None
        q, k, v, gate = self._enter(x)
        o, final = call.ops.gated_linear_scan(q, k, v, self.log_decay(call), s, call.spans)
        if s is not None:
            s.copy_(final)
        return self._leave(o, gate)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, Matrix)
        q, k, v, gate = self._enter(x)
        with in_float32(state.s) as s:
            o = call.ops.gated_linear_step(q, k, v, self.log_decay(call), s)
        return self._leave(o, gate)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, Matrix)
        inner = self.h * self.dim
        qkv, gate = self.in_proj.record(tape, x).tensor_split([3 * inner], dim=-1)
        q, k, v = tape.activate(self.act_name, qkv).chunk(3, dim=-1)
        decay = tape.constant(self.slopes).expand(tape.rows, -1).contiguous()
        o = tape.gated_linear(q, k, v, decay, state.s, heads=self.h)
        return self.out_proj.record(tape, tape.activate("sigmoid", gate, self.norm.record(tape, o)))

    def cost(self, new: int, past: int) -> Cost:
        flops = {
            "projection": matmul(new, self.in_proj, self.out_proj),
            "scan": linear_scan(new, self.h, self.dim, self.dim),
        }
        state = carried("state", 4 * self.h * self.dim * self.dim, new)
        return Cost(flops, read_weights(*self.parameters())) + state

    @property
    def like(self) -> Tensor:
        return self.in_proj.like

    def log_decay(self, call: Call) -> Tensor:
        """-s of every token and head, (n, h), made once a call for all layers with these slopes."""
        key = ("lightning", self.h, self.share)
        if key not in call.shared:
            call.shared[key] = self.slopes.expand(call.spans.total, -1)
        return call.shared[key]

    @property
    def slopes(self) -> Tensor:
        """-s of every head, (h,)."""
        head = torch.arange(1, self.h + 1, dtype=torch.float32, device=self.like.device)
        return -self.share * torch.exp2(-8 * head / self.h)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv, gate = self.in_proj(x).tensor_split([3 * self.h * self.dim], dim=-1)
        q, k, v = self.act(qkv).unflatten(-1, (3, self.h, -1)).unbind(1)
        return q, k, v, gate

    def _leave(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.out_proj(self.norm(o.flatten(1).to(gate.dtype)) * gate.sigmoid())

"""Retention (Sun et al., 2307.08621): linear attention whose memory fades at a fixed rate, one a head.

S_t = gamma_h S_{t-1} + k_t v_t^T, o_t = S_t^T q_t (equation 6), gamma_h = 1 - 2^(-5 - h) (equation 8), q and
k rotated to their positions; the output is normed a head and gated by a SiLU. Departures, all
flash-linear-attention's, whose config and names these are: rotation without xPos's scaling, an RMS norm in
place of the group norm, a gated MLP. Ours: q, k, v and gate are one product. A state holds rotated keys, so
it goes on only from the position where it was left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.architecture import Architecture
from ..core.cost import Cost, carried, linear_scan, matmul, read_weights
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.model import Model
from ..core.norms import GatedRMSNorm, RMSNorm
from ..core.rotary import Rotary
from ..core.state import Matrix, State, in_float32
from ..core.weights import Rule, fuse, same
from . import frame

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class RetentionSpec:
    """heads query heads with key_dim (even) and value_dim channels; kv_heads (None: as many) of k and v,
    each for a group of queries, every query head with its own decay; gate, whether the output is gated."""

    heads: int
    key_dim: int
    value_dim: int
    kv_heads: int | None = None
    gate: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class Retention(Mixer):
    """One in-projection to q, k, v and gate; rotation; scan with constant decay; norm, gate; out."""

    def __init__(self, d: int, spec: RetentionSpec):
        super().__init__()
        self.h, self.hk, self.dk, self.dv = (
            spec.heads,
            spec.kv_heads or spec.heads,
            spec.key_dim,
            spec.value_dim,
        )
        if self.h % self.hk:
            raise ValueError(f"{self.h} query heads cannot share {self.hk} key/value heads evenly")
        self.rotary = Rotary.of({"rope_theta": spec.rope_theta}, self.dk)
        self.sizes = [(self.h + self.hk) * self.dk, self.hk * self.dv, self.h * self.dv * spec.gate]
        self.in_proj = Linear(d, sum(self.sizes), bias=False)
        self.gated, eps = spec.gate, spec.norm_eps
        self.norm = GatedRMSNorm(self.dv, eps, before=True) if self.gated else RMSNorm(self.dv, eps)
        self.out_proj = Linear(self.h * self.dv, d, bias=False)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return Matrix(torch.zeros(rows, self.h, self.dk, self.dv, dtype=dtype, device=self.like.device))

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        s = state.s if isinstance(state, Matrix) else None
        q, k, v, gate = self._enter(x, call)
        decay = self.log_decay(call)
        o, final = call.ops.gated_linear_scan(q, k, v, decay, s, call.spans, scale=self.dk**-0.5)
        if s is not None:
            s.copy_(final)
        return self._leave(o, gate)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, Matrix)
        q, k, v, gate = self._enter(x, call)
        with in_float32(state.s) as s:
            o = call.ops.gated_linear_step(q, k, v, self.log_decay(call), s, scale=self.dk**-0.5)
        return self._leave(o, gate)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, Matrix)
        qk, v, gate = self.in_proj.record(tape, x).split(self.sizes, dim=-1)
        tape.rotate(qk, self.h + self.hk, tape.turns(self.rotary.frequencies, self.rotary.factor))
        q, k = qk.split([self.h * self.dk, self.hk * self.dk], dim=-1)
        with tape.side_by_side():
            k, v = (tape.spread(t, self.hk, self.h // self.hk) for t in (k, v))
        decay = tape.constant(self.rates).expand(tape.rows, -1).contiguous()
        o = tape.gated_linear(q, k, v, decay, state.s, heads=self.h, scale=self.dk**-0.5)
        if isinstance(self.norm, GatedRMSNorm):
            return self.out_proj.record(tape, self.norm.record(tape, o, gate, self.h))
        o = tape.gated_norm(o, None, tape.constant(self.norm.whole), self.norm.eps, groups=self.h)
        return self.out_proj.record(tape, o)

    def cost(self, new: int, past: int) -> Cost:
        flops = {
            "projection": matmul(new, self.in_proj, self.out_proj),
            "scan": linear_scan(new, self.h, self.dk, self.dv),
        }
        state = carried("state", 4 * self.h * self.dk * self.dv, new)
        return Cost(flops, read_weights(*self.parameters())) + state

    @property
    def like(self) -> Tensor:
        return self.in_proj.like

    def log_decay(self, call: Call) -> Tensor:
        """log gamma of every token and head, (n, h), made once a call for all layers with as many heads."""
        key = ("retention", self.h)
        if key not in call.shared:
            call.shared[key] = self.rates.expand(call.spans.total, -1)
        return call.shared[key]

    @property
    def rates(self) -> Tensor:
        """log gamma of every head, (h,)."""
        distance = torch.arange(self.h, dtype=torch.float32, device=self.like.device) + 5
        return torch.log1p(-torch.exp2(-distance))

    def _enter(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qk, v, gate = self.in_proj(x).split(self.sizes, dim=-1)
        q, k = self.rotary.rotate(qk.unflatten(-1, (-1, self.dk)), call).split([self.h, self.hk], dim=1)
        v = v.unflatten(-1, (self.hk, self.dv))
        if self.hk != self.h:  # heads that share a key still differ in their decay, and so in their state
            k, v = (t.repeat_interleave(self.h // self.hk, 1) for t in (k, v))
        return q, k, v, gate

    def _leave(self, o: Tensor, gate: Tensor) -> Tensor:
        o = self.norm(o, gate.unflatten(-1, (self.h, -1))) if self.gated else self.norm(o)
        return self.out_proj(o.flatten(1).to(gate.dtype))


@dataclass(frozen=True, kw_only=True)
class Config(frame.Frame):
    """flash-linear-attention's keys for model_type "retnet". Its models build no convolution whatever
    `use_short_conv` and `conv_size` say, and so neither do we."""

    num_heads: int
    num_kv_heads: int | None = None
    expand_k: float = 1.0
    expand_v: float = 2.0
    hidden_ratio: int | float | None = 2
    feature_map: str | None = None
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    fuse_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_map is not None:
            raise ValueError(f"feature_map {self.feature_map!r}: none (null) is what retention has here")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        _ = self.spec  # raises for widths that the heads do not share evenly

    @property
    def spec(self) -> RetentionSpec:
        d, h = self.hidden_size, self.num_heads
        return RetentionSpec(
            heads=h,
            key_dim=frame.heads_of("expand_k", d * self.expand_k, h),
            value_dim=frame.heads_of("expand_v", d * self.expand_v, h),
            kv_heads=self.num_kv_heads,
            gate=self.use_output_gate,
            norm_eps=self.norm_eps,
        )


def build(config: Config) -> Model:
    return frame.build(config, lambda i: Retention(config.hidden_size, config.spec))


def weights(config: Config) -> list[Rule]:
    """flash-linear-attention's names to ours. Its fused norm and its plain one are named differently."""
    spec = config.spec
    h, hk = spec.heads, spec.kv_heads or spec.heads
    sizes = [h * spec.key_dim, hk * spec.key_dim, hk * spec.value_dim, h * spec.value_dim][: 3 + spec.gate]

    def mixer(source: str, ours: str) -> list[Rule]:
        projections = [f"{source}{p}_proj.weight" for p in "qkvg"[: len(sizes)]]
        fused = config.fuse_norm and spec.gate
        return [
            fuse(projections, ours + "in_proj.weight", sizes),
            same(source + "g_norm_swish_gate.weight", ours + "norm.weight", optional=not fused),
            same(source + "g_norm.weight", ours + "norm.weight", optional=fused),
            same(source + "o_proj.weight", ours + "out_proj.weight"),
        ]

    return frame.weights(config, mixer)


ARCHITECTURE = Architecture("retnet", Config, build, weights)

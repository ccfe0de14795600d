"""Gated linear attention (Yang et al., 2312.06635): a data-dependent decay for every key channel.

S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t (equation 3), alpha from a low-rank projection
with a temperature (section 4.4); the output is normed a head and gated. Departures: the projections of q,
k, v, gate and decay are one product, and a short convolution over q, k, v may stand in front. The config
and the names are flash-linear-attention's; its `feature_map` (null in what is published) is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from ..core.architecture import Architecture
from ..core.cost import Cost, linear_scan
from ..core.decay import DecayProjection
from ..core.linear import Linear
from ..core.mixer import Call
from ..core.model import Model
from ..core.norms import GatedRMSNorm, RMSNorm
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32
from ..core.weights import Rule, fuse, same
from . import frame
from .recurrence import Recurrence

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class GLASpec:
    """heads with key_dim and value_dim channels, kv_heads (None: as many) of which k, v and decay have,
    each for a group of queries; the decay comes from rank numbers a token and is the temperature-th root
    of a sigmoid, its logarithm at least decay_min; conv 0 means no convolution; gate, whether the output
    is gated."""

    heads: int
    key_dim: int
    value_dim: int
    rank: int = 16
    temperature: float = 16.0
    conv: int = 0
    norm_eps: float = 1e-5
    kv_heads: int | None = None
    gate: bool = True
    decay_min: float | None = None


class GLA(Recurrence):
    """One in-projection to q, k, v, gate and the decay's low-rank factor; scan; gated norm; out."""

    def __init__(self, d: int, spec: GLASpec):
        super().__init__()
        self.h, self.hk = spec.heads, spec.kv_heads or spec.heads
        self.dk, self.dv = spec.key_dim, spec.value_dim
        if self.h % self.hk:
            raise ValueError(f"{self.h} query heads cannot share {self.hk} key/value heads evenly")
        self.rank, self.temperature, self.decay_min = spec.rank, spec.temperature, spec.decay_min
        self.gates = self.h * self.dv if spec.gate else 0
        self.qkv = [self.h * self.dk, self.hk * self.dk, self.hk * self.dv]
        self.in_proj = Linear(d, sum(self.qkv) + self.gates + self.rank, bias=False)
        self.decay_proj = DecayProjection(self.rank, self.hk * self.dk)
        self.convolved = sum(self.qkv)
        self.conv = ShortConv(self.convolved, spec.conv) if spec.conv else None
        eps = spec.norm_eps
        self.norm = GatedRMSNorm(self.dv, eps, before=True) if spec.gate else RMSNorm(self.dv, eps)
        self.out_proj = Linear(self.h * self.dv, d, bias=False)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        qkv, gate, low = self._enter(x)
        q, k, v, decay = self._operands(self.convolve(qkv, call, conv), low)
        o, final = call.ops.gated_linear_scan(q, k, v, decay, ssm, call.spans, scale=self.dk**-0.5)
        if ssm is not None:
            ssm.copy_(final)
        return self.leave(o, gate)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, gate, low = self._enter(x)
        q, k, v, decay = self._operands(self.convolve_step(qkv, call, state.conv), low)
        with in_float32(state.ssm) as ssm:
            o = call.ops.gated_linear_step(q, k, v, decay, ssm, scale=self.dk**-0.5)
        return self.leave(o, gate)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, gate, low = self.in_proj.record(tape, x).split([self.convolved, self.gates, self.rank], dim=-1)
        q, k, v = self.record_conv(tape, qkv, state.conv).split(self.qkv, dim=-1)
        low = self.decay_proj.record(tape, low)
        lowest = -math.inf if self.decay_min is None else self.decay_min
        decay = tape.activate("logsigmoid", low, scale=1 / self.temperature, low=lowest)
        with tape.side_by_side():
            k, v, decay = (tape.spread(t, self.hk, self.h // self.hk) for t in (k, v, decay))
        o = tape.gated_linear(q, k, v, decay, state.ssm, heads=self.h, scale=self.dk**-0.5)
        return self.record_leave(tape, o, gate)

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        return {"in_proj": [slice(-self.rank, None)], "decay_proj": [slice(None)]}

    def cost(self, new: int, past: int) -> Cost:
        return self.price(new, linear_scan(new, self.h, self.dk, self.dv), self.decay_proj)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, gate, low = self.in_proj(x).split([self.convolved, self.gates, self.rank], dim=-1)
        return qkv, gate, low

    def _operands(self, qkv: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        decay = F.logsigmoid(self.decay_proj(low)) / self.temperature
        if self.decay_min is not None:
            decay = decay.clamp(min=self.decay_min)
        q, k, v = qkv.split(self.qkv, dim=-1)
        k, v, decay = (t.unflatten(-1, (self.hk, -1)) for t in (k, v, decay))
        if self.hk != self.h:
            k, v, decay = (t.repeat_interleave(self.h // self.hk, 1) for t in (k, v, decay))
        return q.unflatten(-1, (self.h, -1)), k, v, decay


@dataclass(frozen=True, kw_only=True)
class Config(frame.Frame):
    """flash-linear-attention's keys for model_type "gla". Its layer takes the last two, which its config
    does not write: they stand for what they always are there."""

    num_heads: int
    num_kv_heads: int | None = None
    expand_k: float = 0.5
    expand_v: float = 1.0
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    clamp_min: float | None = None
    fuse_norm: bool = True
    gate_logit_normalizer: float = 16
    gate_low_rank_dim: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        _ = self.spec  # raises for widths that the heads do not share evenly

    @property
    def spec(self) -> GLASpec:
        d, h = self.hidden_size, self.num_heads
        return GLASpec(
            heads=h,
            key_dim=frame.heads_of("expand_k", d * self.expand_k, h),
            value_dim=frame.heads_of("expand_v", d * self.expand_v, h),
            rank=self.gate_low_rank_dim,
            temperature=self.gate_logit_normalizer,
            conv=self.conv_size if self.use_short_conv else 0,
            norm_eps=self.norm_eps,
            kv_heads=self.num_kv_heads,
            gate=self.use_output_gate,
            decay_min=self.clamp_min,
        )


def build(config: Config) -> Model:
    return frame.build(config, lambda i: GLA(config.hidden_size, config.spec))


def weights(config: Config) -> list[Rule]:
    """flash-linear-attention's names to ours. Its fused norm and its plain one are named differently."""
    spec = config.spec
    h, hk = spec.heads, spec.kv_heads or spec.heads
    qkv = [h * spec.key_dim, hk * spec.key_dim, hk * spec.value_dim]
    gates = [h * spec.value_dim] if spec.gate else []

    def mixer(source: str, ours: str) -> list[Rule]:
        parts = [f"{p}_proj" for p in ("qkvg" if spec.gate else "qkv")] + ["gk_proj.0"]
        fused = config.fuse_norm and spec.gate
        rules = [
            fuse([f"{source}{p}.weight" for p in parts], ours + "in_proj.weight", [*qkv, *gates, spec.rank]),
            same(source + "gk_proj.1.weight", ours + "decay_proj.weight"),
            same(source + "gk_proj.1.bias", ours + "decay_proj.bias"),
            same(source + "g_norm_swish_gate.weight", ours + "norm.weight", optional=not fused),
            same(source + "g_norm.weight", ours + "norm.weight", optional=fused),
            same(source + "o_proj.weight", ours + "out_proj.weight"),
        ]
        if spec.conv:
            convs = [f"{source}{p}_conv1d.weight" for p in "qkv"]
            rules.append(frame.fuse_convs(convs, ours + "conv.weight", qkv))
        return rules

    return frame.weights(config, mixer)


ARCHITECTURE = Architecture("gla", Config, build, weights)

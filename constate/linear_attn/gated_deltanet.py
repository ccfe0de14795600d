"""Gated DeltaNet (Yang et al., 2412.06464): a state that decays, then replaces what a key held.

S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t (equation 10), with q and k
of unit length, alpha = exp(-exp(A) softplus(a + bias)) as in Mamba-2 and beta a sigmoid, doubled where
negative eigenvalues are allowed (Grazzi et al., 2411.12537). Several value heads may share a key head.
Departure: all projections are one product. The config and the names are flash-linear-attention's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.architecture import Architecture
from ..core.cost import Cost, delta_scan
from ..core.decay import log_rates, softplus_decay, step_bias
from ..core.linear import Linear
from ..core.mixer import Call
from ..core.model import Model
from ..core.norms import GatedRMSNorm, RMSNorm, unit
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32
from ..core.weights import Rule, fuse, same
from . import frame
from .recurrence import Recurrence

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """heads key heads of key_dim, value_heads (None: as many) of value_dim; conv 0 means no convolution, and
    the activation alone; negative doubles beta; gate, whether the output is gated."""

    heads: int
    key_dim: int
    value_dim: int
    value_heads: int | None = None
    conv: int = 4
    negative: bool = False
    norm_eps: float = 1e-5
    gate: bool = True


class GatedDeltaNet(Recurrence):
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
        self.sizes = [2 * self.keys + self.values, self.values if spec.gate else 0, 2 * self.h]
        self.in_proj = Linear(d, sum(self.sizes), bias=False)
        self.convolved = self.sizes[0]
        self.conv = ShortConv(self.convolved, spec.conv) if spec.conv else None
        self.a_log = nn.Parameter(log_rates(self.h))
        self.dt_bias = nn.Parameter(step_bias(self.h))
        eps = spec.norm_eps
        self.norm = GatedRMSNorm(self.dv, eps, before=True) if spec.gate else RMSNorm(self.dv, eps)
        self.out_proj = Linear(self.values, d, bias=False)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        qkv, gate, ba = self._enter(x)
        qkv = self.conv(qkv, call, conv) if self.conv else F.silu(qkv)
        q, k, v, decay, beta = self._operands(qkv, ba)
        o, final = call.ops.gated_delta_scan(q, k, v, decay, beta, ssm, call.spans, scale=self.dk**-0.5)
        if ssm is not None:
            ssm.copy_(final)
        return self.leave(o, gate)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, gate, ba = self._enter(x)
        qkv = self.conv.step(qkv, call, state.conv) if self.conv else F.silu(qkv)
        q, k, v, decay, beta = self._operands(qkv, ba)
        with in_float32(state.ssm) as ssm:
            o = call.ops.gated_delta_step(q, k, v, decay, beta, ssm, scale=self.dk**-0.5)
        return self.leave(o, gate)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, gate, ba = self.in_proj.record(tape, x).split(self.sizes, dim=-1)
        qkv = self.conv.record(tape, qkv, state.conv) if self.conv else tape.activate("silu", qkv)
        q, k, v = qkv.split([self.keys, self.keys, self.values], dim=-1)
        tape.unit(qkv[:, : 2 * self.keys], 2 * self.hk)
        b, a = ba.chunk(2, dim=-1)
        beta = tape.activate("sigmoid", b, scale=2.0 if self.negative else 1.0)
        _, decay = tape.decays(a, self.dt_bias, tape.constant(self.a_log.exp()))
        o = tape.gated_delta(q, k, v, decay, beta, state.ssm, heads=self.hk, scale=self.dk**-0.5)
        return self.record_leave(tape, o, gate)

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        return {"in_proj": [slice(-2 * self.h, None)]}  # beta and decay

    def cost(self, new: int, past: int) -> Cost:
        return self.price(new, delta_scan(new, self.h, self.dk, self.dv))

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, gate, ba = self.in_proj(x).split(self.sizes, dim=-1)
        return qkv, gate, ba

    def _operands(self, qkv: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        qk, v = qkv.split([2 * self.keys, self.values], dim=-1)
        q, k = unit(qk.float().unflatten(-1, (2 * self.hk, -1))).chunk(2, dim=1)
        b, a = ba.float().chunk(2, dim=-1)
        beta = b.sigmoid() * 2 if self.negative else b.sigmoid()
        decay = softplus_decay(a, self.a_log, self.dt_bias)
        return q, k, v.unflatten(-1, (self.h, -1)), decay, beta


@dataclass(frozen=True, kw_only=True)
class Config(frame.Frame):
    """flash-linear-attention's keys for model_type "gated_deltanet"."""

    num_heads: int
    head_dim: int
    num_v_heads: int | None = None
    expand_v: float = 2.0
    use_gate: bool = True
    use_short_conv: bool = True
    conv_size: int = 4
    allow_neg_eigval: bool = False
    output_gate_activation: str = "swish"

    def __post_init__(self) -> None:
        super().__post_init__()
        h, hk = self.num_v_heads or self.num_heads, self.num_heads
        if h % hk:
            raise ValueError(f"num_v_heads {h} is no multiple of num_heads {hk}")
        if self.output_gate_activation not in ("swish", "silu"):
            raise ValueError(
                f"output_gate_activation {self.output_gate_activation!r}: only 'swish' is supported"
            )
        _ = self.spec  # raises for an expand_v that gives no whole channels

    @property
    def spec(self) -> GatedDeltaNetSpec:
        return GatedDeltaNetSpec(
            heads=self.num_heads,
            key_dim=self.head_dim,
            value_dim=frame.heads_of("expand_v", self.head_dim * self.expand_v, 1),
            value_heads=self.num_v_heads,
            conv=self.conv_size if self.use_short_conv else 0,
            negative=self.allow_neg_eigval,
            norm_eps=self.norm_eps,
            gate=self.use_gate,
        )


def build(config: Config) -> Model:
    return frame.build(config, lambda i: GatedDeltaNet(config.hidden_size, config.spec))


def weights(config: Config) -> list[Rule]:
    """flash-linear-attention's names to ours."""
    spec = config.spec
    h = spec.value_heads or spec.heads
    keys, values = spec.heads * spec.key_dim, h * spec.value_dim
    parts = {"q": keys, "k": keys, "v": values, **({"g": values} if spec.gate else {}), "b": h, "a": h}

    def mixer(source: str, ours: str) -> list[Rule]:
        projections = [f"{source}{p}_proj.weight" for p in parts]
        rules = [
            fuse(projections, ours + "in_proj.weight", list(parts.values())),
            same(source + "A_log", ours + "a_log"),
            same(source + "dt_bias", ours + "dt_bias"),
            same(source + "o_norm.weight", ours + "norm.weight"),
            same(source + "o_proj.weight", ours + "out_proj.weight"),
        ]
        if spec.conv:
            convs = [f"{source}{p}_conv1d.weight" for p in "qkv"]
            rules.append(frame.fuse_convs(convs, ours + "conv.weight", [keys, keys, values]))
        return rules

    return frame.weights(config, mixer)


ARCHITECTURE = Architecture("gated_deltanet", Config, build, weights)

"""DeltaNet (Yang et al., 2406.06484; Schlag et al., 2102.11174): a state in which a key's value is replaced.

S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t (equation 4): the gated delta rule
without decay. beta is a sigmoid, doubled where negative eigenvalues are allowed (Grazzi et al., 2411.12537).
A short convolution stands before q, k and v; q and k pass an activation and are normed a head.
Departure: all projections are one product. The config and the names are flash-linear-attention's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.architecture import Architecture
from ..core.cost import Cost, delta_scan
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

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
    "identity": lambda x: x,
}
NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "l2": unit,
    "sum": lambda x: F.normalize(x, p=1.0, dim=-1, eps=1e-6),
}


@dataclass(frozen=True)
class DeltaNetSpec:
    """heads of key_dim and value_dim; conv 0 means no convolution; `act` and `qk_norm` are what q and k pass
    ("l2": length 1, "sum": absolute values that sum to 1); `rate` false writes with beta 1, `negative`
    doubles beta; `gate`, whether the output is gated."""

    heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    act: str = "silu"
    qk_norm: str = "l2"
    rate: bool = True
    negative: bool = False
    gate: bool = False
    norm_eps: float = 1e-5


class DeltaNet(Recurrence):
    """One in-projection to q, k, v, gate and beta; convolution over q, k, v; scan; norm; out."""

    def __init__(self, d: int, spec: DeltaNetSpec):
        super().__init__()
        if spec.act not in ACTIVATIONS or spec.qk_norm not in NORMS:
            raise ValueError(
                f"q and k with activation {spec.act!r} and norm {spec.qk_norm!r}; one of "
                f"{', '.join(ACTIVATIONS)} and one of {', '.join(NORMS)} are wanted"
            )
        self.h, self.dk, self.dv = spec.heads, spec.key_dim, spec.value_dim
        self.act, self.qk_norm = spec.act, NORMS[spec.qk_norm]
        self.rate, self.negative = spec.rate, spec.negative
        keys, values = self.h * self.dk, self.h * self.dv
        self.sizes = [2 * keys + values, values if spec.gate else 0, self.h if spec.rate else 0]
        self.in_proj = Linear(d, sum(self.sizes), bias=False)
        # Where q and k have another activation than v, all three take theirs behind the convolution.
        fused = "silu" if spec.act == "silu" else None
        self.convolved = self.sizes[0]
        self.conv = ShortConv(self.convolved, spec.conv, activation=fused) if spec.conv else None
        eps = spec.norm_eps
        self.norm = GatedRMSNorm(self.dv, eps, before=True) if spec.gate else RMSNorm(self.dv, eps)
        self.out_proj = Linear(values, d, bias=False)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        qkv, gate, b = self._enter(x)
        q, k, v, beta = self._operands(self.convolve(qkv, call, conv), b)
        o, final = call.ops.gated_delta_scan(q, k, v, None, beta, ssm, call.spans, scale=self.dk**-0.5)
        if ssm is not None:
            ssm.copy_(final)
        return self.leave(o, gate)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, gate, b = self._enter(x)
        q, k, v, beta = self._operands(self.convolve_step(qkv, call, state.conv), b)
        with in_float32(state.ssm) as ssm:
            o = call.ops.gated_delta_step(q, k, v, None, beta, ssm, scale=self.dk**-0.5)
        return self.leave(o, gate)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        qkv, gate, b = self.in_proj.record(tape, x).split(self.sizes, dim=-1)
        qkv, keys = self.record_conv(tape, qkv, state.conv), self.h * self.dk
        qk, v = qkv.split([2 * keys, self.h * self.dv], dim=-1)
        twice, fused = (
            2.0 if self.negative else 1.0,
            self.conv is not None and self.conv.activation is not None,
        )
        norm = {"norm": "length" if self.qk_norm is unit else "absolute", "eps": 1e-6}
        with tape.side_by_side():
            q, k = tape.features("identity" if fused else self.act, qk, 2 * self.h, **norm).chunk(2, dim=-1)
            v = v if fused else tape.activate("silu", v)
            beta = (
                tape.activate("sigmoid", b, scale=twice)
                if self.rate
                else torch.full((tape.rows, self.h), twice)
            )
        o = tape.gated_delta(q, k, v, None, beta, state.ssm, heads=self.h, scale=self.dk**-0.5)
        return self.record_leave(tape, o, gate)

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        return {"in_proj": [slice(-self.h, None)]} if self.rate else {}  # beta

    def cost(self, new: int, past: int) -> Cost:
        return self.price(new, delta_scan(new, self.h, self.dk, self.dv))

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, gate, b = self.in_proj(x).split(self.sizes, dim=-1)
        return qkv, gate, b

    def _operands(self, qkv: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qk, v = qkv.split([2 * self.h * self.dk, self.h * self.dv], dim=-1)
        if self.conv is None or self.conv.activation is None:
            qk, v = ACTIVATIONS[self.act](qk), F.silu(v)
        q, k = self.qk_norm(qk.float().unflatten(-1, (2 * self.h, -1))).chunk(2, dim=1)
        beta = b.float().sigmoid() if self.rate else torch.ones_like(q[..., 0])
        return q, k, v.unflatten(-1, (self.h, -1)), beta * 2 if self.negative else beta


@dataclass(frozen=True, kw_only=True)
class Config(frame.Frame):
    """flash-linear-attention's keys for model_type "delta_net". Its layer reads no `use_output_norm`: the
    output is always normed."""

    num_heads: int
    expand_k: float = 1.0
    expand_v: float = 1.0
    use_gate: bool = False
    use_short_conv: bool = True
    conv_size: int = 4
    allow_neg_eigval: bool = False
    use_beta: bool = True
    use_output_norm: bool = True
    qk_norm: str = "l2"
    qk_activation: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.spec  # raises for widths that the heads do not share evenly

    @property
    def spec(self) -> DeltaNetSpec:
        d, h = self.hidden_size, self.num_heads
        return DeltaNetSpec(
            heads=h,
            key_dim=frame.heads_of("expand_k", d * self.expand_k, h),
            value_dim=frame.heads_of("expand_v", d * self.expand_v, h),
            conv=self.conv_size if self.use_short_conv else 0,
            act=self.qk_activation,
            qk_norm=self.qk_norm,
            rate=self.use_beta,
            negative=self.allow_neg_eigval,
            gate=self.use_gate,
            norm_eps=self.norm_eps,
        )


def build(config: Config) -> Model:
    return frame.build(config, lambda i: DeltaNet(config.hidden_size, config.spec))


def weights(config: Config) -> list[Rule]:
    """flash-linear-attention's names to ours."""
    spec = config.spec
    h, keys, values = spec.heads, spec.heads * spec.key_dim, spec.heads * spec.value_dim
    parts = {"q": keys, "k": keys, "v": values, "g": values, "b": h}
    absent = ("" if spec.gate else "g") + ("" if spec.rate else "b")
    parts = {name: size for name, size in parts.items() if name not in absent}

    def mixer(source: str, ours: str) -> list[Rule]:
        projections = [f"{source}{p}_proj.weight" for p in parts]
        rules = [
            fuse(projections, ours + "in_proj.weight", list(parts.values())),
            same(source + "o_norm.weight", ours + "norm.weight"),
            same(source + "o_proj.weight", ours + "out_proj.weight"),
        ]
        if spec.conv:
            convs = [f"{source}{p}_conv1d.weight" for p in "qkv"]
            rules.append(frame.fuse_convs(convs, ours + "conv.weight", [keys, keys, values]))
        return rules

    return frame.weights(config, mixer)


ARCHITECTURE = Architecture("delta_net", Config, build, weights)

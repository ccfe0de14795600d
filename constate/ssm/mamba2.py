"""Mamba-2 (Dao & Gu, 2405.21060): a state-space model with one decay a head, which is linear attention.

h_t = exp(dt_t A) h_{t-1} + B_t (dt_t x_t)^T, y_t = C_t^T h_t + D x_t (equation 16 and section 7): the
gated linear scan with q = C, k = B, v = dt x. B and C come in groups that several heads share. Knows
two dialects of checkpoints: Hugging Face's and that of mamba_ssm, the original implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.architecture import Architecture
from ..core.cost import Cost, carried, linear_scan, matmul, read_weights
from ..core.decay import log_rates, step_bias
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.model import Block, Model
from ..core.norms import GatedRMSNorm, RMSNorm
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32
from ..core.weights import Rule, head, reshape, same
from .original import dialect

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class Mamba2Spec:
    """heads of head_dim channels, each with state_size states a channel; B and C shared within groups.
    `dt_limit` clamps the step size after softplus. What the state says is gated and then normed a group;
    with `norm_before` normed first, without `norm` only gated. `scales` multiply what the in-projection
    gives for z, x, B, C and dt. `out_bias` None: as `bias`."""

    heads: int
    head_dim: int
    state_size: int
    groups: int = 1
    conv: int = 4
    bias: bool = False
    conv_bias: bool = True
    act: str = "silu"
    dt_limit: tuple[float, float] = (0.0, math.inf)
    norm_eps: float = 1e-5
    norm: bool = True
    norm_before: bool = False
    scales: tuple[float, ...] | None = None
    out_bias: bool | None = None


class Mamba2(Mixer):
    """In-projection to gate, x, B, C and dt; convolution over x, B, C; scan; gated norm a group; out."""

    float32: ClassVar[frozenset[str]] = frozenset({"a_log", "dt_bias", "d"})
    scales: Tensor | None

    def __init__(self, d: int, spec: Mamba2Spec):
        super().__init__()
        self.h, self.p, self.s, self.g = spec.heads, spec.head_dim, spec.state_size, spec.groups
        if self.h % self.g:
            raise ValueError(f"{self.h} heads cannot share {self.g} groups of B and C evenly")
        self.inner, self.bc = self.h * self.p, self.g * self.s
        self.dt_limit = (float(spec.dt_limit[0]), float(spec.dt_limit[1]))
        self.in_proj = Linear(d, 2 * self.inner + 2 * self.bc + self.h, bias=spec.bias)
        width = self.inner + 2 * self.bc
        self.conv = ShortConv(width, spec.conv, bias=spec.conv_bias, activation=spec.act)
        self.a_log = nn.Parameter(log_rates(self.h))
        self.dt_bias = nn.Parameter(step_bias(self.h))
        self.d = nn.Parameter(torch.ones(self.h))
        self.norm = None
        if spec.norm:
            self.norm = GatedRMSNorm(self.inner, spec.norm_eps, groups=self.g, before=spec.norm_before)
        self.out_proj = Linear(self.inner, d, bias=spec.bias if spec.out_bias is None else spec.out_bias)
        scales = None
        if spec.scales is not None:
            if len(spec.scales) != 5:
                raise ValueError(f"scales {list(spec.scales)}: five are wanted, of z, x, B, C and dt")
            widths = (self.inner, self.inner, self.bc, self.bc, self.h)
            scales = torch.cat([torch.full((n,), m) for n, m in zip(widths, spec.scales, strict=True)])
        self.register_buffer("scales", scales, persistent=False)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        ssm = torch.zeros(rows, self.h, self.s, self.p, dtype=dtype, device=self.like.device)
        return ConvSSM(self.conv.init_history(rows), ssm)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        z, xbc, dt = self._enter(x)
        q, k, v, decay, x = self._operands(self.conv(xbc, call, conv), dt)
        o, final = call.ops.gated_linear_scan(q, k, v, decay, ssm, call.spans)
        if ssm is not None:
            ssm.copy_(final)
        return self._leave(o, x, z)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        z, xbc, dt = self._enter(x)
        q, k, v, decay, x = self._operands(self.conv.step(xbc, call, state.conv), dt)
        with in_float32(state.ssm) as ssm:
            o = call.ops.gated_linear_step(q, k, v, decay, ssm)
        return self._leave(o, x, z)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        y = self.in_proj.record(tape, x)
        y = y if self.scales is None else tape.activate("identity", y, self.scales)
        z, xbc, dt = y.split([self.inner, self.inner + 2 * self.bc, self.h], dim=-1)
        dt, decay = tape.decays(dt, self.dt_bias, tape.constant(self.a_log.exp()), self.dt_limit)
        xbc = self.conv.record(tape, xbc, state.conv)
        x, b, c = xbc.split([self.inner, self.bc, self.bc], dim=-1)
        o = tape.gated_linear(c, b, x, decay, state.ssm, heads=self.g, v_scale=dt, skip=self.d)
        y = tape.activate("silu", z, o) if self.norm is None else self.norm.record(tape, o, z)
        return self.out_proj.record(tape, y)

    def cost(self, new: int, past: int) -> Cost:
        flops = {
            "projection": matmul(new, self.in_proj, self.out_proj),
            "conv": self.conv.flops(new),
            "scan": linear_scan(new, self.h, self.s, self.p),
        }
        state = carried("state", 4 * self.h * self.s * self.p, new)
        history = carried("conv", self.conv.history_bytes, new)
        return Cost(flops, read_weights(*self.parameters())) + state + history

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        return {"in_proj": [slice(-self.h, None)]}  # dt

    @property
    def like(self) -> Tensor:
        return self.in_proj.like

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.in_proj(x)
        if self.scales is not None:
            y = (y * self.scales).to(y.dtype)
        z, xbc, dt = y.split([self.inner, self.inner + 2 * self.bc, self.h], dim=-1)
        return z, xbc, dt

    def _operands(self, xbc: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, b, c = xbc.split([self.inner, self.bc, self.bc], dim=-1)
        x, b, c = x.unflatten(-1, (self.h, -1)), b.unflatten(-1, (self.g, -1)), c.unflatten(-1, (self.g, -1))
        dt = F.softplus(dt.float() + self.dt_bias)
        if self.dt_limit != (0.0, math.inf):
            dt = dt.clamp(*self.dt_limit)
        return c, b, x * dt.unsqueeze(-1), -self.a_log.exp() * dt, x

    def _leave(self, o: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = torch.addcmul(o, x.to(o.dtype), self.d.unsqueeze(-1)).flatten(1)
        y = y * F.silu(z.float()) if self.norm is None else self.norm(y, z)
        return self.out_proj(y.to(z.dtype))


@dataclass(frozen=True)
class Config:
    """The keys of Hugging Face's config.json for model_type "mamba2"."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 8
    expand: float = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if len(self.time_step_limit) != 2:
            raise ValueError(f"time_step_limit {list(self.time_step_limit)}: a low and a high one are wanted")
        object.__setattr__(self, "time_step_limit", tuple(float(t) for t in self.time_step_limit))
        inner = self.num_heads * self.head_dim
        if inner != int(self.expand * self.hidden_size):
            raise ValueError(
                f"num_heads * head_dim is {inner}, expand * hidden_size {self.expand * self.hidden_size}: "
                "they must be equal"
            )

    @property
    def spec(self) -> Mamba2Spec:
        return Mamba2Spec(
            heads=self.num_heads,
            head_dim=self.head_dim,
            state_size=self.state_size,
            groups=self.n_groups,
            conv=self.conv_kernel,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            act=self.hidden_act,
            dt_limit=self.time_step_limit,
            norm_eps=self.layer_norm_epsilon,
        )


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.layer_norm_epsilon
    blocks = [Block(mixer=(RMSNorm(d, eps), Mamba2(d, config.spec))) for _ in range(config.num_hidden_layers)]
    return Model(
        config,
        blocks,
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
        residual_float32=config.residual_in_fp32,
    )


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    return [
        same("backbone.embeddings.weight", "embed.weight"),
        same("backbone.norm_f.weight", "norm.weight"),
        same("backbone.layers.{i}.norm.weight", "blocks.{i}.mixer_norm.weight"),
        *mixer_weights("backbone.layers.{i}.mixer.", "blocks.{i}.mixer.", config.spec),
        head("lm_head.weight", config.tie_word_embeddings),
    ]


def mixer_weights(source: str, ours: str, spec: Mamba2Spec) -> list[Rule]:
    """One mixer's tensors under `source` as Hugging Face calls them, ours under `ours`."""
    channels, width = spec.heads * spec.head_dim + 2 * spec.groups * spec.state_size, spec.conv
    out_bias = spec.bias if spec.out_bias is None else spec.out_bias
    rules = [
        same(source + "in_proj.weight", ours + "in_proj.weight"),
        same(source + "out_proj.weight", ours + "out_proj.weight"),
        reshape(source + "conv1d.weight", ours + "conv.weight", (channels, 1, width), (channels, width)),
        same(source + "A_log", ours + "a_log"),
        same(source + "dt_bias", ours + "dt_bias"),
        same(source + "D", ours + "d"),
    ]
    rules += [same(source + "norm.weight", ours + "norm.weight")] if spec.norm else []
    rules += [same(source + "conv1d.bias", ours + "conv.bias")] if spec.conv_bias else []
    rules += [same(source + "in_proj.bias", ours + "in_proj.bias")] if spec.bias else []
    return rules + ([same(source + "out_proj.bias", ours + "out_proj.bias")] if out_bias else [])


_ORIGINAL = {
    "d_state": ("state_size", 128),
    "d_conv": ("conv_kernel", 4),
    "expand": ("expand", 2),
    "headdim": ("head_dim", 64),
    "ngroups": ("n_groups", 1),
    "dt_limit": ("time_step_limit", (0.0, math.inf)),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}


def _heads(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"num_heads": int(raw["expand"] * raw["hidden_size"]) // raw["head_dim"]}


ARCHITECTURE = Architecture(
    "mamba2",
    Config,
    build,
    weights,
    dialects=(dialect("mamba2", "Mamba2", _ORIGINAL, ".mixer.dt_bias", weights, _heads),),
)

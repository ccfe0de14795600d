"""Mamba-2 (Dao & Gu, 2405.21060): a state-space model with one decay a head, which is linear attention.

h_t = exp(dt_t A) h_{t-1} + B_t (dt_t x_t)^T, y_t = C_t^T h_t + D x_t (equation 16 and section 7): the
gated linear scan with q = C, k = B, v = dt x. B and C come in groups that several heads share. Knows
two dialects of checkpoints: Hugging Face's and that of mamba_ssm, the original implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.architecture import Architecture
from ..core.cost import Cost, carried, linear_scan, matmul, read_weights
from ..core.decay import log_rates, step_bias
from ..core.mixer import Call, Mixer
from ..core.model import Block, Model
from ..core.norms import GatedRMSNorm, RMSNorm
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32
from ..core.weights import Rule, head, reshape, same
from .original import dialect


@dataclass(frozen=True)
class Mamba2Spec:
    """heads of head_dim channels, each with state_size states a channel; B and C shared within groups.
    `dt_limit` clamps the step size after softplus."""

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


class Mamba2(Mixer):
    """In-projection to gate, x, B, C and dt; convolution over x, B, C; scan; gated norm a group; out."""

    float32: ClassVar[frozenset[str]] = frozenset({"a_log", "dt_bias", "d"})

    def __init__(self, d: int, spec: Mamba2Spec):
        super().__init__()
        self.h, self.p, self.s, self.g = spec.heads, spec.head_dim, spec.state_size, spec.groups
        if self.h % self.g:
            raise ValueError(f"{self.h} heads cannot share {self.g} groups of B and C evenly")
        self.inner, self.bc = self.h * self.p, self.g * self.s
        self.dt_limit = (float(spec.dt_limit[0]), float(spec.dt_limit[1]))
        self.in_proj = nn.Linear(d, 2 * self.inner + 2 * self.bc + self.h, bias=spec.bias)
        width = self.inner + 2 * self.bc
        self.conv = ShortConv(width, spec.conv, bias=spec.conv_bias, activation=spec.act)
        self.a_log = nn.Parameter(log_rates(self.h))
        self.dt_bias = nn.Parameter(step_bias(self.h))
        self.d = nn.Parameter(torch.ones(self.h))
        self.norm = GatedRMSNorm(self.inner, spec.norm_eps, groups=self.g)
        self.out_proj = nn.Linear(self.inner, d, bias=spec.bias)

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

    def cost(self, new: int, past: int) -> Cost:
        flops = {
            "projection": matmul(new, self.in_proj.weight, self.out_proj.weight),
            "conv": self.conv.flops(new),
            "scan": linear_scan(new, self.h, self.s, self.p),
        }
        state = carried("state", 4 * self.h * self.s * self.p, new)
        history = carried("conv", self.conv.history_bytes, new)
        return Cost(flops, read_weights(*self.parameters())) + state + history

    @property
    def like(self) -> Tensor:
        return self.in_proj.weight

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, xbc, dt = self.in_proj(x).split([self.inner, self.inner + 2 * self.bc, self.h], dim=-1)
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
        return self.out_proj(self.norm(y, z).to(z.dtype))


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


def build(config: Config) -> Model:
    spec = Mamba2Spec(
        heads=config.num_heads,
        head_dim=config.head_dim,
        state_size=config.state_size,
        groups=config.n_groups,
        conv=config.conv_kernel,
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        act=config.hidden_act,
        dt_limit=config.time_step_limit,
        norm_eps=config.layer_norm_epsilon,
    )
    d, eps = config.hidden_size, config.layer_norm_epsilon
    blocks = [Block(mixer=(RMSNorm(d, eps), Mamba2(d, spec))) for _ in range(config.num_hidden_layers)]
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
    source, ours = "backbone.layers.{i}.mixer.", "blocks.{i}.mixer."
    channels = config.num_heads * config.head_dim + 2 * config.n_groups * config.state_size
    width = config.conv_kernel
    rules = [
        same("backbone.embeddings.weight", "embed.weight"),
        same("backbone.norm_f.weight", "norm.weight"),
        same("backbone.layers.{i}.norm.weight", "blocks.{i}.mixer_norm.weight"),
        same(source + "in_proj.weight", ours + "in_proj.weight"),
        same(source + "out_proj.weight", ours + "out_proj.weight"),
        reshape(source + "conv1d.weight", ours + "conv.weight", (channels, 1, width), (channels, width)),
        same(source + "A_log", ours + "a_log"),
        same(source + "dt_bias", ours + "dt_bias"),
        same(source + "D", ours + "d"),
        same(source + "norm.weight", ours + "norm.weight"),
    ]
    if config.use_conv_bias:
        rules.append(same(source + "conv1d.bias", ours + "conv.bias"))
    if config.use_bias:
        rules += [same(source + f"{p}.bias", ours + f"{p}.bias") for p in ("in_proj", "out_proj")]
    return [*rules, head("lm_head.weight", config.tie_word_embeddings)]


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

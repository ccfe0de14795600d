"""Mamba (Gu & Dao, 2312.00752): a selective state-space model with a decay for every channel and state.

h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t (algorithm 2), gated by SiLU(z). Knows
two dialects of checkpoints: Hugging Face's and that of mamba_ssm, the original implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.architecture import Architecture
from ..core.cost import Cost, carried, matmul, read_weights, selective_scan
from ..core.decay import step_bias
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.short_conv import ShortConv
from ..core.state import ConvSSM, State, in_float32
from ..core.weights import Rule, head, reshape, same
from .original import dialect

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class MambaSpec:
    """inner channels with state_size states each; dt comes from rank numbers a token (None: d / 16).
    With `norm_eps` those numbers, B and C are brought to length sqrt(width) first, as Falcon Mamba does;
    with `norm_weight` too each of the three norms has a weight, as Jamba's have."""

    inner: int
    state_size: int = 16
    rank: int | None = None
    conv: int = 4
    bias: bool = False
    conv_bias: bool = True
    act: str = "silu"
    norm_eps: float | None = None
    norm_weight: bool = False


class Mamba(Mixer):
    """In-projection to x and gate; convolution over x; dt, B and C from x; scan; out."""

    float32: ClassVar[frozenset[str]] = frozenset({"a_log", "dt_bias", "d"})

    def __init__(self, d: int, spec: MambaSpec):
        super().__init__()
        self.inner, self.s = spec.inner, spec.state_size
        self.rank = spec.rank or math.ceil(d / 16)
        self.norm_eps = spec.norm_eps
        self.in_proj = Linear(d, 2 * self.inner, bias=spec.bias)
        self.conv = ShortConv(self.inner, spec.conv, bias=spec.conv_bias, activation=spec.act)
        self.x_proj = Linear(self.inner, self.rank + 2 * self.s, bias=False)
        self.dt_proj = Linear(self.rank, self.inner, bias=False)
        self.norms = None
        if spec.norm_weight:
            if spec.norm_eps is None:
                raise ValueError("norm_weight without norm_eps: the norms of dt, B and C want both")
            widths = {"dt": self.rank, "b": self.s, "c": self.s}
            self.norms = nn.ModuleDict({name: RMSNorm(n, spec.norm_eps) for name, n in widths.items()})
        self.dt_bias = nn.Parameter(step_bias(self.inner))
        self.a_log = nn.Parameter(torch.arange(1, self.s + 1).float().log().repeat(self.inner, 1))
        self.d = nn.Parameter(torch.ones(self.inner))
        self.out_proj = Linear(self.inner, d, bias=spec.bias)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        ssm = torch.zeros(rows, self.inner, self.s, dtype=dtype, device=self.like.device)
        return ConvSSM(self.conv.init_history(rows), ssm)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        x, z = self._enter(x)
        x = self.conv(x, call, conv)
        dt, b, c = self._operands(x)
        o, final = call.ops.selective_scan(
            x, dt, -self.a_log.exp(), b, c, ssm, call.spans, d=self.d, z=z, dt_bias=self.dt_bias
        )
        if ssm is not None:
            ssm.copy_(final)
        return self.out_proj(o.to(z.dtype))

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        x, z = self._enter(x)
        x = self.conv.step(x, call, state.conv)
        dt, b, c = self._operands(x)
        with in_float32(state.ssm) as ssm:
            o = call.ops.selective_step(
                x, dt, -self.a_log.exp(), b, c, ssm, d=self.d, z=z, dt_bias=self.dt_bias
            )
        return self.out_proj(o.to(z.dtype))

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor | None:
        assert isinstance(state, ConvSSM)
        x, z = self.in_proj.record(tape, x).chunk(2, dim=-1)
        x = self.conv.record(tape, x, state.conv)
        low, b, c = self.x_proj.record(tape, x).split([self.rank, self.s, self.s], dim=-1)
        if self.norms is not None:
            parts = zip(self.norms.values(), (low, b, c), strict=True)
            low, b, c = (norm.record(tape, t) for norm, t in parts if isinstance(norm, RMSNorm))
        elif self.norm_eps is not None:
            low, b, c = (tape.gated_norm(t, None, None, self.norm_eps) for t in (low, b, c))
        dt, a = self.dt_proj.record(tape, low), tape.constant(-self.a_log.exp())
        o = tape.selective(x, dt, a, b, c, state.ssm, d=self.d, z=z, dt_bias=self.dt_bias)
        return self.out_proj.record(tape, o)

    def cost(self, new: int, past: int) -> Cost:
        projections = (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)
        flops = {
            "projection": matmul(new, *projections),
            "conv": self.conv.flops(new),
            "scan": selective_scan(new, self.inner, self.s),
        }
        state = carried("state", 4 * self.inner * self.s, new) + carried("conv", self.conv.history_bytes, new)
        return Cost(flops, read_weights(*self.parameters())) + state

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        return {"x_proj": [slice(None)], "dt_proj": [slice(None)]}

    @property
    def like(self) -> Tensor:
        return self.in_proj.like

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, z = self.in_proj(x).chunk(2, dim=-1)
        return x, z

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, b, c = self.x_proj(x).split([self.rank, self.s, self.s], dim=-1)
        if self.norms is not None:
            low, b, c = self.norms["dt"](low), self.norms["b"](b), self.norms["c"](c)
        elif self.norm_eps is not None:
            low, b, c = (_normed(t, self.norm_eps) for t in (low, b, c))
        return self.dt_proj(low), b, c


def _normed(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


@dataclass(frozen=True)
class Config:
    """The keys of Hugging Face's config.json for model_type "mamba". `intermediate_size` wins over
    `expand`; a `time_step_rank` of "auto" is a sixteenth of hidden_size, rounded up."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    state_size: int = 16
    expand: float = 2
    intermediate_size: int | None = None
    conv_kernel: int = 4
    time_step_rank: int | str = "auto"
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.time_step_rank, str) and self.time_step_rank != "auto":
            raise ValueError(f"time_step_rank {self.time_step_rank!r}: a whole number or 'auto' is wanted")

    @property
    def inner(self) -> int:
        return self.intermediate_size or int(self.expand * self.hidden_size)

    @property
    def spec(self) -> MambaSpec:
        return MambaSpec(
            inner=self.inner,
            state_size=self.state_size,
            rank=None if isinstance(self.time_step_rank, str) else self.time_step_rank,
            conv=self.conv_kernel,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            act=self.hidden_act,
        )


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.layer_norm_epsilon
    blocks = [Block(mixer=(RMSNorm(d, eps), Mamba(d, config.spec))) for _ in range(config.num_hidden_layers)]
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


def mixer_weights(source: str, ours: str, spec: MambaSpec) -> list[Rule]:
    """One mixer's tensors under `source` as Hugging Face calls them, ours under `ours`."""
    channels, width = spec.inner, spec.conv
    rules = [
        *(same(source + f"{p}.weight", ours + f"{p}.weight") for p in _PROJECTIONS),
        reshape(source + "conv1d.weight", ours + "conv.weight", (channels, 1, width), (channels, width)),
        same(source + "A_log", ours + "a_log"),
        same(source + "dt_proj.bias", ours + "dt_bias"),
        same(source + "D", ours + "d"),
    ]
    if spec.conv_bias:
        rules.append(same(source + "conv1d.bias", ours + "conv.bias"))
    if spec.bias:
        rules += [same(source + f"{p}.bias", ours + f"{p}.bias") for p in ("in_proj", "out_proj")]
    if spec.norm_weight:
        norms = ("dt", "b", "c")
        rules += [same(source + f"{p}_layernorm.weight", ours + f"norms.{p}.weight") for p in norms]
    return rules


_PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj")
_ORIGINAL = {
    "d_state": ("state_size", 16),
    "d_conv": ("conv_kernel", 4),
    "expand": ("expand", 2),
    "dt_rank": ("time_step_rank", "auto"),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}
ARCHITECTURE = Architecture(
    "mamba",
    Config,
    build,
    weights,
    dialects=(dialect("mamba", "Mamba1", _ORIGINAL, ".mixer.x_proj.weight", weights),),
)

"""RWKV-7 (Peng et al., 2503.14456): a delta rule whose state decays and is corrected channel by channel.

S_t = diag(w_t) S_{t-1} - kappa_t a_t (kappa_t^T S_{t-1}) + k_t v_t^T, o_t = S_t^T r_t (equations 4-19; the
paper writes S transposed): kappa is a key of unit length along which the state before the decay is read and
a part of it, a (a rate for each channel), removed. Every branch sees its token mixed with the one before
(token shift), the channel mix, an MLP, too: so it has a state. Decay, rate, gate and the share of the first
layer's value come from low-rank projections. The first layer's value waits in `call.shared`.

Departures: the token shift is the house's short convolution of width 2; key and value dimensions of a head
may differ, as in flash-linear-attention, whose config this is. The names in a checkpoint, its and BlinkDL's
own, are in rwkv7_names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.architecture import Architecture, Dialect
from ..core.cost import Cost, carried, dplr_scan, matmul, read_weights
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.model import Block, Model
from ..core.norms import GroupNorm, LayerNorm, unit
from ..core.state import Conv, ConvSSM, State, in_float32
from ..core.weights import Rule
from .rwkv7_names import blinkdl, config_of, fla, rwkv_cpp

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape

STRONGEST = -0.6065306597126334
"""The log-decay that the sigmoid approaches, -exp(-1/2): no channel loses more than 46% a token."""


@dataclass(frozen=True)
class RWKV7Spec:
    """heads of key_dim and value_dim channels, and the ranks of the four projections. value_rank 0 keeps
    the layer's own value: the model's first layer does, and leaves it to the later ones. `kappa_eps` stands
    under the root of the removal key's length."""

    heads: int
    key_dim: int
    value_dim: int
    decay_rank: int = 64
    rate_rank: int = 64
    gate_rank: int = 128
    value_rank: int = 0
    norm_eps: float = 64e-5
    kappa_eps: float = 1e-24


class LowRank(nn.Module):
    """bias + up(act(down(x))); with a bias it is float32, what a sigmoid then makes a decay or a rate of."""

    float32: ClassVar[frozenset[str]] = frozenset({"bias"})

    def __init__(self, d: int, rank: int, out: int, bias: Tensor | None = None):
        super().__init__()
        self.down, self.up = Linear(d, rank, bias=False), Linear(rank, out, bias=False)
        nn.init.zeros_(self.down.weight)
        nn.init.orthogonal_(self.up.weight, gain=0.1)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor, act: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
        y = self.up(act(self.down(x)))
        return y if self.bias is None else y.float() + self.bias


class TokenShift(nn.Module):
    """The token before minus this one, zeros before the first; its history (rows, 1, d) is that token."""

    taps: Tensor

    def __init__(self, d: int):
        super().__init__()
        self.register_buffer("taps", torch.tensor([1.0, -1.0]).repeat(d, 1), persistent=False)

    def init_history(self, rows: int, like: Tensor) -> Tensor:
        return like.new_zeros(rows, 1, self.taps.shape[0], requires_grad=False)

    def forward(self, x: Tensor, call: Call, history: Tensor | None = None) -> Tensor:
        delta, final = call.ops.short_conv(x, self.taps, None, history, call.spans, activation=None)
        if history is not None:
            history.copy_(final)
        return delta

    def step(self, x: Tensor, call: Call, history: Tensor) -> Tensor:
        return call.ops.short_conv_step(x, self.taps, None, history, activation=None)

    def record(self, tape: Tape, x: Tensor, history: Tensor, mix: Tensor) -> Sequence[Tensor]:
        """Written onto a tape: x mixed with the token before, mix (d,) or (i, d), one result for each i."""
        return tape.mixtures(x, history, tape.constant(mix.view(-1, x.shape[1])))

    def cost(self, new: int, itemsize: int) -> Cost:
        d = self.taps.shape[0]
        return Cost({"conv": 2 * new * self.taps.numel()}) + carried("conv", d * itemsize, new)


class TimeMix(Mixer):
    """Token shift; r, k, v and four low-rank projections; scan; norm a head, bonus, gate; out."""

    float32: ClassVar[frozenset[str]] = frozenset({"kappa_scale", "rate_share", "bonus"})

    def __init__(self, d: int, spec: RWKV7Spec):
        super().__init__()
        self.h, self.dk, self.dv = spec.heads, spec.key_dim, spec.value_dim
        keys, values = self.h * self.dk, self.h * self.dv
        self.kappa_eps = spec.kappa_eps
        ramp = torch.arange(d) / d  # the published initialisation, of a middle layer
        self.mix = nn.Parameter(torch.stack([1 - ramp ** (p / 2) for p in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]))
        self.shift = TokenShift(d)
        self.r_proj, self.k_proj = Linear(d, keys, bias=False), Linear(d, keys, bias=False)
        self.v_proj, self.out_proj = Linear(d, values, bias=False), Linear(values, d, bias=False)
        self.decay = LowRank(d, spec.decay_rank, keys, 6 * torch.linspace(0, 1, keys) ** 1.8 - 5.5)
        self.rate = LowRank(d, spec.rate_rank, keys, torch.full((keys,), -0.19))
        self.gate = LowRank(d, spec.gate_rank, values)
        share = torch.full((values,), 0.73)
        self.share = LowRank(d, spec.value_rank, values, share) if spec.value_rank else None
        self.kappa_scale = nn.Parameter(torch.full((keys,), 0.71))
        self.rate_share = nn.Parameter(torch.full((keys,), 1.02))
        self.bonus = nn.Parameter(torch.full((self.h, self.dk), -0.04))
        self.norm = GroupNorm(values, self.h, spec.norm_eps)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        ssm = torch.zeros(rows, self.h, self.dk, self.dv, dtype=dtype, device=self.like.device)
        return ConvSSM(self.shift.init_history(rows, self.like), ssm)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        conv, ssm = (state.conv, state.ssm) if isinstance(state, ConvSSM) else (None, None)
        r, k, v, decay, a, b, gate = self._operands(x, self.shift(x, call, conv), call)
        o, final = call.ops.dplr_delta_scan(r, k, v, decay, a, b, ssm, call.spans)
        del decay, a, b  # three of a long prompt's widest
        if ssm is not None:
            ssm.copy_(final)
        return self._leave(o, r, k, v, gate)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        r, k, v, decay, a, b, gate = self._operands(x, self.shift.step(x, call, state.conv), call)
        with in_float32(state.ssm) as ssm:
            o = call.ops.dplr_delta_step(r, k, v, decay, a, b, ssm)
        return self._leave(o, r, k, v, gate)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, ConvSSM)
        mixed = self.shift.record(tape, x, state.conv, self.mix)
        ranks = [self.decay, self.rate, self.gate] + ([] if self.share is None else [self.share])
        with tape.side_by_side():
            r, k, v = (
                m.record(tape, mixed[i])
                for m, i in zip((self.r_proj, self.k_proj, self.v_proj), (0, 2, 3), strict=True)
            )
            lows = [m.down.record(tape, mixed[i]) for m, i in zip(ranks, (1, 4, 5, 3), strict=False)]
        with tape.side_by_side():
            lows[0], lows[2] = tape.activate("tanh", lows[0]), tape.activate("sigmoid", lows[2])
        with tape.side_by_side():
            ups = zip(ranks, lows, strict=True)
            decay, rate, gate, *share = (m.up.record(tape, low, m.bias) for m, low in ups)
        first = tape.shared.setdefault(TimeMix, v) if self.share is None else _first(tape.shared)
        reads = tape.delta_operands(
            decay,
            rate,
            k,
            v,
            self.h,
            mixed=(share[0], first) if share else None,
            kappa_scale=tape.constant(self.kappa_scale),
            rate_share=tape.constant(self.rate_share),
            strongest=STRONGEST,
            eps=self.kappa_eps,
        )
        o = tape.dplr_delta(r, k, v, decay, reads, rate, state.ssm)
        norm = {"weight": self.norm.weight, "bias": self.norm.bias, "eps": self.norm.eps}
        tape.delta_leave(o, r, k, v, gate, self.h, bonus=tape.constant(self.bonus), **norm)
        return self.out_proj.record(tape, o)

    @property
    def exact(self) -> Mapping[str, Sequence[slice]]:
        made = ("decay", "rate", "share") if self.share is not None else ("decay", "rate")
        return {f"{part}.{end}": [slice(None)] for part in made for end in ("down", "up")}

    def cost(self, new: int, past: int) -> Cost:
        matrices = [m for m in self.modules() if isinstance(m, Linear)]
        flops = {"projection": matmul(new, *matrices), "scan": dplr_scan(new, self.h, self.dk, self.dv)}
        state = carried("state", 4 * self.h * self.dk * self.dv, new)
        return (
            Cost(flops, read_weights(*self.parameters())) + state + self.shift.cost(new, self.like.itemsize)
        )

    @property
    def like(self) -> Tensor:
        return self.r_proj.like

    def _operands(self, x: Tensor, delta: Tensor, call: Call) -> tuple[Tensor, ...]:
        """r, k (n, h, dk), v (n, h, dv), decay, a, b (n, h, dk) float32 but for v; the gate (n, h * dv)."""

        def mixed(i: int) -> Tensor:  # one at a time: of a long prompt six are much memory
            return torch.addcmul(x, delta, self.mix[i])

        r, k, v = self.r_proj(mixed(0)).float(), self.k_proj(mixed(2)).float(), self._value(mixed(3), call)
        decay = STRONGEST * self.decay(mixed(1), torch.tanh).sigmoid()
        rate, gate = self.rate(mixed(4)).sigmoid(), self.gate(mixed(5), torch.sigmoid)
        kappa = unit((k * self.kappa_scale).unflatten(-1, (self.h, -1)), self.kappa_eps)
        k = k * (1 + (rate - 1) * self.rate_share)
        r, k, v, decay, rate = (t.unflatten(-1, (self.h, -1)) for t in (r, k, v, decay, rate))
        return r, k, v, decay, -kappa, kappa * rate, gate

    def _value(self, x: Tensor, call: Call) -> Tensor:
        """v as it is where no share is learned, elsewhere mixed with that of the first such layer."""
        v = self.v_proj(x)
        if self.share is None:
            call.shared.setdefault(TimeMix, v)
            return v
        return torch.lerp(v.float(), _first(call.shared).float(), self.share(x).sigmoid()).to(v.dtype)

    def _leave(self, o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        bonus = (r * k * self.bonus).sum(-1, keepdim=True)
        o = torch.addcmul(self.norm(o.flatten(1)).view_as(v), bonus, v).flatten(1)
        return self.out_proj((o * gate).to(gate.dtype))


def _first(shared: Mapping[Any, Any]) -> Tensor:
    """The first layer's value, from what layers of one call leave for one another."""
    if TimeMix not in shared:
        raise ValueError("no RWKV-7 layer before this one left its value: the first has value_rank 0")
    return shared[TimeMix]


class ChannelMix(Mixer):
    """down(relu(up(token shift))^2): an MLP that sees the token before, so that it has a state."""

    def __init__(self, d: int, width: int):
        super().__init__()
        self.mix = nn.Parameter(1 - (torch.arange(d) / d) ** 0.5)
        self.shift = TokenShift(d)
        self.up, self.down = Linear(d, width, bias=False), Linear(width, d, bias=False)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return Conv(self.shift.init_history(rows, self.like))

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        return self._mlp(x, self.shift(x, call, state.conv if isinstance(state, Conv) else None))

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, Conv)
        return self._mlp(x, self.shift.step(x, call, state.conv))

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, Conv)
        (mixed,) = self.shift.record(tape, x, state.conv, self.mix)
        return self.down.record(tape, tape.activate("relu2", self.up.record(tape, mixed)))

    def cost(self, new: int, past: int) -> Cost:
        mlp = Cost({"mlp": matmul(new, self.up, self.down)}, read_weights(*self.parameters()))
        return mlp + self.shift.cost(new, self.like.itemsize)

    @property
    def like(self) -> Tensor:
        return self.up.like

    def _mlp(self, x: Tensor, delta: Tensor) -> Tensor:
        return self.down(F.relu(self.up(torch.addcmul(x, delta, self.mix))).square())


@dataclass(frozen=True, kw_only=True)
class Config:
    """The keys of flash-linear-attention's config.json for model_type "rwkv7". `fuse_norm` counts here: its
    fused norm of the removal key has another eps."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    head_dim: int | None = 64
    num_heads: int | None = None
    value_dim: int | Sequence[int] | None = None
    hidden_ratio: int | float | None = 4
    intermediate_size: int | None = None
    decay_low_rank_dim: int = 64
    gate_low_rank_dim: int = 128
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 16
    hidden_act: str = "sqrelu"
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    fuse_norm: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.hidden_act != "sqrelu":
            raise ValueError(f"hidden_act {self.hidden_act!r}: 'sqrelu' is what RWKV-7 has")
        d, h, dims = self.hidden_size, self.heads, self.values
        if self.head_dim is not None and h * self.head_dim != d:
            raise ValueError(f"num_heads {h} of head_dim {self.head_dim} are not hidden_size {d}")
        if d % h or any(v % h for v in dims):
            raise ValueError(f"hidden_size {d} and value_dim {list(dims)} are not shared evenly by {h} heads")
        if len(dims) != self.num_hidden_layers or len(set(dims)) != 1:
            raise ValueError(
                f"value_dim {list(dims)}: one for all layers, since all mix with the first's value"
            )

    @property
    def heads(self) -> int:
        return self.num_heads or self.hidden_size // (self.head_dim or self.hidden_size)

    @property
    def values(self) -> tuple[int, ...]:
        """value_dim of each layer."""
        value = self.value_dim or self.hidden_size
        return (value,) * self.num_hidden_layers if isinstance(value, int) else tuple(value)

    @property
    def width(self) -> int:
        """The channel mix's hidden width: given, or hidden_ratio times the model's, rounded up to 32s."""
        return self.intermediate_size or -(-int(self.hidden_size * (self.hidden_ratio or 4)) // 32) * 32

    def spec(self, layer: int) -> RWKV7Spec:
        dk = self.hidden_size // self.heads
        return RWKV7Spec(
            heads=self.heads,
            key_dim=dk,
            value_dim=self.values[layer] // self.heads,
            decay_rank=self.decay_low_rank_dim,
            rate_rank=self.a_low_rank_dim,
            gate_rank=self.gate_low_rank_dim,
            value_rank=self.v_low_rank_dim if layer else 0,
            norm_eps=dk * self.norm_eps,
            kappa_eps=1e-6 if self.fuse_norm else 1e-24,
        )


def build(config: Config) -> Model:
    d = config.hidden_size

    def norm() -> LayerNorm:
        return LayerNorm(d, config.norm_eps, bias=config.norm_bias)

    return Model(
        config,
        [
            Block(mixer=(norm(), TimeMix(d, config.spec(i))), mlp=(norm(), ChannelMix(d, config.width)))
            for i in range(config.num_hidden_layers)
        ],
        norm(),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
        embed_norm=norm() if config.norm_first else None,
    )


def _dialect(name: str, mix: str, rules: Callable[[Any], Sequence[Rule]]) -> Dialect:
    def spoken(raw: Mapping[str, Any], names: Collection[str]) -> bool:
        return {f"blocks.0.att.{mix}", "blocks.0.att.r_k"} <= set(names)

    return Dialect(name, spoken, config_of, rules, signs=f"tensors blocks.0.att.{mix} and blocks.0.att.r_k")


ARCHITECTURE = Architecture(
    "rwkv7",
    Config,
    build,
    fla,
    dialects=(_dialect("blinkdl", "x_r", blinkdl), _dialect("rwkv.cpp", "x_rwkvag", rwkv_cpp)),
)

"""Linear attention with a recurrent state (Katharopoulos et al., 2006.16236).

S_t = S_{t-1} + phi(k_t) v_t^T, o_t = S_t^T phi(q_t), and with the normaliser divided by z_t . phi(q_t),
z_t = z_{t-1} + phi(k_t) (equations 18 to 20). The key sum z is one more column of S: v carries a 1 behind
its channels, so whatever is done to the state is done to both. Departures: q, k, v are one product; the
output is normed a head, as flash-linear-attention does, unless `output_norm` is off. The config and the
names are flash-linear-attention's; its learned feature maps (hedgehog, t2r, elementwise_product) and dpfp
are not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.architecture import Architecture
from ..core.cost import Cost, carried, linear_scan, matmul, read_weights
from ..core.feature_maps import feature_map
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.model import Model
from ..core.norms import RMSNorm
from ..core.state import Matrix, State, in_float32
from ..core.weights import Rule, fuse, same
from . import frame

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class LinearAttentionSpec:
    """heads query heads with key_dim channels before the map and value_dim; kv_heads (None: as many) of
    k and v, each for a group of queries. `normaliser` divides by the key sum, plus eps. unit_q and unit_k
    scale mapped features to a sum of 1."""

    heads: int
    key_dim: int
    value_dim: int
    kv_heads: int | None = None
    feature_map: str = "elu"
    normaliser: bool = True
    eps: float = 1e-10
    unit_q: bool = False
    unit_k: bool = False
    output_norm: bool = True
    norm_eps: float = 1e-5


class LinearAttention(Mixer):
    """One in-projection to q, k, v; feature map; scan without decay; division; norm; out."""

    def __init__(self, d: int, spec: LinearAttentionSpec):
        super().__init__()
        self.h, self.hk, self.spec = spec.heads, spec.kv_heads or spec.heads, spec
        if self.h % self.hk:
            raise ValueError(f"{self.h} query heads cannot share {self.hk} key/value heads evenly")
        if spec.feature_map == "unit" and (spec.unit_q or spec.unit_k):
            raise ValueError("feature map 'unit' norms q and k already: unit_q and unit_k would do so again")
        self.map = feature_map(spec.feature_map)
        self.dk, self.dv = self.map.width(spec.key_dim), spec.value_dim
        self.columns = self.dv + spec.normaliser
        self.qkv = [self.h * spec.key_dim, self.hk * spec.key_dim, self.hk * self.dv]
        self.in_proj = Linear(d, sum(self.qkv), bias=False)
        self.norm = RMSNorm(self.dv, spec.norm_eps) if spec.output_norm else None
        self.out_proj = Linear(self.h * self.dv, d, bias=False)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        held = (rows, self.h, self.dk, self.columns)
        return Matrix(torch.zeros(held, dtype=dtype, device=self.like.device))

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        s = state.s if isinstance(state, Matrix) else None
        q, k, v = self._operands(x)
        o, final = call.ops.gated_linear_scan(q, k, v, None, s, call.spans, scale=self.dk**-0.5)
        if s is not None:
            s.copy_(final)
        return self._leave(o, x)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, Matrix)
        q, k, v = self._operands(x)
        with in_float32(state.s) as s:
            o = call.ops.gated_linear_step(q, k, v, None, s, scale=self.dk**-0.5)
        return self._leave(o, x)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, Matrix)
        spec, group = self.spec, self.h // self.hk
        q, k, v = self.in_proj.record(tape, x).split(self.qkv, dim=-1)
        summed, kind, always = {"norm": "sum", "eps": 1e-4}, spec.feature_map, {}
        if kind == "unit":
            kind, always = "identity", {"norm": "length", "eps": 1e-6}
        with tape.side_by_side():
            q = tape.features(kind, q, self.h, **(summed if spec.unit_q else always))
            k = tape.features(kind, k, self.hk, group=group, **(summed if spec.unit_k else always))
            v = tape.features("identity", v, self.hk, group=group, ones=int(spec.normaliser))
        o = tape.gated_linear(q, k, v, None, state.s, heads=self.h, scale=self.dk**-0.5)
        o = tape.divide(o, self.h, spec.eps) if spec.normaliser else o
        if self.norm is not None:
            o = tape.gated_norm(o, None, tape.constant(self.norm.whole), self.norm.eps, groups=self.h)
        return self.out_proj.record(tape, o)

    def cost(self, new: int, past: int) -> Cost:
        flops = {
            "projection": matmul(new, self.in_proj, self.out_proj),
            "scan": linear_scan(new, self.h, self.dk, self.columns),
        }
        state = carried("state", 4 * self.h * self.dk * self.columns, new)
        return Cost(flops, read_weights(*self.parameters())) + state

    @property
    def like(self) -> Tensor:
        return self.in_proj.like

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.in_proj(x).split(self.qkv, dim=-1)
        q, k = self.map(q.unflatten(-1, (self.h, -1))), self.map(k.unflatten(-1, (self.hk, -1)))
        q, k = _summed(q) if self.spec.unit_q else q, _summed(k) if self.spec.unit_k else k
        v = v.float().unflatten(-1, (self.hk, -1))
        if self.spec.normaliser:
            v = F.pad(v, (0, 1), value=1.0)
        if self.hk != self.h:
            k, v = (t.repeat_interleave(self.h // self.hk, 1) for t in (k, v))
        return q, k, v

    def _leave(self, o: Tensor, x: Tensor) -> Tensor:
        if self.spec.normaliser:
            o, z = o.split([self.dv, 1], dim=-1)
            o = o / (z + self.spec.eps)
        if self.norm is not None:
            o = self.norm(o)
        return self.out_proj(o.flatten(1).to(x.dtype))


def _summed(x: Tensor) -> Tensor:
    return x / (x.sum(-1, keepdim=True) + 1e-4)


@dataclass(frozen=True, kw_only=True)
class Config(frame.Frame):
    """flash-linear-attention's keys for model_type "linear_attn"."""

    num_heads: int
    num_kv_heads: int | None = None
    expand_k: float = 1.0
    expand_v: float = 1.0
    feature_map: str = "elementwise_product"
    tie_feature_map_qk: bool = False
    norm_q: bool = False
    norm_k: bool = False
    norm_feature_map: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_map == "taylor":
            raise ValueError("feature_map 'taylor' is none of this format's; model_type 'based' has it")
        feature_map(self.feature_map)
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        _ = self.spec  # raises for widths that the heads do not share evenly

    @property
    def spec(self) -> LinearAttentionSpec:
        d, h = self.hidden_size, self.num_heads
        return LinearAttentionSpec(
            heads=h,
            key_dim=frame.heads_of("expand_k", d * self.expand_k, h),
            value_dim=frame.heads_of("expand_v", d * self.expand_v, h),
            kv_heads=self.num_kv_heads,
            feature_map=self.feature_map,
            normaliser=self.norm_feature_map,
            unit_q=self.norm_q,
            unit_k=self.norm_k,
            norm_eps=self.norm_eps,
        )


def build(config: Config) -> Model:
    return frame.build(config, lambda i: LinearAttention(config.hidden_size, config.spec))


def weights(config: Config) -> list[Rule]:
    """flash-linear-attention's names to ours."""
    return frame.weights(config, lambda source, ours: mixer_weights(config.spec, source, ours))


def mixer_weights(spec: LinearAttentionSpec, source: str, ours: str) -> list[Rule]:
    """The rules of one mixer, from the two prefixes of its names."""
    h, hk = spec.heads, spec.kv_heads or spec.heads
    qkv = [h * spec.key_dim, hk * spec.key_dim, hk * spec.value_dim]
    rules = [
        fuse([f"{source}{p}_proj.weight" for p in "qkv"], ours + "in_proj.weight", qkv),
        same(source + "o_proj.weight", ours + "out_proj.weight"),
    ]
    return [*rules, same(source + "norm.weight", ours + "norm.weight")] if spec.output_norm else rules


ARCHITECTURE = Architecture("linear_attn", Config, build, weights)

"""Zamba2 (Glorioso et al., 2411.15242): Mamba-2 layers, some of which first ask a shared transformer block.

Its odd points:
- A few blocks of attention and MLP serve all hybrid layers in turn (A, B, A, B, ...): their weights are
  shared, keys and values are not; each use has its own state.
- A block reads the layer's input beside the embedding of the token, 2 d channels: its norm and its q, k and v
  are that wide, a head has 2 d / heads channels, and scores are scaled by (head_dim / 2) ** -0.5.
- Inside a block nothing is added to its input: norm, attention, norm, MLP. What it says goes through the
  layer's own `linear` and is added to what the Mamba-2's norm reads, and not to the residual stream.
- Each use has its own low-rank adapter to the MLP's gate and up projection and, if the config says so, to
  q, k and v. Rotary positions only where `use_mem_rope`.
- The step size is never less than `time_step_min`, and the gated norm's eps is 1e-5, whatever the others'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.adapted import Adapted
from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.cost import Cost, matmul, read_weights
from ..core.linear import Linear
from ..core.mixer import Call, Mixer
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.state import Nothing, Parts, State
from ..ssm.mamba2 import Mamba2, Mamba2Spec
from .transformer import either_dialect
from .zamba2_names import weights

if TYPE_CHECKING:
    from ..kernels.native.tape import Tape


@dataclass(frozen=True)
class Config:
    """The keys of Hugging Face's config.json for model_type "zamba2". Without `layers_block_type` the layers
    are those of Zamba2-2.7B. The last six follow from others and must agree with them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_mamba_heads: int
    layers_block_type: tuple[str, ...] | None = None
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    rms_norm_eps: float = 1e-5
    add_bias_linear: bool = False
    num_mem_blocks: int = 1
    adapter_rank: int = 128
    use_shared_attention_adapter: bool = False
    use_shared_mlp_adapter: bool = True
    use_mem_rope: bool = False
    use_long_context: bool = False
    use_conv_bias: bool = True
    rope_parameters: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    max_position_embeddings: int = 4096
    mamba_d_state: int = 64
    mamba_d_conv: int = 4
    mamba_expand: float = 2
    mamba_ngroups: int = 1
    time_step_min: float = 0.001
    tie_word_embeddings: bool = True
    attention_hidden_size: int | None = None
    attention_head_dim: int | None = None
    mamba_headdim: int | None = None
    kv_channels: int | None = None
    num_query_groups: int | None = None
    hybrid_layer_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        d, h = self.hidden_size, self.num_attention_heads
        if unknown := sorted(set(self.kinds) - {"mamba", "hybrid"}):
            raise ValueError(f"layers_block_type has {unknown}; known are linear_attention and hybrid")
        if len(self.kinds) != self.num_hidden_layers:
            raise ValueError(
                f"layers_block_type lists {len(self.kinds)} layers, num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        derived = {
            "attention_hidden_size": 2 * d,
            "attention_head_dim": 2 * d // h,
            "mamba_headdim": self.ssm.head_dim,
            "kv_channels": d // h,
            "num_query_groups": h,
            "hybrid_layer_ids": self.hybrids,
        }
        for name, wanted in derived.items():
            if (given := getattr(self, name)) not in (None, wanted):
                raise ValueError(f"{name} {given} where the other keys say {wanted}")
        for name, heads in (("num_attention_heads", h), ("n_mamba_heads", self.n_mamba_heads)):
            width = 2 * d if name == "num_attention_heads" else int(self.mamba_expand * d)
            if width % heads:
                raise ValueError(f"{name} {heads} cannot share {width} channels evenly")
        if self.use_long_context:
            raise ValueError("use_long_context: versions of transformers disagree on how it turns positions")
        if not self.use_shared_mlp_adapter:
            raise ValueError("use_shared_mlp_adapter false: every known model adapts the MLP")
        if not self.use_conv_bias:
            raise ValueError("use_conv_bias false: published models have the bias whatever this key says")
        if self.num_mem_blocks < 1:
            raise ValueError(f"num_mem_blocks {self.num_mem_blocks}: at least one shared block is wanted")
        if self.use_shared_attention_adapter and self.num_key_value_heads not in (None, h):
            raise ValueError("use_shared_attention_adapter wants as many key/value heads as query heads")

    @property
    def kinds(self) -> tuple[str, ...]:
        """ "mamba" or "hybrid" for each layer."""
        mamba, hybrid = ("mamba",), ("hybrid",)
        default = mamba + (mamba * 5 + hybrid) * 7 + mamba * 4 + hybrid + mamba * 3 + hybrid + mamba * 2
        return tuple("mamba" if k == "linear_attention" else k for k in self.layers_block_type or default)

    @property
    def hybrids(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "hybrid")

    @property
    def ssm(self) -> Mamba2Spec:
        return Mamba2Spec(
            heads=self.n_mamba_heads,
            head_dim=int(self.mamba_expand * self.hidden_size) // self.n_mamba_heads,
            state_size=self.mamba_d_state,
            groups=self.mamba_ngroups,
            conv=self.mamba_d_conv,
            bias=self.add_bias_linear,
            dt_limit=(self.time_step_min, math.inf),
            norm_eps=1e-5,
        )

    @property
    def attention(self) -> AttentionSpec:
        head_dim = 2 * self.hidden_size // self.num_attention_heads
        rope = either_dialect(self.rope_parameters, self.rope_theta, None)
        return AttentionSpec(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=head_dim,
            rope=rope if self.use_mem_rope else None,
            max_positions=self.max_position_embeddings,
            scale=(head_dim / 2) ** -0.5,
        )

    @property
    def width(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size


class Hybrid(Mixer):
    """mamba(mamba_norm(x + linear(block(x beside the embedding)))). The block's weights are those of
    `before`, an earlier layer that uses the same block, if there is one."""

    def __init__(self, config: Config, before: Hybrid | None = None):
        super().__init__()
        d, eps, rank = config.hidden_size, config.rms_norm_eps, config.adapter_rank
        self.attention = Attention(2 * d, config.attention, d)
        self.mlp = GatedMLP(d, config.width, act=config.hidden_act, bias=config.add_bias_linear)
        self.attention_norm = RMSNorm(2 * d, eps) if before is None else before.attention_norm
        self.mlp_norm = RMSNorm(d, eps) if before is None else before.mlp_norm
        of = before or self
        self.attention.out, self.mlp.down = of.attention.out, of.mlp.down
        qkv, gate_up = _base(of.attention.qkv), _base(of.mlp.gate_up)
        adapted = config.use_shared_attention_adapter
        self.attention.add_module("qkv", Adapted(qkv, rank, parts=3) if adapted else qkv)
        self.mlp.add_module("gate_up", Adapted(gate_up, rank))
        self.linear = Linear(d, d, bias=False)
        self.mamba_norm = RMSNorm(d, eps)
        self.mamba = Mamba2(d, config.ssm)

    def init_state(self, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> State:
        return Parts(tuple(m.init_state(rows, capacity, dtype) for m in (self.attention, self.mamba)))

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        kv, ssm = state.parts if isinstance(state, Parts) else (None, None)
        said = self.attention(self._beside(x, call), call, kv)
        return self.mamba(self._with(x, said, call), call, ssm)

    def step(self, x: Tensor, call: Call, state: State) -> Tensor:
        assert isinstance(state, Parts)
        kv, ssm = state.parts
        said = self.attention.step(self._beside(x, call), call, kv)
        return self.mamba.step(self._with(x, said, call), call, ssm)

    def record(self, tape: Tape, x: Tensor, state: State) -> Tensor:
        assert isinstance(state, Parts)
        kv, ssm = state.parts
        beside = tape.vector(2 * x.shape[1])
        for half, source in zip(beside.chunk(2, dim=-1), (x, tape.shared["embedding"]), strict=True):
            tape.add(half, source, keep=0.0)
        said = self.attention.written(tape, self.attention_norm.record(tape, beside), kv)
        said = self.mlp.record(tape, self.mlp_norm.record(tape, said), Nothing())
        total = tape.vector(x.shape[1])
        tape.add(total, self.linear.record(tape, said), kept=x)
        return self.mamba.record(tape, self.mamba_norm.record(tape, total), ssm)

    def cost(self, new: int, past: int) -> Cost:
        low = [m for m in (self.attention.qkv, self.mlp.gate_up) if isinstance(m, Adapted)]
        own = matmul(new, self.linear) + sum(m.flops(new) for m in low)
        parts = (m.cost(new, past) for m in (self.attention, self.mlp, self.mamba))
        return sum(parts, Cost({"projection": own}, read_weights(*self.parameters())))

    def _beside(self, x: Tensor, call: Call) -> Tensor:
        return self.attention_norm(torch.cat([x, call.shared["embedding"]], dim=-1))

    def _with(self, x: Tensor, said: Tensor, call: Call) -> Tensor:
        return self.mamba_norm(x + self.linear(self.mlp(self.mlp_norm(said), call)))


def _base(module: nn.Module) -> Linear:
    base = module.base if isinstance(module, Adapted) else module
    assert isinstance(base, Linear)
    return base


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.rms_norm_eps
    blocks: list[Block] = []
    hybrids: list[Hybrid] = []
    for kind in config.kinds:
        if kind == "mamba":
            blocks.append(Block(mixer=(RMSNorm(d, eps), Mamba2(d, config.ssm))))
            continue
        before = len(hybrids) - config.num_mem_blocks
        hybrids.append(Hybrid(config, hybrids[before] if before >= 0 else None))
        blocks.append(Block(mixer=(nn.Identity(), hybrids[-1])))
    return Model(
        config,
        blocks,
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
        embed_shared=True,
    )


ARCHITECTURE = Architecture("zamba2", Config, build, weights)

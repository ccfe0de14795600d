"""Jamba (Lieber et al., 2403.19887): Mamba layers, attention in one of eight, experts in every other MLP.

Its odd points:
- dt, B and C are normed before they enter the scan, each with a weight of its own.
- Attention knows no positions: the Mamba layers before it do.
- Where a layer has experts their weights are the router's softmax over all of them, and those of the chosen
  are not brought to sum to one. The other layers' MLP is as wide as one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.experts import Experts, ExpertsSpec
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, head, same
from ..ssm.mamba import Mamba, MambaSpec, mixer_weights
from .expert_names import expert_weights, mlp_weights
from .transformer import attention_weights


@dataclass(frozen=True)
class Config:
    """The keys of Hugging Face's config.json for model_type "jamba". Every `attn_layer_period`-th layer from
    `attn_layer_offset` on is attention, every `expert_layer_period`-th from `expert_layer_offset` on has
    experts if there is more than one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    num_experts: int = 16
    num_experts_per_tok: int = 2
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_inner_layernorms: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        h, hk, _ = self.heads
        if h % hk:
            raise ValueError(f"num_attention_heads {h} is not a multiple of num_key_value_heads {hk}")
        for kind in ("attn", "expert"):
            period, offset = getattr(self, f"{kind}_layer_period"), getattr(self, f"{kind}_layer_offset")
            if offset >= period:
                raise ValueError(f"{kind}_layer_offset {offset} is not below {kind}_layer_period {period}")
        if isinstance(self.mamba_dt_rank, str) and self.mamba_dt_rank != "auto":
            raise ValueError(f"mamba_dt_rank {self.mamba_dt_rank!r}: a whole number or 'auto' is wanted")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act {self.hidden_act!r}: only 'silu' is known, for the convolution")
        if not self.mamba_inner_layernorms:
            raise ValueError("mamba_inner_layernorms false: only models that norm dt, B and C are known")

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head_dim."""
        h = self.num_attention_heads
        return h, self.num_key_value_heads or h, self.head_dim or self.hidden_size // h

    def attends(self, layer: int) -> bool:
        return layer % self.attn_layer_period == self.attn_layer_offset

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 1 and layer % self.expert_layer_period == self.expert_layer_offset

    @property
    def ssm(self) -> MambaSpec:
        return MambaSpec(
            inner=self.mamba_expand * self.hidden_size,
            state_size=self.mamba_d_state,
            rank=None if isinstance(self.mamba_dt_rank, str) else self.mamba_dt_rank,
            conv=self.mamba_d_conv,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            act=self.hidden_act,
            norm_eps=self.rms_norm_eps,
            norm_weight=True,
        )

    @property
    def attention(self) -> AttentionSpec:
        h, hk, head_dim = self.heads
        return AttentionSpec(heads=h, kv_heads=hk, head_dim=head_dim)

    @property
    def experts(self) -> ExpertsSpec:
        return ExpertsSpec(
            experts=self.num_experts,
            per_token=self.num_experts_per_tok,
            width=self.intermediate_size,
            act=self.hidden_act,
            normalise=False,
        )


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.rms_norm_eps

    def block(layer: int) -> Block:
        mixer = Attention(d, config.attention) if config.attends(layer) else Mamba(d, config.ssm)
        if config.has_experts(layer):
            mlp = Experts(d, config.experts)
        else:
            mlp = GatedMLP(d, config.intermediate_size, act=config.hidden_act)
        return Block(mixer=(RMSNorm(d, eps), mixer), mlp=(RMSNorm(d, eps), mlp))

    return Model(
        config,
        [block(i) for i in range(config.num_hidden_layers)],
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
    )


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    source, ours = "model.layers.{i}.", "blocks.{i}."
    mlp, experts = (source + "feed_forward.", ours + "mlp."), []
    if config.num_experts > 1:
        experts = expert_weights(*mlp, config.experts, router="router")
    return [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.final_layernorm.weight", "norm.weight"),
        same(source + "input_layernorm.weight", ours + "mixer_norm.weight"),
        same(source + "pre_ff_layernorm.weight", ours + "mlp_norm.weight"),
        *mixer_weights(source + "mamba.", ours + "mixer.", config.ssm),
        *attention_weights(source + "self_attn.", ours + "mixer.", config.heads),
        *mlp_weights(*mlp, config.intermediate_size),
        *experts,
        head("lm_head.weight", config.tie_word_embeddings),
    ]


ARCHITECTURE = Architecture("jamba", Config, build, weights)

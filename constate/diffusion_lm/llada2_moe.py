"""LLaDA2.0 (Bie et al., 2512.15745): Ling 2.0's transformer with experts, turned block-causal.

Its odd points. q, k and v are one tensor in the file; q and k are normed a head, then half of their channels
is rotated. The first layers have an MLP, the others experts: scores are sigmoids, a correction bias has a say
in the choice alone, groups are judged by their best two experts, and the weights of the chosen sum to
routed_scaling_factor; the shared experts are one MLP. A place sees its whole block and all blocks before it,
blocks being counted from the row's start, prompt included, and the logits at a place predict that place.

config.json says neither the block's size, 32, nor the mask id, which is the tokenizer's or has to be added
as mask_token_id; the published sampler's is 156895. Checkpoints whose experts were stacked for training
(model_type "llada2_moe_veomni") are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.experts import Experts, ExpertsSpec
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, head, same
from ..hybrid.expert_names import expert_weights, mlp_weights
from ..hybrid.transformer import TransformerConfig
from .denoiser import Denoiser, Masked, masked_diffusion

# What the published code reads one way only, or not at all.
_FIXED: Mapping[str, Any] = {
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "use_rmsnorm": True,
    "use_qk_norm": True,
    "using_split_qkv_in_self_attention": False,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
}


@dataclass(frozen=True)
class Config(TransformerConfig, Masked):
    """The keys of config.json for model_type "llada2_moe", with the defaults of its published code.
    `rotary_dim` follows from the others and only has to agree."""

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 16384
    partial_rotary_factor: float = 0.5
    rotary_dim: int | None = None
    use_bias: bool = True
    use_qkv_bias: bool = False
    num_experts: int = 16
    num_experts_per_tok: int = 2
    num_shared_experts: int | None = 0
    moe_intermediate_size: int = 512
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 0
    norm_head: bool = False
    norm_softmax: bool = False
    norm_topk_prob: bool = True
    use_rmsnorm: bool = True
    use_qk_norm: bool = True
    using_split_qkv_in_self_attention: bool = False
    moe_router_enable_expert_bias: bool = True
    score_function: str = "sigmoid"
    router_dtype: str | None = None  # ours is float32
    output_dropout: float = 0.0  # as those of windows, which `use_sliding_window` turns on: never read
    sliding_window: int | None = None
    max_window_layers: int | None = None
    block_size: int = 32
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if odd := [f"{k} = {getattr(self, k)!r}" for k, of in _FIXED.items() if getattr(self, k) != of]:
            raise ValueError(f"{', '.join(odd)}: no published model is such")
        turned = int(self.heads[2] * self.partial_rotary_factor)
        if self.rotary_dim not in (None, turned):
            raise ValueError(
                f"rotary_dim {self.rotary_dim}, and partial_rotary_factor {self.partial_rotary_factor} of "
                f"{self.heads[2]} channels is {turned}: which?"
            )
        _ = self.experts  # raises for a router that cannot be

    @property
    def rope(self) -> Mapping[str, Any]:
        part = self.partial_rotary_factor
        return {"rope_theta": 10000.0, "partial_rotary_factor": part, **super().rope}

    @property
    def experts(self) -> ExpertsSpec:
        return ExpertsSpec(
            experts=self.num_experts,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            act=self.hidden_act,
            scores="sigmoid",
            normalise=self.num_experts_per_tok > 1,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            kept_groups=self.topk_group,
            correction=True,
            shared=self.moe_intermediate_size * (self.num_shared_experts or 0),
        )

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id, block=self.block_size)


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.rms_norm_eps
    h, hk, head_dim = config.heads
    attention = AttentionSpec(
        heads=h,
        kv_heads=hk,
        head_dim=head_dim,
        rope=config.rope,
        max_positions=config.max_position_embeddings,
        bias=config.use_qkv_bias,
        out_bias=config.use_bias,
        qk_norm=True,
        block=config.block_size,
        norm_eps=eps,
    )

    def block(i: int) -> Block:
        dense = i < config.first_k_dense_replace
        mlp = GatedMLP(d, config.intermediate_size, act=config.hidden_act) if dense else None
        return Block(
            mixer=(RMSNorm(d, eps), Attention(d, attention)),
            mlp=(RMSNorm(d, eps), mlp or Experts(d, config.experts)),
        )

    return Model(
        config,
        [block(i) for i in range(config.num_hidden_layers)],
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
    )


def weights(config: Config) -> list[Rule]:
    """The published names to ours."""
    layer, ours = "model.layers.{i}.", "blocks.{i}."
    attention, mixer, mlp = layer + "attention.", ours + "mixer.", (layer + "mlp.", ours + "mlp.")
    rules = [
        same("model.word_embeddings.weight", "embed.weight"),
        same("model.norm.weight", "norm.weight"),
        same(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        same(layer + "post_attention_layernorm.weight", ours + "mlp_norm.weight"),
        same(attention + "query_layernorm.weight", mixer + "q_norm.weight"),
        same(attention + "key_layernorm.weight", mixer + "k_norm.weight"),
        *expert_weights(*mlp, config.experts),
        *mlp_weights(*mlp, config.intermediate_size),
        head("lm_head.weight", config.tie_word_embeddings),
    ]
    for part in ("weight", "bias"):
        if part == "weight" or config.use_qkv_bias:
            rules.append(same(attention + f"query_key_value.{part}", mixer + f"qkv.{part}"))
        if part == "weight" or config.use_bias:
            rules.append(same(attention + f"dense.{part}", mixer + f"out.{part}"))
    return [replace(rule, src=tuple(map(_ling, rule.src))) for rule in rules]


def _ling(name: str) -> str:
    """What Ling calls a router's correction, which DeepSeek-V3's name is for."""
    return name.replace("e_score_correction_bias", "expert_bias")


ARCHITECTURE = Architecture("llada2_moe", Config, build, weights, decode=masked_diffusion)

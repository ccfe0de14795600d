"""DeepSeek-V3 (2412.19437): latent attention in every layer, experts in all but the first few.

Its odd points. The cache holds a latent and one rotary key a token (core/latent.py); the norms of the latents
keep an eps of 1e-6 whatever rms_norm_eps says; rotary turns neighbouring channels, to which the rows of the
file are sorted here; a YaRN that names mscale_all_dim also widens the scores by its temperature squared. The
router scores by sigmoids; a correction bias has a say in the choice alone; groups are judged by their best
two experts, the best of them are chosen from, and the weights of the chosen sum to routed_scaling_factor. The
shared experts are one MLP of n_shared_experts times the width. The layers behind the last, which guess
several tokens ahead, are not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..core.architecture import Architecture
from ..core.experts import Experts, ExpertsSpec
from ..core.latent import LatentAttention, LatentSpec
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, drop, head, reorder, same
from .expert_names import expert_weights, mlp_weights
from .transformer import TransformerConfig


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The keys of Hugging Face's config.json for model_type "deepseek_v3", of transformers and of the first
    release. `head_dim` and `qk_head_dim` follow from the others and are not read."""

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int | None = 128
    n_shared_experts: int | None = 1
    n_routed_experts: int = 256
    routed_scaling_factor: float = 2.5
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    qk_nope_head_dim: int = 128
    qk_head_dim: int | None = None
    n_group: int = 8
    topk_group: int = 4
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 3
    norm_topk_prob: bool = True
    max_position_embeddings: int = 4096
    rope_interleave: bool = True
    attention_bias: bool = False
    num_nextn_predict_layers: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    moe_layer_freq: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
            if getattr(self, key) != known:
                raise ValueError(f"{key} {getattr(self, key)!r}: only {known!r} is known")
        h, hk, _ = self.heads
        if h != hk:
            raise ValueError(f"num_key_value_heads {hk} of {h} heads: all heads have keys of one latent")
        if self.attention_bias and not self.q_lora_rank:
            raise ValueError("attention_bias true with q_lora_rank null: only with queries from a latent")
        _ = self.experts, self.scale  # raises for a router that cannot be

    @property
    def experts(self) -> ExpertsSpec:
        return ExpertsSpec(
            experts=self.n_routed_experts,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            act=self.hidden_act,
            scores="sigmoid",
            normalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            kept_groups=self.topk_group,
            correction=True,
            shared=self.moe_intermediate_size * (self.n_shared_experts or 0),
        )

    @property
    def scale(self) -> float:
        """What multiplies the scores."""
        rope, scale = self.rope, (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        kind, share = rope.get("rope_type") or rope.get("type") or "default", rope.get("mscale_all_dim")
        if kind == "default" or not share or rope.get("factor", 1.0) <= 1:
            return scale
        return scale * (0.1 * share * math.log(rope["factor"]) + 1.0) ** 2

    @property
    def latent(self) -> LatentSpec:
        return LatentSpec(
            heads=self.num_attention_heads,
            rank=self.kv_lora_rank,
            key_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            q_rank=self.q_lora_rank,
            rope=self.rope,
            max_positions=self.max_position_embeddings,
            scale=self.scale,
            bias=self.attention_bias,
            norm_eps=1e-6,
        )


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.rms_norm_eps

    def block(i: int) -> Block:
        dense = i < config.first_k_dense_replace
        mlp = GatedMLP(d, config.intermediate_size, act=config.hidden_act) if dense else None
        attention = LatentAttention(d, config.latent)
        return Block(
            mixer=(RMSNorm(d, eps), attention), mlp=(RMSNorm(d, eps), mlp or Experts(d, config.experts))
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
    """Hugging Face's names to ours."""
    layer, ours, behind = "model.layers.{i}.", "blocks.{i}.", config.num_hidden_layers
    mlp = (layer + "mlp.", ours + "mlp.")
    return [
        *(drop(f"model.layers.{behind + i}.*") for i in range(config.num_nextn_predict_layers)),
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.norm.weight", "norm.weight"),
        same(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        same(layer + "post_attention_layernorm.weight", ours + "mlp_norm.weight"),
        *latent_weights(layer + "self_attn.", ours + "mixer.", config.latent, config.rope_interleave),
        *expert_weights(*mlp, config.experts, shared="shared_experts"),
        *mlp_weights(*mlp, config.intermediate_size),
        head("lm_head.weight", config.tie_word_embeddings),
    ]


def latent_weights(source: str, ours: str, spec: LatentSpec, interleaved: bool = False) -> list[Rule]:
    """The rules of a LatentAttention. `interleaved`: in the file the shared channels turn in neighbouring
    pairs; here the first ones of all pairs stand before the second ones."""
    keys, shared = spec.key_dim, spec.rope_dim
    query = spec.heads * (keys + shared)
    pairs = torch.arange(shared).unflatten(0, (-1, 2)).T.flatten() if interleaved else torch.arange(shared)
    each = torch.cat([torch.arange(keys), keys + pairs])  # of one head's query
    queries = (torch.arange(spec.heads)[:, None] * (keys + shared) + each).flatten()
    first, sizes = "q_a_proj" if spec.q_rank else "q_proj", [spec.q_rank or query, spec.rank + shared]
    order = torch.cat(
        [
            torch.arange(sizes[0]) if spec.q_rank else queries,
            sizes[0] + torch.arange(spec.rank),
            sizes[0] + spec.rank + pairs,
        ]
    )
    rules = [
        same(source + "kv_a_layernorm.weight", ours + "norm.weight"),
        same(source + "kv_b_proj.weight", ours + "kv_proj.weight"),
    ]
    for part in ("weight", "bias") if spec.bias else ("weight",):
        names = [source + f"{name}.{part}" for name in (first, "kv_a_proj_with_mqa")]
        rules.append(reorder(names, [ours + f"in_proj.{part}"], order, sizes, [sum(sizes)]))
        rules.append(same(source + f"o_proj.{part}", ours + f"out.{part}"))
    if spec.q_rank:
        name = source + "q_b_proj.weight"
        rules.append(same(source + "q_a_layernorm.weight", ours + "q_norm.weight"))
        rules.append(reorder([name], [ours + "q_proj.weight"], queries, [query], [query]))
    return rules


ARCHITECTURE = Architecture("deepseek_v3", Config, build, weights)

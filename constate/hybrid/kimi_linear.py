"""Kimi Linear (Kimi Team, 2510.26692): three layers of Kimi Delta Attention to one of latent attention.

Its odd points beside KDA's own (linear_attn/kda.py):
- Latent attention has no positions at all: the key that all heads share is not rotated, and the recurrent
  layers alone say what came when. The norm of its latent keeps an eps of 1e-6 whatever rms_norm_eps says.
- Experts in all but the first layers. The router scores by sigmoids, a correction bias has a say in the
  choice alone, the weights of the chosen sum to routed_scaling_factor; a shared expert is added ungated.
- KDA's low ranks are one head wide, and its convolutions have no bias.

Which layer is which stands in `layer_types`, or in the first release's `linear_attn_config`, which counts
from one; a config with neither is refused, since the published pattern breaks the rule of every fourth at its
end. An MLP's name in the files is `block_sparse_moe` as transformers writes it, `mlp` in the first release,
and both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.architecture import Architecture
from ..core.experts import Experts, ExpertsSpec
from ..core.latent import LatentAttention, LatentSpec
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, fuse, head, reshape, same
from ..linear_attn.frame import fuse_convs
from ..linear_attn.kda import KDA, KDASpec
from .deepseek_v3 import latent_weights
from .expert_names import expert_weights, mlp_weights

LINEAR, FULL = "linear_attention", "full_attention"
LINEAR_KEYS = {"kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size"}


@dataclass(frozen=True)
class Config:
    """The keys of Hugging Face's config.json for model_type "kimi_linear", of transformers and of the first
    release. `head_dim`, `qk_head_dim` and `rope_theta` are not read: nothing is rotated."""

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    moe_intermediate_size: int = 1024
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    qk_head_dim: int | None = None
    num_shared_experts: int = 1
    routed_scaling_factor: float = 2.446
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    qk_nope_head_dim: int = 128
    num_expert_group: int = 1
    topk_group: int = 1
    num_experts_per_token: int = 8
    moe_renormalize: bool = True
    num_experts: int = 256
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    first_k_dense_replace: int = 1
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    linear_attn_config: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    mla_use_nope: bool = True
    moe_layer_freq: int = 1
    moe_router_activation_func: str = "sigmoid"
    use_grouped_topk: bool = True
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        known = {
            "hidden_act": "silu",  # KDA's convolution has no other
            "mla_use_nope": True,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "num_nextn_predict_layers": 0,
        }
        for key, value in known.items():
            if getattr(self, key) != value:
                raise ValueError(f"{key} {getattr(self, key)!r}: only {value!r} is known")
        if self.attention_bias and not self.q_lora_rank:
            raise ValueError("attention_bias true with q_lora_rank null: only with queries from a latent")
        if not self.use_grouped_topk and self.num_expert_group > 1:
            raise ValueError(f"use_grouped_topk false with num_expert_group {self.num_expert_group}: which?")
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} of {self.num_attention_heads} heads: all "
                "heads have keys of one latent"
            )
        if odd := sorted((self.linear_attn_config or {}).keys() - LINEAR_KEYS):
            raise ValueError(f"linear_attn_config has {odd}; known are {', '.join(sorted(LINEAR_KEYS))}")
        _ = self.kinds, self.dense, self.experts  # raise for what does not fit

    @property
    def kinds(self) -> tuple[str, ...]:
        """Each layer's kind of attention. Raises ValueError where the config does not say it of each once."""
        layers, own = self.num_hidden_layers, self.linear_attn_config or {}
        if self.layer_types is None:
            sides = {LINEAR: own.get("kda_layers", ()), FULL: own.get("full_attn_layers", ())}
            listed = {i: kind for kind, numbers in sides.items() for i in numbers}
            if sorted(i for numbers in sides.values() for i in numbers) != list(range(1, layers + 1)):
                raise ValueError(
                    "layer_types is absent, and linear_attn_config's kda_layers and full_attn_layers do not "
                    f"list each of the layers 1 to {layers} once"
                )
            return tuple(listed[i + 1] for i in range(layers))
        if len(self.layer_types) != layers or not set(self.layer_types) <= {LINEAR, FULL}:
            raise ValueError(
                f"layer_types {list(self.layer_types)}: {layers} of {LINEAR} and {FULL} are wanted"
            )
        return self.layer_types

    @property
    def dense(self) -> tuple[bool, ...]:
        """Whether each layer has an MLP in place of experts."""
        layers, types = self.num_hidden_layers, self.mlp_layer_types
        if types is None:
            return tuple(i < self.first_k_dense_replace for i in range(layers))
        if len(types) != layers or not set(types) <= {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types {list(types)}: {layers} of dense and sparse are wanted")
        return tuple(kind == "dense" for kind in types)

    @property
    def kda(self) -> KDASpec:
        own = self.linear_attn_config or {}
        dim = own.get("head_dim", self.linear_head_dim)
        return KDASpec(
            heads=own.get("num_heads", self.linear_num_heads),
            key_dim=dim,
            value_dim=dim,
            rank=dim,
            conv=own.get("short_conv_kernel_size", self.linear_conv_kernel_dim),
            norm_eps=self.rms_norm_eps,
        )

    @property
    def latent(self) -> LatentSpec:
        return LatentSpec(
            heads=self.num_attention_heads,
            rank=self.kv_lora_rank,
            key_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            q_rank=self.q_lora_rank,
            bias=self.attention_bias,
            norm_eps=1e-6,
        )

    @property
    def experts(self) -> ExpertsSpec:
        return ExpertsSpec(
            experts=self.num_experts,
            per_token=self.num_experts_per_token,
            width=self.moe_intermediate_size,
            act=self.hidden_act,
            scores="sigmoid",
            normalise=self.moe_renormalize,
            scale=self.routed_scaling_factor,
            groups=self.num_expert_group,
            kept_groups=self.topk_group,
            correction=True,
            shared=self.moe_intermediate_size * self.num_shared_experts,
        )


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.rms_norm_eps

    def block(kind: str, dense: bool) -> Block:
        mixer = LatentAttention(d, config.latent) if kind == FULL else KDA(d, config.kda)
        mlp = GatedMLP(d, config.intermediate_size, act=config.hidden_act) if dense else None
        return Block(mixer=(RMSNorm(d, eps), mixer), mlp=(RMSNorm(d, eps), mlp or Experts(d, config.experts)))

    return Model(
        config,
        [block(kind, dense) for kind, dense in zip(config.kinds, config.dense, strict=True)],
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
    )


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    layer, ours = "model.layers.{i}.", "blocks.{i}."
    first = mlp_weights(layer + "mlp.", ours + "mlp.", config.intermediate_size)
    rules = [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.norm.weight", "norm.weight"),
        same(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        same(layer + "post_attention_layernorm.weight", ours + "mlp_norm.weight"),
        *expert_weights(layer + "block_sparse_moe.", ours + "mlp.", config.experts, names=("w1", "w3", "w2")),
        *mlp_weights(layer + "block_sparse_moe.", ours + "mlp.", config.intermediate_size),
        *(replace(rule, optional=True) for rule in first),
        head("lm_head.weight", config.tie_word_embeddings),
    ]
    for i, kind in enumerate(config.kinds):
        source, mixer = f"model.layers.{i}.self_attn.", f"blocks.{i}.mixer."
        full = kind == FULL
        rules += latent_weights(source, mixer, config.latent) if full else _kda(source, mixer, config.kda)
    return rules


def _kda(source: str, ours: str, spec: KDASpec) -> list[Rule]:
    h, keys = spec.heads, spec.heads * spec.key_dim
    parts = {"q": keys, "k": keys, "v": keys, "f_a": spec.rank, "g_a": spec.rank, "b": h}
    return [
        fuse([source + f"{p}_proj.weight" for p in parts], ours + "in_proj.weight", list(parts.values())),
        fuse_convs([source + f"{p}_conv1d.weight" for p in "qkv"], ours + "conv.weight", [keys] * 3),
        same(source + "f_b_proj.weight", ours + "decay_proj.weight"),
        same(source + "g_b_proj.weight", ours + "gate_proj.weight"),
        reshape(source + "A_log", ours + "a_log", (1, 1, h, 1), (h,)),
        same(source + "dt_bias", ours + "dt_bias"),
        same(source + "o_norm.weight", ours + "norm.weight"),
        same(source + "o_proj.weight", ours + "out_proj.weight"),
    ]


ARCHITECTURE = Architecture("kimi_linear", Config, build, weights)

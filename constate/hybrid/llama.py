"""Llama (Touvron et al., 2302.13971; 2407.21783): the transformer, and the baseline of every comparison.

Every layer is full attention with rotary positions and a gated MLP; q, k, v are one product, gate and up
another, as declared in `weights`. A hybrid whose every layer is attention: no code path of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, fuse, same


@dataclass(frozen=True)
class Config:
    """The keys of Hugging Face's config.json for model_type "llama", of version 5 (`rope_parameters`) and
    of earlier ones (`rope_theta`, `rope_scaling`)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        h, hk, _ = self.heads
        if h % hk:
            raise ValueError(f"num_attention_heads {h} is not a multiple of num_key_value_heads {hk}")

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head_dim."""
        h = self.num_attention_heads
        return h, self.num_key_value_heads or h, self.head_dim or self.hidden_size // h

    @property
    def rope(self) -> Mapping[str, Any]:
        """`rope_parameters`, from whichever dialect has them."""
        rope = {**(self.rope_scaling or {}), **(self.rope_parameters or {})}
        if self.rope_theta is not None:
            rope.setdefault("rope_theta", self.rope_theta)
        return rope


def build(config: Config) -> Model:
    h, hk, head_dim = config.heads
    spec = AttentionSpec(
        heads=h,
        kv_heads=hk,
        head_dim=head_dim,
        rope=config.rope,
        max_positions=config.max_position_embeddings,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    d, eps = config.hidden_size, config.rms_norm_eps
    blocks = [
        Block(
            mixer=(RMSNorm(d, eps), Attention(d, spec)),
            mlp=(
                RMSNorm(d, eps),
                GatedMLP(d, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias),
            ),
        )
        for _ in range(config.num_hidden_layers)
    ]
    tied = config.tie_word_embeddings
    return Model(config, blocks, RMSNorm(d, eps), vocab=config.vocab_size, d=d, tied=tied)


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    source, ours = "model.layers.{i}.", "blocks.{i}."
    h, hk, head_dim = config.heads
    qkv = [source + f"self_attn.{p}_proj" for p in "qkv"]
    gate_up = [source + f"mlp.{p}_proj" for p in ("gate", "up")]
    sizes, widths = [h * head_dim, hk * head_dim, hk * head_dim], [config.intermediate_size] * 2
    rules = [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.norm.weight", "norm.weight"),
        same(source + "input_layernorm.weight", ours + "mixer_norm.weight"),
        same(source + "post_attention_layernorm.weight", ours + "mlp_norm.weight"),
    ]
    for part, biased in (("weight", True), ("bias", config.attention_bias)):
        if biased:
            rules.append(fuse([f"{name}.{part}" for name in qkv], ours + f"mixer.qkv.{part}", sizes))
            rules.append(same(source + f"self_attn.o_proj.{part}", ours + f"mixer.out.{part}"))
    for part, biased in (("weight", True), ("bias", config.mlp_bias)):
        if biased:
            rules.append(fuse([f"{name}.{part}" for name in gate_up], ours + f"mlp.gate_up.{part}", widths))
            rules.append(same(source + f"mlp.down_proj.{part}", ours + f"mlp.down.{part}"))
    if config.tie_word_embeddings:
        rules.append(same("lm_head.weight", "embed.weight", optional=True))
    else:
        rules.append(same("lm_head.weight", "head.weight"))
    return rules


ARCHITECTURE = Architecture("llama", Config, build, weights)

"""MiniMax-01 (2501.08313): seven layers of lightning attention to one of softmax attention, experts in all.

Its odd points. The residual is the normed input, not the input, and both sides of the sum are weighed: x
becomes alpha y + beta f(y) with y = norm(x), by an alpha and a beta for each kind of layer and for the
experts. Lightning attention's slopes (linear_attn/lightning.py) follow from the layer's index, and its norm
keeps an eps of 1e-6 whatever rms_norm_eps says; in a file q, k and v lie head by head. The weights of the
chosen experts, softmax over all, are made to sum to one. Stored slopes are compared with the formula's, the
stored decays within a block of `block_size` tokens follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.experts import Experts, ExpertsSpec
from ..core.mixer import Mixer
from ..core.model import Block, Branch, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, drop, head, reorder, same
from ..linear_attn.lightning import LightningAttention, LightningSpec
from .expert_names import expert_weights
from .transformer import TransformerConfig, attention_weights

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The keys of Hugging Face's config.json for model_type "minimax". `block_size` is how the same sums are
    cut."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072
    sliding_window: int | None = None
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    layer_types: Sequence[str] | None = None
    block_size: int = 256
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.kinds) != self.num_hidden_layers:
            layers = f"num_hidden_layers is {self.num_hidden_layers}"
            raise ValueError(f"layer_types lists {len(self.kinds)} layers, {layers}")
        if unknown := sorted(set(self.kinds) - {LINEAR, FULL}):
            raise ValueError(f"layer_types has {unknown}; known are {LINEAR} and {FULL}")
        _ = self.experts  # raises for a router that cannot be

    @property
    def kinds(self) -> Sequence[str]:
        """What each layer is: as listed, or softmax and lightning attention in turn."""
        return self.layer_types or [(FULL, LINEAR)[i % 2] for i in range(self.num_hidden_layers)]

    @property
    def rope(self) -> Mapping[str, Any]:
        return {"rope_theta": 1e6, **super().rope}

    @property
    def experts(self) -> ExpertsSpec:
        return ExpertsSpec(
            experts=self.num_local_experts,
            per_token=self.num_experts_per_tok,
            width=self.intermediate_size,
            act=self.hidden_act,
        )

    @property
    def attention(self) -> AttentionSpec:
        h, hk, head_dim = self.heads
        return AttentionSpec(
            heads=h,
            kv_heads=hk,
            head_dim=head_dim,
            window=self.sliding_window,
            rope=self.rope,
            max_positions=self.max_position_embeddings,
        )

    def lightning(self, i: int) -> LightningSpec:
        """Layer i's; the small number is the published one, which also keeps the last layer from 0."""
        h, _, head_dim = self.heads
        share = 1 - i / (self.num_hidden_layers - 1 + 1e-5) + 1e-5
        return LightningSpec(heads=h, head_dim=head_dim, share=share, act=self.hidden_act, norm_eps=1e-6)


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.rms_norm_eps

    def branch(mixer: Mixer, alpha: float, beta: float) -> Branch:
        return Branch(RMSNorm(d, eps), mixer, keep=alpha, scale=beta, from_norm=True)

    def block(i: int, kind: str) -> Block:
        if kind == LINEAR:
            mixer = LightningAttention(d, config.lightning(i))
            weighed = (config.linear_attn_alpha_factor, config.linear_attn_beta_factor)
        else:
            mixer = Attention(d, config.attention)
            weighed = (config.full_attn_alpha_factor, config.full_attn_beta_factor)
        mlp = branch(Experts(d, config.experts), config.mlp_alpha_factor, config.mlp_beta_factor)
        return Block(mixer=branch(mixer, *weighed), mlp=mlp)

    return Model(
        config,
        [block(i, kind) for i, kind in enumerate(config.kinds)],
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
    )


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    layer, ours = "model.layers.{i}.", "blocks.{i}."
    return [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.norm.weight", "norm.weight"),
        same(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        same(layer + "post_attention_layernorm.weight", ours + "mlp_norm.weight"),
        *(_slopes(config, i) for i, kind in enumerate(config.kinds) if kind == LINEAR),
        *_lightning(config, layer + "self_attn.", ours + "mixer."),
        *attention_weights(layer + "self_attn.", ours + "mixer.", config.heads),
        *expert_weights(layer + "block_sparse_moe.", ours + "mlp.", config.experts, names=("w1", "w3", "w2")),
        head("lm_head.weight", config.tie_word_embeddings),
    ]


def _lightning(config: Config, source: str, ours: str) -> list[Rule]:
    h, _, dim = config.heads
    sizes = [3 * h * dim, h * dim]
    by_part = torch.arange(sizes[0]).view(h, 3, dim).transpose(0, 1).flatten()
    order = torch.cat([by_part, torch.arange(sizes[0], sum(sizes))])
    names = [source + "qkv_proj.weight", source + "output_gate.weight"]
    return [
        *(drop(source + f"{part}_decay") for part in ("query", "key", "diagonal")),
        reorder(names, [ours + "in_proj.weight"], order, sizes, [sum(sizes)]),
        same(source + "norm.weight", ours + "norm.weight"),
        same(source + "out_proj.weight", ours + "out_proj.weight"),
    ]


def _slopes(config: Config, i: int) -> Rule:
    """A stored slope_rate is no parameter here, and may only be what the formula says."""
    spec = config.lightning(i)
    slopes = spec.share * torch.exp2(-8 * torch.arange(1, spec.heads + 1) / spec.heads)

    def compared(t: list[Tensor]) -> list[Tensor]:
        stored = t[0].flatten().float().cpu()
        if stored.shape != slopes.shape or not torch.allclose(stored, slopes, rtol=1e-2):
            raise ValueError(f"slopes {stored.tolist()[:3]}..., not the published {slopes.tolist()[:3]}...")
        return []

    return Rule((f"model.layers.{i}.self_attn.slope_rate",), (), compared, lambda _: [])


ARCHITECTURE = Architecture("minimax", Config, build, weights)

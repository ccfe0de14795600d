"""Falcon-H1 (Zuo et al., 2507.22448): attention and a Mamba-2 side by side in every layer.

Its odd points:
- Both read the same norm's output, and their outputs are added; an MLP follows.
- Multipliers, tuned in place of initial weights: one for the embedding, one for the logits, one into and one
  out of each of the two, one for the keys, one for the MLP's gate and one for what the MLP says, and five for
  what the SSM's in-projection gives (z, x, B, C and dt), before the convolution.
- The width of the SSM, `mamba_d_ssm`, follows from nothing else. What it says is only gated, unless
  `mamba_rms_norm`: then it is normed a group, before the gate or, without `mamba_norm_before_gate`, after it.

Keys are cached without their multiplier, which scales the products with the queries instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.mlp import GatedMLP
from ..core.model import Block, Branch, Model
from ..core.norms import RMSNorm
from ..core.parallel import Parallel
from ..core.weights import Rule, head, same
from ..ssm.mamba2 import Mamba2, Mamba2Spec, mixer_weights
from .expert_names import mlp_weights
from .transformer import TransformerConfig, attention_weights


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The keys of Hugging Face's config.json for model_type "falcon_h1". Older files have
    `mlp_expansion_factor` too, which nothing reads: `intermediate_size` says."""

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    mlp_bias: bool = False
    projectors_bias: bool = False
    mamba_d_ssm: int | None = 1024
    mamba_n_heads: int = 128
    mamba_d_head: int | str = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: float = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    mamba_use_mlp: bool = True
    mlp_expansion_factor: float | None = None
    time_step_limit: tuple[float, ...] = (0.0, math.inf)
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] | None = None
    mlp_multipliers: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, wanted in (("time_step_limit", 2), ("ssm_multipliers", 5), ("mlp_multipliers", 2)):
            values = getattr(self, name)
            if values is not None and [type(v) in (int, float) for v in values] != [True] * wanted:
                raise ValueError(f"{name} {list(values)}: {wanted} numbers are wanted")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act {self.hidden_act!r}: only 'silu' is known, for the convolution")
        if not self.mamba_use_mlp:
            raise ValueError("mamba_use_mlp false: only layers with an MLP are known")
        heads, given = self.mamba_n_heads, self.mamba_d_head
        if isinstance(given, str) and given != "auto":
            raise ValueError(f"mamba_d_head {given!r}: a whole number or 'auto' is wanted")
        if heads * self.ssm.head_dim != self.inner:
            raise ValueError(
                f"mamba_n_heads {heads} of mamba_d_head {given} are not the {self.inner} channels of "
                "mamba_d_ssm (or, without it, of mamba_expand * hidden_size)"
            )

    @property
    def inner(self) -> int:
        return self.mamba_d_ssm or int(self.mamba_expand * self.hidden_size)

    @property
    def ssm(self) -> Mamba2Spec:
        heads, given = self.mamba_n_heads, self.mamba_d_head
        return Mamba2Spec(
            heads=heads,
            head_dim=self.inner // heads if isinstance(given, str) else given,
            state_size=self.mamba_d_state,
            groups=self.mamba_n_groups,
            conv=self.mamba_d_conv,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            act=self.hidden_act,
            dt_limit=(self.time_step_limit[0], self.time_step_limit[1]),
            norm_eps=self.rms_norm_eps,
            norm=self.mamba_rms_norm,
            norm_before=self.mamba_norm_before_gate,
            scales=self.ssm_multipliers,
            out_bias=self.projectors_bias,
        )

    @property
    def attention(self) -> AttentionSpec:
        h, hk, head_dim = self.heads
        return AttentionSpec(
            heads=h,
            kv_heads=hk,
            head_dim=head_dim,
            rope=self.rope,
            max_positions=self.max_position_embeddings,
            bias=self.attention_bias,
            out_bias=self.attention_bias,
            scale=self.key_multiplier * head_dim**-0.5,
        )


def build(config: Config) -> Model:
    d, eps = config.hidden_size, config.rms_norm_eps
    gate, down = config.mlp_multipliers or (1.0, 1.0)

    def block() -> Block:
        both = Parallel(
            ssm=(Mamba2(d, config.ssm), config.ssm_in_multiplier, config.ssm_out_multiplier),
            attention=(
                Attention(d, config.attention),
                config.attention_in_multiplier,
                config.attention_out_multiplier,
            ),
        )
        mlp = GatedMLP(
            d, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias, gate_scale=gate
        )
        return Block(mixer=(RMSNorm(d, eps), both), mlp=Branch(RMSNorm(d, eps), mlp, scale=down))

    return Model(
        config,
        [block() for _ in range(config.num_hidden_layers)],
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
        embed_scale=config.embedding_multiplier,
        logit_scale=config.lm_head_multiplier,
    )


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    source, ours, bias = "model.layers.{i}.", "blocks.{i}.", config.attention_bias
    mlp = (source + "feed_forward.", ours + "mlp.", config.intermediate_size)
    return [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.final_layernorm.weight", "norm.weight"),
        same(source + "input_layernorm.weight", ours + "mixer_norm.weight"),
        same(source + "pre_ff_layernorm.weight", ours + "mlp_norm.weight"),
        *mixer_weights(source + "mamba.", ours + "mixer.ssm.", config.ssm),
        *attention_weights(source + "self_attn.", ours + "mixer.attention.", config.heads, bias, bias),
        *mlp_weights(*mlp, bias=config.mlp_bias),
        head("lm_head.weight", config.tie_word_embeddings),
    ]


ARCHITECTURE = Architecture("falcon_h1", Config, build, weights)

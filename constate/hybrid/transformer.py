"""What the published transformers share: config, blocks, and Hugging Face's names of their weights.

Every layer is softmax attention with rotary positions and a gated MLP, each behind an RMS norm; q, k, v are
one product, gate and up another. In what one family differs from another its Config says as `Traits`, so
that no family repeats a builder. No architecture by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.attention import Attention, AttentionSpec
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, fuse, head, same


@dataclass(frozen=True)
class Traits:
    """What one family has and another has not. `windows` gives each layer's attention window, None for
    full attention; empty means full attention everywhere."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: Sequence[int | None] = ()


@dataclass(frozen=True)
class TransformerConfig:
    """The keys that the families' config.json share, of transformers 5 (`rope_parameters`) and of earlier
    versions (`rope_theta`, `rope_scaling`). Defaults are those of transformers."""

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
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        h, hk, _ = self.heads
        if h % hk:
            raise ValueError(f"num_attention_heads {h} is not a multiple of num_key_value_heads {hk}")
        _ = self.rope  # raises for two dialects that disagree

    @property
    def traits(self) -> Traits:
        raise NotImplementedError(f"{type(self).__module__} declares no traits")

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head_dim."""
        h = self.num_attention_heads
        return h, self.num_key_value_heads or h, self.head_dim or self.hidden_size // h

    @property
    def rope(self) -> Mapping[str, Any]:
        """`rope_parameters`, from whichever dialect has them. Raises ValueError where two disagree."""
        rope, older = dict(self.rope_parameters or {}), dict(self.rope_scaling or {})
        if self.rope_theta is not None:
            older.setdefault("rope_theta", self.rope_theta)
        if odd := sorted(key for key in rope.keys() & older if rope[key] != older[key]):
            raise ValueError(
                f"config.json has {', '.join(odd)} both in rope_parameters and in the older rope_theta and "
                "rope_scaling, with other values: which?"
            )
        return older | rope


def windows_by_layer(
    layers: int, window: int | None, types: Sequence[str] | None, first: int
) -> Sequence[int | None]:
    """Each layer's window as Qwen's config.json has it: `types` (layer_types) says which layers slide;
    without it those from index `first` (max_window_layers) on do. `window` None: none can."""
    if types is None:
        return [window if i >= first else None for i in range(layers)]
    if len(types) != layers:
        raise ValueError(f"layer_types lists {len(types)} layers, num_hidden_layers is {layers}")
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"layer_types has {unknown}; known are full_attention and sliding_attention")
    if window is None and "sliding_attention" in types:
        raise ValueError(
            "layer_types has sliding_attention, and no window is in use: use_sliding_window true and a "
            "sliding_window are wanted"
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def build(config: TransformerConfig) -> Model:
    h, hk, head_dim = config.heads
    d, eps, traits = config.hidden_size, config.rms_norm_eps, config.traits
    blocks = []
    for window in traits.windows or [None] * config.num_hidden_layers:
        spec = AttentionSpec(
            heads=h,
            kv_heads=hk,
            head_dim=head_dim,
            window=window,
            rope=config.rope,
            max_positions=config.max_position_embeddings,
            bias=traits.qkv_bias,
            out_bias=traits.out_bias,
            qk_norm=traits.qk_norm,
            norm_eps=eps,
        )
        mlp = GatedMLP(d, config.intermediate_size, act=config.hidden_act, bias=traits.mlp_bias)
        blocks.append(Block(mixer=(RMSNorm(d, eps), Attention(d, spec)), mlp=(RMSNorm(d, eps), mlp)))
    tied = config.tie_word_embeddings
    return Model(config, blocks, RMSNorm(d, eps), vocab=config.vocab_size, d=d, tied=tied)


def weights(config: TransformerConfig) -> list[Rule]:
    """Hugging Face's names to ours."""
    source, ours, traits = "model.layers.{i}.", "blocks.{i}.", config.traits
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

    def both(biased: bool) -> Sequence[str]:
        return ("weight", "bias") if biased else ("weight",)

    rules += [fuse([f"{n}.{p}" for n in qkv], ours + f"mixer.qkv.{p}", sizes) for p in both(traits.qkv_bias)]
    rules += [same(source + f"self_attn.o_proj.{p}", ours + f"mixer.out.{p}") for p in both(traits.out_bias)]
    for p in both(traits.mlp_bias):
        rules.append(fuse([f"{name}.{p}" for name in gate_up], ours + f"mlp.gate_up.{p}", widths))
        rules.append(same(source + f"mlp.down_proj.{p}", ours + f"mlp.down.{p}"))
    if traits.qk_norm:
        rules += [same(source + f"self_attn.{p}_norm.weight", ours + f"mixer.{p}_norm.weight") for p in "qk"]
    return [*rules, head("lm_head.weight", config.tie_word_embeddings)]

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
from ..core.mixer import Mixer
from ..core.mlp import GatedMLP
from ..core.model import Block, Branch, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, fuse, head, same
from .expert_names import mlp_weights


@dataclass(frozen=True)
class Traits:
    """What one family has and another has not. `windows` gives each layer's attention window, None for
    full attention; empty means full attention everywhere. `ropes` gives each layer's rope_parameters, empty
    the config's. `scale` is that of the scores, None the usual; `act` the MLP's, None the config's.
    `norm_offset` is added to every norm's weight; with `post_norms` what a branch says is normed before it
    is added. `embed_scale` and `logit_cap` are the Model's. `block` is how far beyond itself a token sees
    (AttentionSpec): 1 for causal models."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: Sequence[int | None] = ()
    ropes: Sequence[Mapping[str, Any]] = ()
    scale: float | None = None
    act: str | None = None
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float = 1.0
    logit_cap: float | None = None
    block: int | None = 1


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
        return either_dialect(self.rope_parameters, self.rope_theta, self.rope_scaling)


def either_dialect(
    rope: Mapping[str, Any] | None, theta: float | None, scaling: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """`rope_parameters` from those of transformers 5, if any, and the older base and rope_scaling."""
    rope, older = dict(rope or {}), dict(scaling or {})
    if theta is not None:
        older.setdefault("rope_theta", theta)
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
    d, eps, traits, layers = config.hidden_size, config.rms_norm_eps, config.traits, config.num_hidden_layers

    def norm() -> RMSNorm:
        return RMSNorm(d, eps, offset=traits.norm_offset)

    def branch(mixer: Mixer) -> Branch:
        return Branch(norm(), mixer, norm() if traits.post_norms else None)

    blocks = []
    windows, ropes = traits.windows or [None] * layers, traits.ropes or [config.rope] * layers
    for window, rope in zip(windows, ropes, strict=True):
        spec = AttentionSpec(
            heads=h,
            kv_heads=hk,
            head_dim=head_dim,
            window=window,
            rope=rope,
            max_positions=config.max_position_embeddings,
            bias=traits.qkv_bias,
            out_bias=traits.out_bias,
            qk_norm=traits.qk_norm,
            block=traits.block,
            norm_eps=eps,
            norm_offset=traits.norm_offset,
            scale=traits.scale,
        )
        act = traits.act or config.hidden_act
        mlp = GatedMLP(d, config.intermediate_size, act=act, bias=traits.mlp_bias)
        blocks.append(Block(mixer=branch(Attention(d, spec)), mlp=branch(mlp)))
    return Model(
        config,
        blocks,
        norm(),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
        embed_scale=traits.embed_scale,
        logit_cap=traits.logit_cap,
    )


def weights(config: TransformerConfig) -> list[Rule]:
    """Hugging Face's names to ours."""
    source, ours, traits = "model.layers.{i}.", "blocks.{i}.", config.traits
    rules = [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.norm.weight", "norm.weight"),
        same(source + "input_layernorm.weight", ours + "mixer_norm.weight"),
    ]
    if traits.post_norms:
        rules += [
            same(source + "post_attention_layernorm.weight", ours + "mixer_post.weight"),
            same(source + "pre_feedforward_layernorm.weight", ours + "mlp_norm.weight"),
            same(source + "post_feedforward_layernorm.weight", ours + "mlp_post.weight"),
        ]
    else:
        rules.append(same(source + "post_attention_layernorm.weight", ours + "mlp_norm.weight"))
    rules += attention_weights(
        source + "self_attn.", ours + "mixer.", config.heads, traits.qkv_bias, traits.out_bias
    )
    mlp = (source + "mlp.", ours + "mlp.", config.intermediate_size)
    rules += mlp_weights(*mlp, bias=traits.mlp_bias)
    if traits.qk_norm:
        rules += [same(source + f"self_attn.{p}_norm.weight", ours + f"mixer.{p}_norm.weight") for p in "qk"]
    return [*rules, head("lm_head.weight", config.tie_word_embeddings)]


def attention_weights(
    source: str, ours: str, heads: tuple[int, int, int], bias: bool = False, out_bias: bool = False
) -> list[Rule]:
    """q_proj, k_proj, v_proj and o_proj under `source` as an Attention's under `ours`; `heads` are query
    heads, key/value heads and head_dim."""
    h, hk, head_dim = heads
    qkv, sizes = [source + f"{p}_proj" for p in "qkv"], [h * head_dim, hk * head_dim, hk * head_dim]
    rules = [fuse([f"{n}.{p}" for n in qkv], ours + f"qkv.{p}", sizes) for p in _both(bias)]
    return rules + [same(source + f"o_proj.{p}", ours + f"out.{p}") for p in _both(out_bias)]


def _both(biased: bool) -> Sequence[str]:
    return ("weight", "bias") if biased else ("weight",)

"""RecurrentGemma (Botev et al., 2404.07839): Griffin, two recurrent layers to one of attention over a window.

Its odd points beside the recurrent block's own (ssm/rg_lru.py):
- The embedding is multiplied by sqrt(hidden_size) rounded to bfloat16, in every dtype.
- Every norm's weight is stored as its distance from one; the logits are capped, c * tanh(logits / c).
- Attention has few key heads, turns a part of each head (`partial_rotary_factor`, a half where it is absent)
  and has a bias on its way out.
- The MLP is half as wide as `intermediate_size` says, has biases and a tanh-GELU, which is the recurrent
  block's too.
- `block_types` (in the first files `_block_types`) is repeated until the layers are full; its last round may
  be cut short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.mixer import Mixer
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, fuse, head, reshape, same
from ..ssm.rg_lru import RGLRU, RGLRUSpec
from .expert_names import mlp_weights
from .transformer import attention_weights, either_dialect

BOTH = ("weight", "bias")


@dataclass(frozen=True)
class Config:
    """The keys of Hugging Face's config.json for model_type "recurrent_gemma", of transformers 5
    (`rope_parameters`) and of earlier versions (`rope_theta`, `partial_rotary_factor`)."""

    num_hidden_layers: int = 26
    vocab_size: int = 256000
    hidden_size: int = 2560
    intermediate_size: int = 7680
    num_attention_heads: int = 10
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    lru_width: int | None = None
    attention_window_size: int = 2048
    conv1d_width: int = 4
    logits_soft_cap: float = 30.0
    rms_norm_eps: float = 1e-6
    hidden_activation: str = "gelu_pytorch_tanh"
    rope_parameters: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    block_types: tuple[str, ...] | None = None
    _block_types: tuple[str, ...] | None = None
    attention_bias: bool = False
    embeddings_scale_by_sqrt_dim: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        h, hk, _ = self.heads
        if self.hidden_size % h or h % hk:
            raise ValueError(
                f"num_attention_heads {h} must divide hidden_size {self.hidden_size} and be a multiple of "
                f"num_key_value_heads {hk}"
            )
        if self.head_dim not in (None, self.hidden_size // h):
            raise ValueError(f"head_dim {self.head_dim}: only hidden_size / num_attention_heads is known")
        if self.intermediate_size % 2:
            raise ValueError(f"intermediate_size {self.intermediate_size}: the MLP is half of it wide")
        if not self.logits_soft_cap > 0:
            raise ValueError(f"logits_soft_cap {self.logits_soft_cap}: above 0 is wanted")
        if not self.embeddings_scale_by_sqrt_dim:
            raise ValueError("embeddings_scale_by_sqrt_dim false: the published models scale theirs")
        if None not in (self.block_types, self._block_types) and self.block_types != self._block_types:
            raise ValueError(f"block_types {self.block_types}, but _block_types {self._block_types}: which?")
        if unknown := sorted(set(self.kinds) - {"recurrent", "attention"}):
            raise ValueError(f"block_types has {unknown}; known are recurrent and attention")
        kind = self.rope.get("rope_type", "default")
        if kind != "default":
            raise ValueError(f"rope_type {kind!r}: these models know no rotary scaling, only 'default'")

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head_dim."""
        h = self.num_attention_heads
        return h, self.num_key_value_heads or h, self.hidden_size // h

    @property
    def width(self) -> int:
        """Channels of the recurrent block."""
        return self.lru_width or self.hidden_size

    @property
    def kinds(self) -> list[str]:
        """Each layer's kind, "recurrent" or "attention"."""
        types = self.block_types or self._block_types or ("recurrent", "recurrent", "attention")
        return [types[i % len(types)] for i in range(self.num_hidden_layers)]

    @property
    def rope(self) -> Mapping[str, Any]:
        part = self.partial_rotary_factor
        older = {} if part is None else {"partial_rotary_factor": part}
        return {"partial_rotary_factor": 0.5, **either_dialect(self.rope_parameters, self.rope_theta, older)}


def build(config: Config) -> Model:
    d, (h, hk, head_dim) = config.hidden_size, config.heads
    attention = AttentionSpec(
        heads=h,
        kv_heads=hk,
        head_dim=head_dim,
        window=config.attention_window_size,
        rope=config.rope,
        bias=config.attention_bias,
        out_bias=True,
    )
    lru = RGLRUSpec(config.width, h, config.conv1d_width, config.hidden_activation)

    def norm() -> RMSNorm:
        return RMSNorm(d, config.rms_norm_eps, offset=1.0)

    def mixer(kind: str) -> Mixer:
        return Attention(d, attention) if kind == "attention" else RGLRU(d, lru)

    def mlp() -> GatedMLP:
        return GatedMLP(d, config.intermediate_size // 2, act=config.hidden_activation, bias=True)

    return Model(
        config,
        [Block(mixer=(norm(), mixer(kind)), mlp=(norm(), mlp())) for kind in config.kinds],
        norm(),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
        embed_scale=torch.tensor(d**0.5, dtype=torch.bfloat16, device="cpu").item(),
        logit_cap=config.logits_soft_cap,
    )


def weights(config: Config) -> list[Rule]:
    """Hugging Face's names to ours."""
    source, ours, width = "model.layers.{i}.", "blocks.{i}.", config.width
    mixed, mixer = source + "temporal_block.", ours + "mixer."
    block, w = width // config.num_attention_heads, config.conv1d_width
    gates = [mixed + f"rg_lru.{gate}_gate_" for gate in ("input", "recurrent")]
    return [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.final_norm.weight", "norm.weight"),
        same(source + "temporal_pre_norm.weight", ours + "mixer_norm.weight"),
        same(source + "channel_pre_norm.weight", ours + "mlp_norm.weight"),
        *mlp_weights(source + "mlp_block.", ours + "mlp.", config.intermediate_size // 2, bias=True),
        *attention_weights(mixed, mixer, config.heads, config.attention_bias, out_bias=True),
        *(fuse([mixed + f"linear_{b}.{p}" for b in "yx"], mixer + f"in_proj.{p}", [width] * 2) for p in BOTH),
        *(same(mixed + f"linear_out.{p}", mixer + f"out_proj.{p}") for p in BOTH),
        reshape(mixed + "conv_1d.weight", mixer + "conv.weight", (width, 1, w), (width, w)),
        same(mixed + "conv_1d.bias", mixer + "conv.bias"),
        fuse([gate + "weight" for gate in gates], mixer + "gates", [block] * 2, dim=-1),
        fuse([gate + "bias" for gate in gates], mixer + "gate_bias", [block] * 2, dim=-1),
        same(mixed + "rg_lru.recurrent_param", mixer + "rate"),
        head("lm_head.weight", config.tie_word_embeddings),
    ]


ARCHITECTURE = Architecture("recurrent_gemma", Config, build, weights)

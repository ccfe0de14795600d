"""Gemma 3's language model (2503.19786): five layers of attention over a window to one over everything.

Its odd points beside Llama: two rotary bases, `sliding_attention`'s and `full_attention`'s, of which only the
latter is ever scaled; q and k normed a head; a norm behind each branch as well as before it; every norm's
weight stored as its distance from one; scores scaled by query_pre_attn_scalar, not by head_dim; an MLP with
tanh-GELU; the embedding times sqrt(hidden_size), which is also the head. In float32 that factor is exact,
where transformers rounds it to the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.architecture import Architecture
from .transformer import Traits, TransformerConfig, build, either_dialect, weights, windows_by_layer

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The keys of Hugging Face's config.json for model_type "gemma3_text": of transformers 5, whose
    `rope_parameters` has a mapping for each kind of layer, and of earlier versions, with
    `rope_local_base_freq` and a `sliding_window_pattern` (each so many-th layer is full) in place of
    `layer_types`."""

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    rope_local_base_freq: float | None = None
    attention_bias: bool = False
    query_pre_attn_scalar: int | float = 256
    sliding_window: int | None = 4096
    layer_types: Sequence[str] | None = None
    sliding_window_pattern: int | None = None
    _sliding_window_pattern: int | None = None  # how transformers 5 writes it, beside layer_types
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attn_logit_softcapping is not None:
            raise ValueError(f"attn_logit_softcapping {self.attn_logit_softcapping}: only null is known")
        if self.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention true: a causal model is wanted")
        if self.hidden_act not in ("silu", self.hidden_activation):  # silu: the default, so not in the file
            raise ValueError(f"hidden_act {self.hidden_act!r}, hidden_activation {self.hidden_activation!r}?")
        if not self.query_pre_attn_scalar > 0:
            raise ValueError(f"query_pre_attn_scalar {self.query_pre_attn_scalar}: above 0 is wanted")
        _ = self.kinds

    @property
    def kinds(self) -> Sequence[str]:
        """Each layer's kind. Raises ValueError for a kind that is not known."""
        pattern = self.sliding_window_pattern or self._sliding_window_pattern or 6
        default = [SLIDING if (i + 1) % pattern else FULL for i in range(self.num_hidden_layers)]
        types = default if self.layer_types is None else self.layer_types
        windows_by_layer(self.num_hidden_layers, self.sliding_window, types, 0)
        return types

    @property
    def ropes(self) -> Mapping[str, Mapping[str, Any]]:
        """`rope_parameters` of both kinds of layers. Raises ValueError where two dialects disagree."""
        given = self.rope_parameters or {}
        if odd := sorted(set(given) - {FULL, SLIDING}):
            raise ValueError(f"rope_parameters has {odd}; a mapping for {FULL} and for {SLIDING} is wanted")
        full = either_dialect(given.get(FULL), self.rope_theta, self.rope_scaling)
        sliding = either_dialect(given.get(SLIDING), self.rope_local_base_freq, None)
        return {FULL: {"rope_theta": 1e6, **full}, SLIDING: {"rope_theta": 1e4, **sliding}}

    @property
    def rope(self) -> Mapping[str, Any]:
        return self.ropes[FULL]

    @property
    def traits(self) -> Traits:
        bias = self.attention_bias
        windows = [self.sliding_window if kind == SLIDING else None for kind in self.kinds]
        return Traits(
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            windows=windows,
            ropes=[self.ropes[kind] for kind in self.kinds],
            scale=self.query_pre_attn_scalar**-0.5,
            act=self.hidden_activation,
            norm_offset=1.0,
            post_norms=True,
            embed_scale=self.hidden_size**0.5,
            logit_cap=self.final_logit_softcapping,
        )


ARCHITECTURE = Architecture("gemma3_text", Config, build, weights)

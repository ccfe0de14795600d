"""LLaDA (Nie et al., 2502.09992): Llama's layers without a causal mask, trained as a masked diffusion model.

Every place sees the whole row, and the logits at a place predict that place. Config keys and weight names
are OLMo's, from whose code its authors started: of what that code can do, their checkpoints use Llama's
block with separate q, k, v and a gated MLP whose gate is `ff_proj`, and nothing else is understood here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.architecture import Architecture
from ..core.model import Model
from ..core.weights import Rule
from ..hybrid import transformer
from ..hybrid.transformer import Traits, TransformerConfig
from .denoiser import Denoiser, Masked, masked_diffusion

# Keys that change the maths, with the values at which the model is the one above.
_FIXED = {
    "block_type": ("llama",),
    "block_group_size": (1,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "alibi": (False,),
    "rope": (True,),
    "multi_query_attention": (None, False),
}


@dataclass(frozen=True)
class Config(Masked):
    """The keys of Hugging Face's config.json for model_type "llada". `embedding_size` is how many rows the
    embedding has, `vocab_size` where it is not given. The fields after `mask_token_id` are understood at one
    value only, or leave the maths alone."""

    d_model: int
    n_layers: int
    n_heads: int
    mlp_hidden_size: int
    vocab_size: int
    n_kv_heads: int | None = None
    embedding_size: int | None = None
    activation_type: str = "silu"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_sequence_length: int = 1024
    include_bias: bool = False
    include_qkv_bias: bool = False
    weight_tying: bool = False
    mask_token_id: int | None = None
    block_type: str = "llama"
    block_group_size: int = 1
    layer_norm_type: str = "rms"
    layer_norm_with_affine: bool = True
    bias_for_layer_norm: bool | None = False
    attention_layer_norm: bool = False
    input_emb_norm: bool = False
    scale_logits: bool = False
    alibi: bool = False
    rope: bool = True
    multi_query_attention: bool | None = None
    attention_layer_norm_with_affine: bool = True  # of norms that are not there
    alibi_bias_max: float = 8.0
    mlp_ratio: int = 4  # what mlp_hidden_size would be without being given
    rope_full_precision: bool = True  # ours always is
    flash_attention: bool = False
    precision: str | None = None
    init_device: str | None = None
    init_fn: str | None = None

    def __post_init__(self) -> None:
        odd = [f"{k} = {getattr(self, k)!r}" for k, of in _FIXED.items() if getattr(self, k) not in of]
        if odd:
            raise ValueError(
                f"{', '.join(odd)}: of OLMo's options only those of LLaDA's checkpoints are known"
            )
        if self.rows < self.vocab_size:
            raise ValueError(f"embedding_size {self.rows} is less than vocab_size {self.vocab_size}")
        _ = self.layers  # raises for heads that do not fit

    @property
    def rows(self) -> int:
        return self.embedding_size or self.vocab_size

    @property
    def layers(self) -> _Layers:
        """The same as a transformer's config."""
        return _Layers(
            vocab_size=self.rows,
            hidden_size=self.d_model,
            intermediate_size=self.mlp_hidden_size,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads,
            hidden_act=self.activation_type,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_sequence_length,
            rope_theta=self.rope_theta,
            tie_word_embeddings=self.weight_tying,
            qkv_bias=self.include_bias or self.include_qkv_bias,
            bias=self.include_bias,
        )

    def asked(self, mask_id: int) -> Denoiser:
        return Denoiser(mask_id)


@dataclass(frozen=True)
class _Layers(TransformerConfig):
    qkv_bias: bool = False
    bias: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(qkv_bias=self.qkv_bias, out_bias=self.bias, mlp_bias=self.bias, block=None)


def build(config: Config) -> Model:
    model = transformer.build(config.layers)
    model.config = config
    return model


# Pieces of names: transformers' Llama, OLMo.
_NAMES = {
    "model.embed_tokens.": "wte.",
    "model.norm.": "ln_f.",
    "lm_head.": "ff_out.",
    "model.layers.{i}.": "blocks.{i}.",
    "self_attn.o_proj.": "attn_out.",
    "self_attn.": "",
    "mlp.gate_proj.": "ff_proj.",
    "mlp.up_proj.": "up_proj.",
    "mlp.down_proj.": "ff_out.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ff_norm.",
}


def weights(config: Config) -> list[Rule]:
    """A transformer's rules under OLMo's names."""
    return [replace(rule, src=tuple(map(_olmo, rule.src))) for rule in transformer.weights(config.layers)]


def _olmo(name: str) -> str:
    """What OLMo calls a tensor of transformers' Llama."""
    for theirs, olmo in _NAMES.items():
        name = name.replace(theirs, olmo)
    return f"model.transformer.{name}"


ARCHITECTURE = Architecture("llada", Config, build, weights, decode=masked_diffusion)

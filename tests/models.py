"""Tiny models whose weights hide no fault, for every architecture that the finder knows.

Default weights hide most faults: norms of one, biases of zero, decays near one, one group, one head.
Here no two sizes agree by accident (dk != dv, more value heads than key heads, groups of two, widths 2 to
4), constants are moved, and decays a token run from under 0.01 to over 0.999. An architecture without an
entry in MODELS fails tests/test_laws.py, which says what to add. Knows no law.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from constate.core.architecture import read_config
from constate.core.decay import inverse_softplus
from constate.core.model import Model
from constate.kernels.dispatch import select
from constate.linear_attn.hgrn2 import HGRN2 as HGRN2Mixer
from constate.linear_attn.rwkv7 import TimeMix
from constate.loading import find
from constate.ssm.rg_lru import RGLRU

VOCAB = 97
WINDOW = 5
TRANSFORMERS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "deepseek_v3")


@dataclass(frozen=True)
class Entry:
    """A config.json, and by hand what its cache grows by: `slope` bytes a token for ever, `ring` bytes a
    token for the first WINDOW ones. `widths` are those of its convolutions; every scan has decays below
    the first of `decays` and above the second, None where the family has no decay."""

    raw: Mapping[str, Any]
    slope: int = 0
    ring: int = 0
    widths: tuple[int, ...] = ()
    decays: tuple[float, float] | None = (0.02, 0.999)

    @property
    def recurrent(self) -> bool:
        if self.raw["model_type"] == "composed":
            return any(layer["mixer"]["type"] not in ("attention", "latent") for layer in self.raw["layers"])
        return self.raw["model_type"] not in TRANSFORMERS


def _composed(
    *mixers: Mapping[str, Any], mlps: bool = True, experts: Sequence[Mapping[str, Any]] = (), **over: Any
) -> dict[str, Any]:
    every = experts or [{"width": 40} if mlps and i % 2 == 0 else None for i in range(len(mixers))]
    layers = [{"mixer": m, "mlp": mlp} for m, mlp in zip(mixers, every, strict=True)]
    head = {"model_type": "composed", "vocab_size": VOCAB, "hidden_size": 32, "layers": layers}
    return {**head, "norm_eps": 1e-5, "tie_word_embeddings": False, **over}


MAMBA = {"type": "mamba", "inner": 48, "state_size": 6, "rank": 3, "conv": 4}
MAMBA2 = {"type": "mamba2", "heads": 4, "head_dim": 12, "state_size": 8, "groups": 2, "conv": 3}
GLA = {"type": "gla", "heads": 2, "key_dim": 8, "value_dim": 12, "rank": 5, "temperature": 2.0}
DELTA = {
    "type": "gated_deltanet",
    "heads": 2,
    "key_dim": 12,
    "value_dim": 8,
    "value_heads": 4,
    "conv": 3,
    "norm_eps": 1e-3,  # less, and the norm of a head that read almost nothing makes much of rounding
}
HGRN2 = {"type": "hgrn2", "heads": 2, "key_dim": 12, "value_dim": 8, "norm_eps": 1e-3}
LINEAR = {"type": "linear_attn", "heads": 4, "kv_heads": 2, "key_dim": 6, "value_dim": 10}
SQUARE = {"type": "gated_deltanet", "heads": 2, "key_dim": 8, "value_dim": 8, "conv": 2, "norm_eps": 1e-3}
DELTA_NET = {"type": "delta_net", "heads": 2, "key_dim": 12, "value_dim": 8, "conv": 3, "norm_eps": 1e-3}
RWKV7 = {"type": "rwkv7", "heads": 3, "key_dim": 8, "value_dim": 12, "decay_rank": 5, "rate_rank": 4}
RWKV7 |= {"gate_rank": 7, "norm_eps": 1e-2}
RWKV7_DECAYS = (0.56, 0.999)  # its sigmoid lets no more than 46% go in a token
RETNET = {"type": "retnet", "heads": 4, "kv_heads": 2, "key_dim": 8, "value_dim": 12, "rope_theta": 100.0}
CONSTANT = (0.97, 0.99)  # RetNet's decays are no parameters: 31/32, 63/64, 127/128, 255/256 in four heads
KDA = {"type": "kda", "heads": 2, "value_heads": 4, "key_dim": 12, "value_dim": 8, "rank": 5, "conv": 3}
KDA |= {"norm_eps": 1e-3}
RG_LRU = {"type": "rg_lru", "width": 48, "heads": 4, "conv": 3}
LIGHTNING = {"type": "lightning", "heads": 4, "head_dim": 10}
SLOPES = (0.9, 0.99)  # nor are lightning attention's: up to exp(-1 / 4) or so, less in every layer
ROPE = {"rope_type": "default", "rope_theta": 100.0}
ATTENTION = {"type": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8}
LATENT = {"type": "latent", "heads": 3, "rank": 12, "key_dim": 8, "rope_dim": 4, "value_dim": 6}
LATENT_KV = (12 + 4) * 4  # bytes a token of one such layer: the latent and the shared key
KV = 2 * 2 * 8 * 4  # bytes a token of one such layer: k and v, two heads of eight, float32
TRANSFORMER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": ROPE,
}

MAMBA_KEYS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 6,
    "intermediate_size": 40,  # and a time_step_rank of 2, a sixteenth of hidden_size
}

FLA_KEYS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "intermediate_size": 40,
    "norm_eps": 1e-3,
}

MODELS: Mapping[str, Entry] = {
    "mamba2": Entry(
        {
            "model_type": "mamba2",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 12,
            "n_groups": 2,
            "conv_kernel": 4,
            "use_bias": True,
        },
        widths=(4,),
    ),
    "llama": Entry(
        {
            **TRANSFORMER,
            "model_type": "llama",
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        slope=2 * KV,
    ),
    "composed": Entry(  # one of everything
        _composed(
            {**DELTA, "negative": True},
            {**ATTENTION, "window": WINDOW, "rope": ROPE},
            {**MAMBA, "conv": 2},
            MAMBA2,
            ATTENTION,
            {**GLA, "conv": 4},
            tie_word_embeddings=True,
            embed_scale=1.7,
        ),
        slope=KV,
        ring=KV,
        widths=(2, 3, 4),
    ),
    "composed mamba": Entry(
        _composed(
            MAMBA, {**MAMBA, "conv": 3, "bias": True}, {**MAMBA, "norm_eps": 1e-3, "norm_weight": True}
        ),
        widths=(3, 4),
    ),
    "composed mamba2": Entry(
        _composed(
            {**MAMBA2, "conv": 2},
            {**MAMBA2, "head_dim": 8, "dt_limit": [0.01, 2.0]},
            {**MAMBA2, "norm": False, "scales": [0.9, 1.1, 0.7, 1.3, 0.6]},
            mlps=False,
        ),
        widths=(2, 3),
    ),
    "composed gla": Entry(_composed({**GLA, "conv": 3}, GLA), widths=(3,)),
    "composed gated_deltanet": Entry(
        _composed({**DELTA, "negative": True}, SQUARE, {**DELTA, "conv": 4}), widths=(2, 3, 4)
    ),
    "composed window": Entry(
        _composed({**ATTENTION, "window": WINDOW, "rope": ROPE}, {**ATTENTION, "window": WINDOW}),
        ring=2 * KV,
    ),
    "composed attention": Entry(
        _composed(
            {**ATTENTION, "rope": {**ROPE, "partial_rotary_factor": 0.5}},
            {**ATTENTION, "qk_norm": True},
            {**ATTENTION, "kv_heads": 1},
            {**ATTENTION, "kv_heads": 4, "gate": True},
        ),
        slope=2 * KV + KV // 2 + 2 * KV,
    ),
    "composed kda": Entry(
        _composed(KDA, {**KDA, "value_heads": None, "value_dim": 20, "bound": -9.0}), widths=(3,)
    ),
    "composed rg_lru": Entry(
        _composed(RG_LRU, {**RG_LRU, "heads": 3, "conv": 4, "act": "silu"}), widths=(3, 4)
    ),
    "composed cross-layer": Entry(  # two layers hold keys and values, and three read them
        _composed(
            {**ATTENTION, "rope": ROPE},
            {**ATTENTION, "window": WINDOW},
            {**ATTENTION, "heads": 6, "rope": ROPE, "kv_from": 0, "qk_norm": True},
            {**ATTENTION, "heads": 2, "window": WINDOW, "kv_from": 1, "bias": True, "gate": True},
            {**ATTENTION, "rope": ROPE, "kv_from": 0, "scale": 0.5},
        ),
        slope=KV,
        ring=KV,
    ),
    "composed latent": Entry(  # expanded over a past from 17 tokens on, absorbed for fewer
        _composed({**LATENT, "q_rank": 9, "rope": ROPE}, {**LATENT, "norm_eps": 1e-2, "scale": 0.4}),
        slope=2 * LATENT_KV,
    ),
    "retnet": Entry(
        {
            "model_type": "retnet",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "expand_k": 0.75,
            "expand_v": 1.5,
            "intermediate_size": 40,
            "norm_eps": 1e-3,
        },
        decays=CONSTANT,
    ),
    "composed retnet": Entry(
        _composed(RETNET, {**RETNET, "kv_heads": 4, "gate": False, "norm_eps": 1e-3}), decays=CONSTANT
    ),
    "composed linear_attn": Entry(
        _composed(
            LINEAR,
            {**LINEAR, "feature_map": "taylor", "kv_heads": 4, "key_dim": 4, "output_norm": False},
            {**LINEAR, "feature_map": "relu", "normaliser": False, "unit_k": True},
            {**LINEAR, "feature_map": "identity", "normaliser": False},
        ),
        decays=None,
    ),
    "composed hgrn2": Entry(_composed({**HGRN2, "conv": 3, "bound": 0.003}, HGRN2), widths=(3,)),
    "gla": Entry(
        {
            **FLA_KEYS,
            "model_type": "gla",
            "num_kv_heads": 2,
            "expand_k": 0.75,
            "expand_v": 1.5,
            "use_short_conv": True,
            "conv_size": 3,
            "clamp_min": -4.5,
            "gate_logit_normalizer": 2,
        },
        widths=(3,),
    ),
    "linear_attn": Entry(
        {
            **FLA_KEYS,
            "model_type": "linear_attn",
            "num_hidden_layers": 3,
            "num_kv_heads": 2,
            "expand_k": 0.75,
            "expand_v": 1.5,
            "feature_map": "elu",
            "norm_feature_map": True,
            "norm_q": True,
            "norm_k": False,
            "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 100.0},
        },
        slope=KV,
        decays=None,
    ),
    "based": Entry(
        {
            **FLA_KEYS,
            "model_type": "based",
            "num_hidden_layers": 3,
            "feature_dim": 5,
            "window_size": WINDOW,
            "window_layers": [1],
        },
        ring=2 * KV,
        decays=None,
    ),
    "hgrn2": Entry(
        {
            **FLA_KEYS,
            "model_type": "hgrn2",
            "num_hidden_layers": 3,
            "num_heads": None,
            "expand_ratio": 16,
            "use_short_conv": True,
            "conv_size": 4,
        },
        widths=(4,),
    ),
    "mistral": Entry({**TRANSFORMER, "model_type": "mistral", "sliding_window": WINDOW}, ring=2 * KV),
    "qwen2": Entry(
        {
            **TRANSFORMER,
            "model_type": "qwen2",
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
        slope=KV,
        ring=2 * KV,
    ),
    "qwen3": Entry(
        {
            **TRANSFORMER,
            "model_type": "qwen3",
            "num_hidden_layers": 3,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        slope=2 * KV,
        ring=KV,
    ),
    "gemma3_text": Entry(
        {
            **TRANSFORMER,
            "model_type": "gemma3_text",
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-3,
            "query_pre_attn_scalar": 13,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": {"rope_theta": 700.0}, "sliding_attention": ROPE},
            "final_logit_softcapping": 9.0,
            "tie_word_embeddings": True,
        },
        slope=KV,
        ring=2 * KV,
    ),
    "deepseek_v3": Entry(
        {
            "model_type": "deepseek_v3",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "kv_lora_rank": 12,
            "q_lora_rank": 9,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "rope_parameters": ROPE,
        },
        slope=3 * LATENT_KV,
    ),
    "minimax": Entry(
        {
            **TRANSFORMER,
            "model_type": "minimax",
            "intermediate_size": 20,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "sliding_window": None,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-3,
            "full_attn_alpha_factor": 1.2,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 0.9,
            "linear_attn_beta_factor": 1.1,
            "mlp_alpha_factor": 1.15,
            "mlp_beta_factor": 0.85,
        },
        slope=2 * KV,
        decays=SLOPES,
    ),
    "composed lightning": Entry(
        _composed(LIGHTNING, {**LIGHTNING, "heads": 3, "share": 0.8, "norm_eps": 1e-3}), decays=SLOPES
    ),
    "mamba": Entry(
        {**MAMBA_KEYS, "model_type": "mamba", "conv_kernel": 3, "tie_word_embeddings": True}, widths=(3,)
    ),
    "falcon_mamba": Entry(
        {
            **MAMBA_KEYS,
            "model_type": "falcon_mamba",
            "conv_kernel": 4,
            "use_bias": True,
            "mixer_rms_eps": 1e-2,
            "tie_word_embeddings": False,
        },
        widths=(4,),
    ),
    "delta_net": Entry(
        {
            "model_type": "delta_net",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 2,
            "expand_k": 0.75,
            "expand_v": 1.25,
            "conv_size": 3,
            "use_gate": True,
            "allow_neg_eigval": True,
            "intermediate_size": 40,
            "norm_eps": 1e-3,
        },
        widths=(3,),
        decays=None,
    ),
    "composed delta_net": Entry(
        _composed(
            {**DELTA_NET, "negative": True},
            {**DELTA_NET, "act": "elu", "qk_norm": "sum", "gate": True, "heads": 3},
            {**DELTA_NET, "conv": 0, "act": "identity", "rate": False},
        ),
        widths=(3,),
        decays=None,
    ),
    "gated_deltanet": Entry(
        {
            "model_type": "gated_deltanet",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 2,
            "num_v_heads": 4,
            "head_dim": 12,
            "expand_v": 0.75,
            "conv_size": 4,
            "use_gate": False,
            "allow_neg_eigval": True,
            "intermediate_size": 40,
            "norm_eps": 1e-3,
        },
        widths=(4,),
    ),
    "rwkv7": Entry(
        {
            "model_type": "rwkv7",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "value_dim": 64,
            "intermediate_size": 120,
            "decay_low_rank_dim": 5,
            "a_low_rank_dim": 4,
            "gate_low_rank_dim": 7,
            "v_low_rank_dim": 3,
            "norm_eps": 1e-3,
        },
        widths=(2,),
        decays=RWKV7_DECAYS,
    ),
    "composed experts": Entry(  # the routers of Jamba, of Qwen3-Next and of DeepSeek-V3
        _composed(
            MAMBA2,
            ATTENTION,
            GLA,
            experts=(
                {"experts": 5, "per_token": 2, "width": 12, "normalise": False},
                {"experts": 4, "per_token": 2, "width": 20, "shared": 12, "shared_gate": True},
                {
                    **{"experts": 9, "per_token": 3, "width": 12, "scores": "sigmoid", "scale": 1.7},
                    **{"groups": 3, "kept_groups": 2, "correction": True, "shared": 20},
                },
            ),
        ),
        slope=KV,
        widths=(3,),
    ),
    "composed rwkv7": Entry(
        _composed(RWKV7, {**RWKV7, "value_rank": 3}, ATTENTION, RWKV7, {**RWKV7, "value_rank": 2}),
        slope=KV,
        widths=(2,),
        decays=RWKV7_DECAYS,
    ),
    "falcon_h1": Entry(
        {
            "model_type": "falcon_h1",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-3,
            "rope_parameters": ROPE,
            "attention_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
            "mamba_d_ssm": 48,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "mamba_d_conv": 3,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 1.3,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.6],
            "mlp_multipliers": [0.8, 1.25],
        },
        slope=2 * KV,
        widths=(3,),
    ),
    "zamba2": Entry(  # two blocks, of which the first serves twice
        {
            "model_type": "zamba2",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "num_attention_heads": 4,
            "rms_norm_eps": 1e-2,
            "n_mamba_heads": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 2,
            "mamba_d_state": 24,
            "mamba_d_conv": 3,
            "time_step_min": 0.05,
            "add_bias_linear": True,
            "use_shared_attention_adapter": True,
            "adapter_rank": 3,
            "use_mem_rope": True,
            "rope_parameters": ROPE,
            "tie_word_embeddings": False,
        },
        slope=3 * 2 * 4 * 16 * 4,
        widths=(3,),
    ),
    "jamba": Entry(
        {
            "model_type": "jamba",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 20,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_expand": 2,
            "mamba_dt_rank": 3,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
        slope=KV,
        widths=(3,),
    ),
    "nemotron_h": Entry(
        {
            "model_type": "nemotron_h",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 40,
            "mlp_bias": True,
            "ssm_state_size": 12,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "n_groups": 3,
            "conv_kernel": 3,
            "time_step_min": 0.02,
            "use_bias": True,
            "n_routed_experts": 8,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "moe_latent_size": 24,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "n_group": 4,
            "topk_group": 2,
            "layer_norm_epsilon": 1e-3,
        },
        slope=KV,
        widths=(3,),
    ),
    "qwen3_next": Entry(
        {
            "model_type": "qwen3_next",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 12,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
        slope=KV,
        widths=(3,),
    ),
    "recurrent_gemma": Entry(
        {
            "model_type": "recurrent_gemma",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 72,
            "num_hidden_layers": 4,
            "block_types": ["recurrent", "attention", "recurrent"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "lru_width": 48,
            "attention_window_size": WINDOW,
            "conv1d_width": 3,
            "logits_soft_cap": 9.0,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        ring=KV,
        widths=(3,),
    ),
    "kimi_linear": Entry(
        {
            "model_type": "kimi_linear",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "num_experts": 6,
            "num_expert_group": 3,
            "topk_group": 2,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 10,
            "routed_scaling_factor": 1.7,
            "rms_norm_eps": 1e-3,
        },
        slope=2 * LATENT_KV,
        widths=(3,),
    ),
    "composed convolution": Entry(  # what `constate quality compare` trains, but for the sizes
        _composed(
            {"type": "convolution", "conv": 3},
            {**LINEAR, "feature_map": "unit", "normaliser": False},
            {"type": "convolution", "conv": 4, "bias": True, "act": "silu"},
            {**ATTENTION, "qk_norm": True},
        ),
        slope=KV,
        widths=(3, 4),
        decays=None,
    ),
}

RECURRENT = tuple(name for name, entry in MODELS.items() if entry.recurrent)
HYBRIDS = ("qwen3_next", "jamba", "zamba2", "falcon_h1", "nemotron_h", "kimi_linear", "recurrent_gemma")
HYBRIDS += ("minimax", "gemma3_text", "deepseek_v3")  # released hybrids, and attention's variants
FULL_ATTENTION = ("llama", "composed attention", "composed latent", "deepseek_v3")


def make(name: str, backend: str = "torch", **over: Any) -> Model:
    """The model of this entry with hostile weights, the same at every call. `over` changes its config."""
    raw = {**MODELS[name].raw, **over}
    architecture = find(raw["model_type"]).architecture
    seed = list(MODELS).index(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = architecture.build(read_config(architecture.Config, raw))
    spread(model, seed)
    model.ops = select(backend, "cpu")
    return model.requires_grad_(False)


@torch.no_grad()
def spread(model: nn.Module, seed: int) -> None:
    """Moves every parameter in place: matrices so that logits are decided, constants off their constant,
    decays from under 0.01 to over 0.999."""
    g = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for name, p in model.named_parameters():
        if id(p) in seen:
            continue
        seen.add(id(p))
        noise = torch.randn(p.shape, generator=g)
        part = name.rsplit(".", 1)[-1]
        if part == "d":
            p.copy_(1 + 0.5 * noise)
        elif name.endswith("conv.weight"):
            p.copy_(noise * 1.2 * p.shape[1] ** -0.5)
        elif name == "embed.weight":
            p.copy_(noise * 0.7)
        elif name == "head.weight":
            p.copy_(noise * 3 * p.shape[1] ** -0.5)
        elif name.endswith(("qkv.up.weight", "gate_up.up.weight")):  # adapters: little beside the adapted
            p.copy_(noise * 0.4 * p.shape[-1] ** -0.5)
        elif p.ndim > 1 and part != "a_log":
            p.copy_(noise * 1.4 * p.shape[-1] ** -0.5)
        elif p.std() == 0 or part == "bias":
            p.add_(0.3 * noise)
    for module in model.modules():
        a_log, dt_bias = getattr(module, "a_log", None), getattr(module, "dt_bias", None)
        if isinstance(a_log, Tensor) and isinstance(dt_bias, Tensor):
            _spread_rates(a_log, dt_bias, g)
        if isinstance(module, TimeMix):  # a sigmoid
            bias = module.decay.bias
            assert bias is not None
            bias.copy_(_shuffled(torch.linspace(-9, 5, bias.numel()), g))
        decay = getattr(module, "decay_proj", None)
        if isinstance(decay, nn.Linear) and decay.bias is not None:  # log-sigmoid over a temperature of 2
            decay.bias.copy_(_shuffled(torch.linspace(-11, 9, decay.bias.numel()), g))
        if isinstance(module, RGLRU):  # a recurrence gate between 0 and 1 has its say
            rates = torch.logspace(-4, 0.5, module.rate.numel())
            module.rate.copy_(_shuffled(inverse_softplus(rates), g))
        if isinstance(module, HGRN2Mixer):
            module.in_proj.weight[module.keys : 2 * module.keys] *= 3  # gates that close
            if module.bounds is not None:
                logits = torch.linspace(-4, 4, module.bounds.numel())
                module.bounds.copy_(_shuffled(logits, g).view_as(module.bounds))


def _spread_rates(a_log: Tensor, dt_bias: Tensor, g: torch.Generator) -> None:
    """exp(a_log) * softplus(dt_bias), what is lost a token before the input has its say, from 2e-4 to 5."""
    dt = _shuffled(torch.logspace(-2, 0, dt_bias.numel()), g)
    dt_bias.copy_(inverse_softplus(dt))
    rates = _shuffled(torch.logspace(math.log10(2e-4), math.log10(5), a_log.numel()), g).view_as(a_log)
    most = dt.view(len(a_log), -1).amax(1)  # of a head's channels, where each has its own
    a_log.copy_((rates / (most if a_log.ndim == 1 else most[:, None])).log())


def _shuffled(x: Tensor, g: torch.Generator) -> Tensor:
    return x[torch.randperm(x.numel(), generator=g)]


def tokens(n: int, seed: int = 0) -> Tensor:
    """(n,) random ids."""
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(1000 + seed))


def with_ops(model: Model, **changed: Any) -> None:
    """Replaces some of the ops that this model, and no other, calls."""
    model.ops = replace(model.ops, **changed)

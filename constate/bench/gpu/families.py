"""A small model of every family, for checking it on a device: few layers, heads as wide as kernels are
written for, released hybrids at their medium size.

Knows configs alone. An architecture that is missing here fails tests/bench/test_gpu.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..hybrids import HYBRIDS

VOCAB = 512
COMMON = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MLP = {**COMMON, "intermediate_size": 256}
HEADS = {**MLP, "num_heads": 2}
TRANSFORMER = {
    **MLP,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
}
MASKED = {**TRANSFORMER, "mask_token_id": VOCAB - 1}
MDLM = {
    "vocab_size": VOCAB,
    "hidden_dim": 128,
    "n_blocks": 2,
    "n_heads": 2,
    "cond_dim": 32,
    "model_length": 256,
}
LAYERS = (
    {"type": "gated_deltanet", "heads": 2, "key_dim": 64, "value_dim": 64, "value_heads": 4},
    {"type": "kda", "heads": 2, "key_dim": 64, "value_dim": 64, "rank": 16},
    {"type": "attention", "heads": 4, "kv_heads": 2, "head_dim": 64, "window": 32, "rope": ROPE},
    {"type": "mamba", "inner": 256, "state_size": 16, "rank": 8},
    {"type": "mamba2", "heads": 4, "head_dim": 64, "state_size": 128},
    {"type": "gla", "heads": 2, "key_dim": 64, "value_dim": 64, "conv": 4},
    {"type": "rg_lru", "width": 128, "heads": 2},
    {"type": "attention", "heads": 4, "kv_heads": 2, "head_dim": 64},
)


def _composed(model_type: str, *mixers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    layers = [{"mixer": mixer, "mlp": {"width": 256}} for mixer in mixers]
    return {"model_type": model_type, "vocab_size": VOCAB, "hidden_size": 128, "layers": layers, **more}


ATTENDING = (LAYERS[2] | {"window": None}, LAYERS[-1])
SMALL: Mapping[str, Mapping[str, Any]] = {
    "mamba": {**COMMON, "state_size": 16},
    "mamba2": {**COMMON, "num_heads": 4, "head_dim": 64, "state_size": 128, "n_groups": 2, "expand": 2},
    "falcon_mamba": {**COMMON, "state_size": 16},
    "gla": HEADS,
    "gated_deltanet": {**HEADS, "head_dim": 64, "num_v_heads": 4, "expand_v": 1.0},
    "delta_net": HEADS,
    "retnet": HEADS,
    "hgrn2": {**MLP, "expand_ratio": 64},
    "linear_attn": {**HEADS, "feature_map": "elu"},
    "based": {**HEADS, "feature_dim": 16, "window_size": 32, "window_layers": [1]},
    "rwkv7": {**COMMON, "head_dim": 64},
    "composed": _composed("composed", *LAYERS),
    "llama": TRANSFORMER,
    "mistral": {**TRANSFORMER, "sliding_window": 32},
    "qwen2": TRANSFORMER,
    "qwen3": TRANSFORMER,
    "composed_diffusion": _composed("composed_diffusion", *ATTENDING, mask_token_id=VOCAB - 1),
    "llada": {
        **{"vocab_size": VOCAB, "d_model": 128, "n_layers": 2, "n_heads": 2, "mlp_hidden_size": 256},
        "mask_token_id": VOCAB - 1,
    },
    "Dream": MASKED,
    "sdar": {**MASKED, "block_size": 8},
    "mdlm": MDLM,
    "bd3lm": {**MDLM, "block_size": 4},
    "llada2_moe": {
        **MASKED,
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_shared_experts": 1},
        **{"n_group": 4, "topk_group": 2, "block_size": 8, "first_k_dense_replace": 1},
    },
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"model_type": name, **raw} for name, raw in SMALL.items()},
    **{name.removesuffix("-medium"): {**raw, "vocab_size": VOCAB} for name, raw in HYBRIDS.items()},
}

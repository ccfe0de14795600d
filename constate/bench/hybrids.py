"""A medium size of each released hybrid, for timing: few layers, each of the family's own proportions.

No such models are published: 50 to 150 million parameters with the mixers, the order of layers, the groups
and the experts of the family, small enough to be timed beside a peer on a laptop. Where transformers' own
step forgets that a Mamba-2 step size has a least value, that value is one which none falls below, so that
`--check` has nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB, ROPE = 16384, {"rope_type": "default", "rope_theta": 10000.0}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"

HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next-medium": dict(
        model_type="qwen3_next", vocab_size=VOCAB, hidden_size=768, intermediate_size=2048,
        num_hidden_layers=8, layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, rope_parameters={**ROPE, "partial_rotary_factor": 0.25},
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128,
        linear_value_head_dim=128, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128,
        shared_expert_intermediate_size=256,
    ),
    "jamba-medium": dict(
        model_type="jamba", vocab_size=VOCAB, hidden_size=768, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=12, num_key_value_heads=4, attn_layer_period=8, attn_layer_offset=4,
        num_experts=4, num_experts_per_tok=2,
    ),
    "zamba2-medium": dict(
        model_type="zamba2", vocab_size=VOCAB, hidden_size=768, intermediate_size=2048,
        num_hidden_layers=12, layers_block_type=[*[LINEAR] * 5, "hybrid"] * 2, num_mem_blocks=1,
        num_attention_heads=12, num_key_value_heads=12, n_mamba_heads=24, mamba_ngroups=1,
        mamba_d_state=64, adapter_rank=32, time_step_min=1e-4,
    ),
    "falcon_h1-medium": dict(
        model_type="falcon_h1", vocab_size=VOCAB, hidden_size=768, intermediate_size=2048,
        num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4, head_dim=64,
        rope_parameters=ROPE, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_n_groups=1,
        mamba_d_state=128, embedding_multiplier=1.3, lm_head_multiplier=0.7, key_multiplier=0.6,
        attention_out_multiplier=0.8, ssm_in_multiplier=1.2, ssm_multipliers=[0.9, 1.1, 0.7, 1.3, 0.6],
        mlp_multipliers=[0.8, 1.25],
    ),
    "nemotron_h-medium": dict(
        model_type="nemotron_h", vocab_size=VOCAB, hidden_size=768,
        layers_block_type=[LINEAR, "moe", LINEAR, "mlp", LINEAR, FULL, "moe", LINEAR, "mlp", LINEAR, "moe"],
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, intermediate_size=3072,
        ssm_state_size=128, mamba_num_heads=24, mamba_head_dim=64, n_groups=4, n_routed_experts=8,
        moe_intermediate_size=768, moe_shared_expert_intermediate_size=768, num_experts_per_tok=2,
        time_step_min=1e-4,
    ),
    "kimi_linear-medium": dict(
        model_type="kimi_linear", vocab_size=VOCAB, hidden_size=768, intermediate_size=2048,
        num_hidden_layers=8, layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 2,
        mlp_layer_types=["dense", *["sparse"] * 7], num_attention_heads=8, num_key_value_heads=8,
        kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, linear_head_dim=128,
        linear_num_heads=6, num_experts=16, num_experts_per_token=4, moe_intermediate_size=128,
    ),
    "recurrent_gemma-medium": dict(
        model_type="recurrent_gemma", vocab_size=VOCAB, hidden_size=768, intermediate_size=4608,
        num_hidden_layers=9, block_types=["recurrent", "recurrent", "attention"], num_attention_heads=12,
        num_key_value_heads=1, lru_width=768, attention_window_size=2048,
    ),
    "minimax-medium": dict(
        model_type="minimax", vocab_size=VOCAB, hidden_size=768, intermediate_size=512, num_hidden_layers=8,
        layer_types=[*[LINEAR] * 7, FULL], num_attention_heads=12, num_key_value_heads=4, head_dim=64,
        num_local_experts=8, num_experts_per_tok=2, rope_parameters=ROPE,
    ),
    "gemma3_text-medium": dict(
        model_type="gemma3_text", vocab_size=VOCAB, hidden_size=768, intermediate_size=3072,
        num_hidden_layers=12, layer_types=[*[SLIDING] * 5, FULL] * 2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=128, query_pre_attn_scalar=128, sliding_window=256,
        rope_parameters={FULL: {**ROPE, "rope_theta": 1e6}, SLIDING: ROPE},
    ),
    "deepseek_v3-medium": dict(
        model_type="deepseek_v3", vocab_size=VOCAB, hidden_size=768, intermediate_size=2048,
        num_hidden_layers=8, first_k_dense_replace=1, num_attention_heads=8, num_key_value_heads=8,
        kv_lora_rank=256, q_lora_rank=384, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4, moe_intermediate_size=192,
        rope_parameters=ROPE,
    ),
}  # fmt: skip

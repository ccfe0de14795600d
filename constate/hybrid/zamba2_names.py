"""How Zamba2's tensors are called: Hugging Face's names to ours, shared blocks among them.

A block's weights lie in the first layer that uses it. Files of transformers hold them again in every other
layer that does, which is read where it says the same and not written. All adapters of a block lie in it too,
numbered by the hybrid layers. Knows no mixer; `config` in what follows is zamba2.Config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.weights import Rule, fuse, head, same
from ..ssm.mamba2 import mixer_weights


def weights(config: Any) -> list[Rule]:
    """Hugging Face's names to ours."""
    source, ours = "model.layers.{i}.", "blocks.{i}.mixer."
    rules = [
        same("model.embed_tokens.weight", "embed.weight"),
        same("model.final_layernorm.weight", "norm.weight"),
        head("lm_head.weight", config.tie_word_embeddings),
        same(source + "input_layernorm.weight", "blocks.{i}.mixer_norm.weight"),
        *mixer_weights(source + "mamba.", ours, config.ssm),
        same(source + "linear.weight", ours + "linear.weight"),
        same(source + "mamba_decoder.input_layernorm.weight", ours + "mamba_norm.weight"),
        *mixer_weights(source + "mamba_decoder.mamba.", ours + "mamba.", config.ssm),
    ]
    blocks = config.num_mem_blocks
    for use, layer in enumerate(config.hybrids):
        users = config.hybrids[use % blocks :: blocks]
        source = f"model.layers.{layer}.shared_transformer."
        block = _block(config, source, users[0])
        for at, user in enumerate(users):
            block += _adapters(config, source, use % blocks + at * blocks, user)
        rules += block if layer == users[0] else [replace(rule, optional=True) for rule in block]
    return rules


def _block(config: Any, source: str, first: int) -> list[Rule]:
    """What all users of a block share."""
    ours, spec = f"blocks.{first}.mixer.", config.attention
    base = ".base" if config.use_shared_attention_adapter else ""
    qkv = [source + f"self_attn.{p}_proj.weight" for p in "qkv"]
    h, hk = spec.heads, spec.kv_heads or spec.heads
    rules = [
        same(source + "input_layernorm.weight", ours + "attention_norm.weight"),
        same(source + "pre_ff_layernorm.weight", ours + "mlp_norm.weight"),
        fuse(qkv, ours + f"attention.qkv{base}.weight", [n * spec.head_dim for n in (h, hk, hk)]),
        same(source + "self_attn.o_proj.weight", ours + "attention.out.weight"),
    ]
    for part in ("weight", "bias") if config.add_bias_linear else ("weight",):
        rules.append(same(source + f"feed_forward.gate_up_proj.{part}", ours + f"mlp.gate_up.base.{part}"))
        rules.append(same(source + f"feed_forward.down_proj.{part}", ours + f"mlp.down.{part}"))
    return rules


def _adapters(config: Any, source: str, use: int, layer: int) -> list[Rule]:
    """What `layer`, the hybrid one that is number `use`, adds to its block."""
    ours, rules = f"blocks.{layer}.mixer.", []
    for at, part in enumerate(("down", "up")):
        mlp = source + f"feed_forward.gate_up_proj_adapter_list.{use}.{at}.weight"
        rules.append(same(mlp, ours + f"mlp.gate_up.{part}.weight"))
        if config.use_shared_attention_adapter:
            qkv = [source + f"self_attn.linear_{p}_adapter_list.{use}.{at}.weight" for p in "qkv"]
            rules.append(fuse(qkv, ours + f"attention.qkv.{part}.weight"))
    return rules

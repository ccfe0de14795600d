"""llama, qwen2 and qwen3 in GGUF: their keys as config.json's, their names as Hugging Face's.

llama.cpp's converter lays llama's q and k rows in pairs for its rotary embedding; those of qwen2 and qwen3
stay in halves. Knows metadata, names and shapes; no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...core.weights import Rule, drop, same
from .keys import Metadata


def config(keys: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    d, h = keys.take("embedding_length"), keys.take("attention.head_count")
    head_dim = keys.find("attention.key_length", d // h)
    if (value := keys.find("attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"keys have {head_dim} channels a head and values {value}; equal ones are wanted")
    made = {
        "model_type": keys.arch,
        "hidden_size": d,
        "intermediate_size": keys.take("feed_forward_length"),
        "num_attention_heads": h,
        "num_key_value_heads": keys.find("attention.head_count_kv", h),
        "head_dim": head_dim,
        "rms_norm_eps": keys.take("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.take("context_length"),
        "rope_parameters": _rope(keys, tensors, head_dim),
    }
    if keys.arch != "qwen2":  # whose q, k and v always have one, and nothing else has
        made["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if keys.arch == "llama":
        made["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    return made


def _rope(keys: Metadata, tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Any]:
    """rope_parameters. A table of divisors, as Llama 3.1's files have it, is longrope's with both alike."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.find("rope.freq_base", 10000.0))}
    if (dim := keys.find("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"{keys.arch}.rope.dimension_count {dim} of {head_dim} channels is not supported")
    linear = keys.find("rope.scale_linear", 1.0)  # how old files say it
    factor = float(keys.find("rope.scaling.factor", linear))
    kind = keys.find("rope.scaling.type", "none" if factor == 1.0 else "linear")
    original = keys.find("rope.scaling.original_context_length")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        rope |= {} if original is None else {"original_max_position_embeddings": original}
        found = {name: keys.find(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        rope |= {name: value for name, value in found.items() if value is not None}
    elif kind != "none":
        raise ValueError(f"{keys.arch}.rope.scaling.type {kind!r} is not known; known are none, linear, yarn")
    if "rope_freqs.weight" in tensors:
        if kind != "none":
            raise ValueError(
                f"the file scales its rotary embedding twice: by {kind} and by rope_freqs.weight"
            )
        divisors = tensors["rope_freqs.weight"].tolist()
        rope |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
        rope |= {"attention_factor": 1.0, "factor": 1.0}
        rope["original_max_position_embeddings"] = original or 8192  # read by none: both tables are one
    return rope


def rules(config: Mapping[str, Any]) -> list[Rule]:
    block, layer = "blk.{i}.", "model.layers.{i}."
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    out = [
        same("token_embd.weight", "model.embed_tokens.weight"),
        same("output_norm.weight", "model.norm.weight"),
        same("output.weight", "lm_head.weight"),
        same(block + "attn_norm.weight", layer + "input_layernorm.weight"),
        same(block + "ffn_norm.weight", layer + "post_attention_layernorm.weight"),
        drop("rope_freqs.weight"),  # the config holds it
        drop(block + "attn_rot_embd.weight"),  # frequencies that old files stored
        drop(block + "attn_rot_embd"),
    ]
    for part in ("weight", "bias"):
        for p in "qk":
            names = block + f"attn_{p}.{part}", layer + f"self_attn.{p}_proj.{part}"
            out.append(in_halves(*names, heads[p]) if config["model_type"] == "llama" else same(*names))
        out.append(same(block + f"attn_v.{part}", layer + f"self_attn.v_proj.{part}"))
        out.append(same(block + f"attn_output.{part}", layer + f"self_attn.o_proj.{part}"))
        out += [
            same(block + f"ffn_{p}.{part}", layer + f"mlp.{p}_proj.{part}") for p in ("gate", "up", "down")
        ]
    return out + [same(block + f"attn_{p}_norm.weight", layer + f"self_attn.{p}_norm.weight") for p in "qk"]


def in_halves(src: str, dst: str, heads: int) -> Rule:
    """A head's rows from pairs (channel 2i turns with 2i + 1) to halves (i turns with i + dim / 2)."""

    def parted(t: Tensor) -> Tensor:
        return t.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def paired(t: Tensor) -> Tensor:
        return t.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    return Rule((src,), (dst,), lambda t: [parted(t[0])], lambda t: [paired(t[0])])

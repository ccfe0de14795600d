"""mamba, falcon_mamba and mamba2 in GGUF: their keys as config.json's, their names as Hugging Face's.

llama.cpp's converter stores A as -exp(A_log) and convolutions without their middle axis; Mamba-2's A and D
get one axis more, and its norm is cut by groups. Knows metadata, names and shapes; no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...core.weights import Rule, same
from .keys import Metadata


def mamba(keys: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    config = _ssm(keys, tensors) | {
        "intermediate_size": keys.take("ssm.inner_size"),
        "time_step_rank": keys.take("ssm.time_step_rank"),
    }
    # How Falcon Mamba is told; the eps of those norms is not in the file, and is its config's default.
    return config | {"model_type": "falcon_mamba"} if keys.find("ssm.dt_b_c_rms", False) else config


def mamba2(keys: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    config, inner, heads = _ssm(keys, tensors), keys.take("ssm.inner_size"), keys.take("ssm.time_step_rank")
    d = config["hidden_size"]
    return config | {
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": keys.find("ssm.group_count", 1),
        "expand": inner // d if inner % d == 0 else inner / d,
    }


def _ssm(keys: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "model_type": keys.arch,
        "hidden_size": keys.take("embedding_length"),
        "state_size": keys.take("ssm.state_size"),
        "conv_kernel": keys.take("ssm.conv_kernel"),
        "layer_norm_epsilon": keys.take("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
    }


def mamba_rules(config: Mapping[str, Any]) -> list[Rule]:
    ours = "backbone.layers.{i}.mixer."
    return [
        *_ssm_rules(config),
        same("blk.{i}.ssm_x.weight", ours + "x_proj.weight"),
        same("blk.{i}.ssm_dt.weight", ours + "dt_proj.weight"),
        same("blk.{i}.ssm_dt.bias", ours + "dt_proj.bias"),
        log_of_negative("blk.{i}.ssm_a", ours + "A_log", *[(-1, config["state_size"])] * 2),
        same("blk.{i}.ssm_d", ours + "D"),
    ]


def mamba2_rules(config: Mapping[str, Any]) -> list[Rule]:
    ours, groups = "backbone.layers.{i}.mixer.", config["n_groups"]
    return [
        *_ssm_rules(config),
        same("blk.{i}.ssm_dt.bias", ours + "dt_bias"),
        log_of_negative("blk.{i}.ssm_a", ours + "A_log", (-1,), (-1, 1)),
        reshaped("blk.{i}.ssm_d", ours + "D", (-1,), (-1, 1)),
        reshaped("blk.{i}.ssm_norm.weight", ours + "norm.weight", (-1,), (groups, -1)),
    ]


def _ssm_rules(config: Mapping[str, Any]) -> list[Rule]:
    block, layer, width = "blk.{i}.", "backbone.layers.{i}.", config["conv_kernel"]
    return [
        same("token_embd.weight", "backbone.embeddings.weight"),
        same("output_norm.weight", "backbone.norm_f.weight"),
        same("output.weight", "lm_head.weight"),
        same(block + "attn_norm.weight", layer + "norm.weight"),
        same(block + "ssm_in.weight", layer + "mixer.in_proj.weight"),
        same(block + "ssm_out.weight", layer + "mixer.out_proj.weight"),
        same(block + "ssm_conv1d.bias", layer + "mixer.conv1d.bias"),
        reshaped(block + "ssm_conv1d.weight", layer + "mixer.conv1d.weight", (-1, 1, width), (-1, width)),
    ]


def reshaped(src: str, dst: str, shape: Sequence[int], stored: Sequence[int]) -> Rule:
    """The same numbers in `shape`, from whichever: files differ in which axes of length 1 they keep."""
    return Rule((src,), (dst,), lambda t: [_shaped(t[0], shape)], lambda t: [_shaped(t[0], stored)])


def log_of_negative(src: str, dst: str, shape: Sequence[int], stored: Sequence[int]) -> Rule:
    """A_log, of which the file holds A = -exp(A_log) in the shape `stored`."""

    def forth(t: Sequence[Tensor]) -> list[Tensor]:
        a = _shaped(t[0], shape).float()
        if not a.is_meta and bool((a > 0).any()):
            raise ValueError("A is positive somewhere: a state that grows without bound")
        return [(-a).log()]

    return Rule((src,), (dst,), forth, lambda t: [_shaped(-t[0].exp(), stored)])


def _shaped(t: Tensor, shape: Sequence[int]) -> Tensor:
    try:
        return t.reshape(tuple(shape))
    except RuntimeError as error:
        raise ValueError(f"shape {tuple(t.shape)} does not fit into {tuple(shape)}") from error

"""Which published architecture a composed model is, if it is one: the way back to published names, which
are Hugging Face's, and flash-linear-attention's for its families.

A list of equal layers that a published family builds too has the same parameters under the same names
here; only config.json differs. Knows configs; no tensors and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from .composed import MIXERS, Config


def published(config: Config) -> dict[str, Any]:
    """config.json's content of the published architecture with these layers, `model_type` included.

    An `embed_scale` stays out of it: whoever writes the weights folds it into the embedding, which then is
    no longer the head. Raises ValueError that says why no published architecture is this model.
    """
    first, *others = config.layers
    mixer = _full(first["mixer"])
    if any(_full(layer["mixer"]) != mixer or layer.get("mlp") != first.get("mlp") for layer in others):
        raise ValueError("its layers differ, and no published architecture here is such a mixture")
    kind = mixer["type"]
    if "experts" in (first.get("mlp") or ()):
        raise ValueError(
            "its layers have experts, and no published architecture here has equal layers of them"
        )
    if kind not in _KINDS:
        raise ValueError(f"no published architecture is known whose layers are {kind} mixers alone")
    try:
        special = _KINDS[kind](mixer, first.get("mlp"), config)
    except _Unlike as error:
        raise ValueError(f"its {kind} layers are like no published architecture's: {error}") from error
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(config.layers),
        "tie_word_embeddings": config.tie_word_embeddings and config.embed_scale == 1.0,
        **special,
    }


class _Unlike(Exception):
    """What keeps a layer from being a published one."""


def _full(mixer: Mapping[str, Any]) -> dict[str, Any]:
    """A mixer's settings with the defaults of its spec."""
    spec = MIXERS[mixer["type"]][1]
    return {f.name: f.default for f in fields(spec) if f.default is not MISSING} | dict(mixer)


def _mamba(m: Mapping[str, Any], mlp: Mapping[str, Any] | None, model: Config) -> dict[str, Any]:
    _need(not mlp, "they have an MLP")
    _need(not m["norm_weight"], "they norm dt, B and C with weights")
    normed = m["norm_eps"] is not None
    special = {
        "model_type": "falcon_mamba" if normed else "mamba",
        "intermediate_size": m["inner"],
        "state_size": m["state_size"],
        "time_step_rank": m["rank"] or "auto",
        "conv_kernel": m["conv"],
        "use_bias": m["bias"],
        "use_conv_bias": m["conv_bias"],
        "hidden_act": m["act"],
        "layer_norm_epsilon": model.norm_eps,
        "residual_in_fp32": False,
    }
    return special | {"mixer_rms_eps": m["norm_eps"]} if normed else special


def _mamba2(m: Mapping[str, Any], mlp: Mapping[str, Any] | None, model: Config) -> dict[str, Any]:
    _need(not mlp, "they have an MLP")
    _need(m["norm"] and not m["norm_before"], "they do not norm what was gated")
    _need(m["scales"] is None, "they scale what their in-projection gives")
    _need(m["out_bias"] in (None, m["bias"]), "one of their two projections has a bias and the other none")
    _need(
        m["norm_eps"] == model.norm_eps, f"their norm_eps {m['norm_eps']} is not the model's {model.norm_eps}"
    )
    inner, d = m["heads"] * m["head_dim"], model.hidden_size
    _need(inner % d == 0, f"their {inner} inner channels are no multiple of hidden_size {d}")
    return {
        "model_type": "mamba2",
        "num_heads": m["heads"],
        "head_dim": m["head_dim"],
        "state_size": m["state_size"],
        "n_groups": m["groups"],
        "expand": inner // d,
        "conv_kernel": m["conv"],
        "use_bias": m["bias"],
        "use_conv_bias": m["conv_bias"],
        "hidden_act": m["act"],
        "time_step_limit": m["dt_limit"],
        "layer_norm_epsilon": model.norm_eps,
        "residual_in_fp32": False,
    }


def _attention(m: Mapping[str, Any], mlp: Mapping[str, Any] | None, model: Config) -> dict[str, Any]:
    rope = m["rope"]
    if not mlp:
        raise _Unlike("they have no MLP")
    _need(rope is not None, "they have no rotary positions")
    _need(rope.get("partial_rotary_factor", 1.0) == 1.0, "their rotary positions turn a part of a head")
    _need(m["scale"] is None, "they scale the products of queries and keys otherwise than by head_dim")
    _need(not m["gate"] and not m["norm_offset"], "they gate their output or offset their norms' weights")
    _need(m["kv_from"] is None, "they read another layer's keys and values")
    _need(m["bias"] or not m["out_bias"], "their output has a bias and q, k, v have none")
    biases, window = bool(m["bias"]) + bool(m["out_bias"]), m["window"]
    special = {
        "intermediate_size": mlp["width"],
        "hidden_act": mlp.get("act", "silu"),
        "num_attention_heads": m["heads"],
        "num_key_value_heads": m["kv_heads"] or m["heads"],
        "head_dim": m["head_dim"],
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", **rope},
    }
    if m["max_positions"] is not None:
        special["max_position_embeddings"] = m["max_positions"]
    if m["qk_norm"]:
        _need(
            m["norm_eps"] == model.norm_eps,
            f"their norm_eps {m['norm_eps']} is not the model's {model.norm_eps}",
        )
        _need(window is None and biases != 1, "they norm q and k with a window or with half of the biases")
        return special | {"model_type": "qwen3", "attention_bias": bool(biases)}
    if window is not None:
        _need(not biases, "they have a window and biases")
        return special | {"model_type": "mistral", "sliding_window": window}
    if biases == 1:
        return special | {"model_type": "qwen2"}
    return special | {"model_type": "llama", "attention_bias": bool(biases)}


def _gated_deltanet(m: Mapping[str, Any], mlp: Mapping[str, Any] | None, model: Config) -> dict[str, Any]:
    return _framed(m, mlp, model) | {
        "model_type": "gated_deltanet",
        "num_heads": m["heads"],
        "head_dim": m["key_dim"],
        "num_v_heads": m["value_heads"],
        "expand_v": m["value_dim"] / m["key_dim"],
        "use_gate": m["gate"],
        "allow_neg_eigval": m["negative"],
    }


def _gla(m: Mapping[str, Any], mlp: Mapping[str, Any] | None, model: Config) -> dict[str, Any]:
    _need((m["rank"], m["temperature"]) == (16, 16.0), "their rank and temperature are not 16 and 16")
    return _framed(m, mlp, model) | {
        "model_type": "gla",
        "num_heads": m["heads"],
        "num_kv_heads": m["kv_heads"],
        "expand_k": m["heads"] * m["key_dim"] / model.hidden_size,
        "expand_v": m["heads"] * m["value_dim"] / model.hidden_size,
        "use_output_gate": m["gate"],
        "clamp_min": m["decay_min"],
    }


def _framed(m: Mapping[str, Any], mlp: Mapping[str, Any] | None, model: Config) -> dict[str, Any]:
    """What flash-linear-attention's families share."""
    if not mlp:
        raise _Unlike("they have no MLP")
    _need(mlp.get("act", "silu") == "silu", f"their MLP's activation is {mlp.get('act')}, not silu")
    _need(
        m["norm_eps"] == model.norm_eps, f"their norm_eps {m['norm_eps']} is not the model's {model.norm_eps}"
    )
    short = {"use_short_conv": m["conv"] > 0, "conv_size": m["conv"] or 4}
    return {"intermediate_size": mlp["width"], "norm_eps": model.norm_eps, **short}


def _need(met: Any, otherwise: str) -> None:
    if not met:
        raise _Unlike(otherwise)


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any] | None, Config], dict[str, Any]]] = {
    "attention": _attention,
    "gated_deltanet": _gated_deltanet,
    "gla": _gla,
    "mamba": _mamba,
    "mamba2": _mamba2,
}

"""mamba_ssm's own dialect: how the first Mamba and Mamba-2 checkpoints were written down.

config.json names `d_model`, `n_layer` and `ssm_cfg`, the arguments of a layer, which `layer` tells to be a
Mamba or a Mamba-2; what is absent has the value that mamba_ssm's code gives it. Weights have Hugging Face's
names but for the embedding's. Some folders hold both dialects' keys; then Hugging Face's count and the
others must agree. Knows no mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Size

from ..core.architecture import Dialect, read_config
from ..core.weights import Rule, same

EMBEDDING = "backbone.embedding.weight"

# Arguments of a layer that its forward pass does not read: initialisation, and how it is computed.
_NO_EFFECT = {
    *("layer", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "conv_init", "A_init_range"),
    *("chunk_size", "use_fast_path", "use_mem_eff_path", "sequence_parallel", "process_group", "layer_idx"),
    *("device", "dtype"),
}
_NEUTRAL: Mapping[str, Any] = {"d_ssm": None, "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False}


@dataclass(frozen=True)
class Original:
    """The keys of mamba_ssm's config.json and its defaults. `vocab_size` counts the ids before they are
    padded to a multiple; without it the embedding's rows say how many there are."""

    d_model: int
    n_layer: int
    vocab_size: int | None = None
    ssm_cfg: Mapping[str, Any] | None = None
    d_inner: int | None = None
    d_intermediate: int = 0
    attn_layer_idx: tuple[int, ...] | None = None
    attn_cfg: Mapping[str, Any] | None = None
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.attn_layer_idx or self.attn_cfg:
            raise ValueError(
                f"attn_layer_idx {list(self.attn_layer_idx or ())} and attn_cfg {self.attn_cfg}: mamba_ssm's "
                "hybrids with attention layers are not read, only models whose every layer is a Mamba"
            )
        if self.d_intermediate:
            raise ValueError(f"d_intermediate {self.d_intermediate}: layers with an MLP are not read, only 0")
        if not self.rms_norm:
            raise ValueError("rms_norm false: LayerNorm is not read here, only RMS norm")


def dialect(
    model_type: str,
    layer: str,
    keys: Mapping[str, tuple[str, Any]],
    sign: str,
    weights: Callable[[Any], Sequence[Rule]],
    derive: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda raw: {},
) -> Dialect:
    """The dialect of models made of this `layer` ("Mamba1" or "Mamba2").

    `keys` maps arguments of the layer to (Hugging Face's key, mamba_ssm's default); `derive` adds what
    follows from those. `sign` is the end of a weight's name that no other kind of layer has.
    """

    def spoken(raw: Mapping[str, Any], names: Collection[str]) -> bool:
        if "model_type" in raw:
            return "d_model" in raw or EMBEDDING in names
        if "d_model" in raw:
            cfg = raw.get("ssm_cfg")
            return (cfg.get("layer", "Mamba1") if isinstance(cfg, Mapping) else "Mamba1") == layer
        return EMBEDDING in names and any(name.endswith(sign) for name in names)

    def config(raw: Mapping[str, Any], shapes: Mapping[str, Size]) -> Mapping[str, Any]:
        if "hidden_size" in raw:
            return _only_published(raw, layer, keys)
        given = read_config(Original, {"model_type": f"{model_type}, mamba_ssm's dialect", **raw})
        read: dict[str, Any] = {
            "model_type": model_type,
            "hidden_size": given.d_model,
            "num_hidden_layers": given.n_layer,
            "vocab_size": _rows(given, shapes),
            "residual_in_fp32": given.residual_in_fp32,
            "tie_word_embeddings": given.tie_embeddings,
            **_layer(given.ssm_cfg or {}, layer, keys),
        }
        return {**read, **derive(read)}

    return Dialect(
        "mamba_ssm",
        spoken,
        config,
        lambda config: [same(EMBEDDING, "embed.weight", optional=True), *weights(config)],
        signs=f"d_model and n_layer in config.json with ssm_cfg.layer {layer!r}, or a tensor {EMBEDDING}",
    )


def _rows(given: Original, shapes: Mapping[str, Size]) -> int:
    if given.vocab_size is not None:
        multiple = given.pad_vocab_size_multiple or 1
        return -(-given.vocab_size // multiple) * multiple
    if EMBEDDING not in shapes:
        raise ValueError(
            f"config.json has no vocab_size and there is no {EMBEDDING} whose rows would tell it"
        )
    return shapes[EMBEDDING][0]


def _layer(ssm_cfg: Mapping[str, Any], layer: str, keys: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    faults = [
        f"{key} = {value!r} is not understood"
        if key not in _NEUTRAL
        else f"{key} = {value!r} is not supported"
        for key, value in ssm_cfg.items()
        if key not in keys and key not in _NO_EFFECT and (key not in _NEUTRAL or value != _NEUTRAL[key])
    ]
    if faults:
        known = ", ".join(keys)
        raise ValueError(f"ssm_cfg of a {layer} layer: {'; '.join(faults)}. What is read: {known}")
    return {theirs: ssm_cfg.get(key, default) for key, (theirs, default) in keys.items()}


def _only_published(
    raw: Mapping[str, Any], layer: str, keys: Mapping[str, tuple[str, Any]]
) -> Mapping[str, Any]:
    """Hugging Face's keys of a config.json that holds mamba_ssm's too. What only the others say counts."""
    own = {f.name for f in fields(Original)} - {"vocab_size", "residual_in_fp32"}  # both dialects have those
    given = {key: value for key, value in raw.items() if key in own}
    read_config(Original, {"d_model": 0, "n_layer": 0, **given})  # refuses what would change the maths
    pairs = {"d_model": "hidden_size", "n_layer": "num_hidden_layers", "d_inner": "intermediate_size"}
    said = [(key, given[key], published) for key, published in pairs.items() if key in given]
    ssm_cfg = given.get("ssm_cfg") or {}
    _layer(ssm_cfg, layer, keys)  # refuses what is not understood
    more = [(f"ssm_cfg.{key}", ssm_cfg[key], keys[key][0]) for key in keys if key in ssm_cfg]
    if "tie_embeddings" in given:
        more.append(("tie_embeddings", given["tie_embeddings"], "tie_word_embeddings"))
    more = [each for each in more if each[1] != "auto"]
    for key, value, published in said + more:
        if raw.get(published) not in (None, value):
            raise ValueError(f"config.json says {key} {value} and {published} {raw[published]}: which?")
    return {key: value for _, value, key in more} | {key: v for key, v in raw.items() if key not in own}

"""Our own format: config.json lists for each layer its mixer and its MLP, so a hybrid is a list.

    {"model_type": "composed", "vocab_size": 1024, "hidden_size": 128, "tie_word_embeddings": true,
     "layers": [{"mixer": {"type": "gated_deltanet", "heads": 4, "key_dim": 32, "value_dim": 32},
                 "mlp": {"width": 256}},
                {"mixer": {"type": "attention", "heads": 4, "head_dim": 32, "window": 64}, "mlp": null}]}

The keys of a mixer are the fields of its spec; those of an mlp are `width` and `act`. Weight names in the
file are the parameters' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.mixer import Mixer
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, everything, same
from ..linear_attn.delta_net import DeltaNet, DeltaNetSpec
from ..linear_attn.gated_deltanet import GatedDeltaNet, GatedDeltaNetSpec
from ..linear_attn.gla import GLA, GLASpec
from ..linear_attn.hgrn2 import HGRN2, HGRN2Spec
from ..linear_attn.linear_attn import LinearAttention, LinearAttentionSpec
from ..linear_attn.retnet import Retention, RetentionSpec
from ..linear_attn.rwkv7 import RWKV7Spec, TimeMix
from ..ssm.mamba import Mamba, MambaSpec
from ..ssm.mamba2 import Mamba2, Mamba2Spec

MIXERS: Mapping[str, tuple[type[Any], type[Any]]] = {
    "attention": (Attention, AttentionSpec),
    "delta_net": (DeltaNet, DeltaNetSpec),
    "gated_deltanet": (GatedDeltaNet, GatedDeltaNetSpec),
    "gla": (GLA, GLASpec),
    "hgrn2": (HGRN2, HGRN2Spec),
    "linear_attn": (LinearAttention, LinearAttentionSpec),
    "mamba": (Mamba, MambaSpec),
    "mamba2": (Mamba2, Mamba2Spec),
    "retnet": (Retention, RetentionSpec),
    "rwkv7": (TimeMix, RWKV7Spec),
}


@dataclass(frozen=True)
class MLPSpec:
    """A gated MLP of `width` hidden channels."""

    width: int
    act: str = "silu"


@dataclass(frozen=True)
class Config:
    """See the file's header. `embed_scale` multiplies the embedding, `norm_eps` is every block norm's."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Mapping[str, Any], ...]
    norm_eps: float = 1e-5
    embed_scale: float = 1.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("layers is empty: list at least one {'mixer': ..., 'mlp': ...}")


def build(config: Config) -> Model:
    blocks = [_block(config, i, layer) for i, layer in enumerate(config.layers)]
    return Model(
        config,
        blocks,
        RMSNorm(config.hidden_size, config.norm_eps),
        vocab=config.vocab_size,
        d=config.hidden_size,
        tied=config.tie_word_embeddings,
        embed_scale=config.embed_scale,
    )


def _block(config: Config, i: int, layer: Mapping[str, Any]) -> Block:
    d, eps, where = config.hidden_size, config.norm_eps, f"layers[{i}]"
    if not set(layer) <= {"mixer", "mlp"} or not layer.get("mixer"):
        raise ValueError(f"{where} has the keys {sorted(layer)}; 'mixer' is wanted and 'mlp' allowed")
    branches: dict[str, tuple[RMSNorm, Mixer]] = {}
    settings = dict(layer["mixer"])
    kind = settings.pop("type", None)
    if kind not in MIXERS:
        raise ValueError(f"{where}.mixer has type {kind!r}; known are {', '.join(MIXERS)}")
    mixer, spec = MIXERS[kind]
    branches["mixer"] = (RMSNorm(d, eps), mixer(d, _read(spec, settings, f"{where}.mixer ({kind})")))
    if layer.get("mlp"):
        mlp = _read(MLPSpec, layer["mlp"], f"{where}.mlp")
        branches["mlp"] = (RMSNorm(d, eps), GatedMLP(d, mlp.width, act=mlp.act))
    return Block(**branches)


def _read(spec: type[Any], settings: Mapping[str, Any], where: str) -> Any:
    """The spec's fields from JSON. Raises ValueError naming unknown and missing keys."""
    known = {f.name for f in fields(spec)}
    required = {f.name for f in fields(spec) if f.default is MISSING}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"{where}: unknown keys {unknown}; known are {', '.join(sorted(known))}")
    if missing := sorted(required - set(settings)):
        raise ValueError(f"{where}: missing keys {missing}")
    return spec(**settings)


def weights(config: Config) -> list[Rule]:
    """The file's names are ours. A tied head may be there all the same, if it is equal."""
    tied = [same("head.weight", "embed.weight", optional=True)] if config.tie_word_embeddings else []
    return [*tied, everything()]


ARCHITECTURE = Architecture("composed", Config, build, weights)

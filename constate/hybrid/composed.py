"""Our own format: config.json lists for each layer its mixer and its MLP, so a hybrid is a list.

    {"model_type": "composed", "vocab_size": 1024, "hidden_size": 128, "tie_word_embeddings": true,
     "layers": [{"mixer": {"type": "gated_deltanet", "heads": 4, "key_dim": 32, "value_dim": 32},
                 "mlp": {"width": 256}},
                {"mixer": {"type": "attention", "heads": 4, "head_dim": 32, "window": 64}, "mlp": null}]}

The keys of a mixer are the fields of its spec; those of an mlp are `width` and `act`, or, for a mixture of
experts, the fields of its spec: {"experts": 8, "per_token": 2, "width": 128}. An attention layer with
`kv_from` reads the keys and values of the layer of that index, whose head_dim, kv_heads, window and rope it
repeats. Weight names in the file are the parameters' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..core.architecture import Architecture
from ..core.attention import Attention, AttentionSpec
from ..core.convolution import Convolution, ConvolutionSpec
from ..core.cross_layer import CrossLayerAttention
from ..core.experts import Experts, ExpertsSpec
from ..core.latent import LatentAttention, LatentSpec
from ..core.mixer import Mixer
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, everything, same
from ..linear_attn.delta_net import DeltaNet, DeltaNetSpec
from ..linear_attn.gated_deltanet import GatedDeltaNet, GatedDeltaNetSpec
from ..linear_attn.gla import GLA, GLASpec
from ..linear_attn.hgrn2 import HGRN2, HGRN2Spec
from ..linear_attn.kda import KDA, KDASpec
from ..linear_attn.lightning import LightningAttention, LightningSpec
from ..linear_attn.linear_attn import LinearAttention, LinearAttentionSpec
from ..linear_attn.retnet import Retention, RetentionSpec
from ..linear_attn.rwkv7 import RWKV7Spec, TimeMix
from ..ssm.mamba import Mamba, MambaSpec
from ..ssm.mamba2 import Mamba2, Mamba2Spec
from ..ssm.rg_lru import RGLRU, RGLRUSpec

MIXERS: Mapping[str, tuple[type[Any], type[Any]]] = {
    "attention": (Attention, AttentionSpec),
    "convolution": (Convolution, ConvolutionSpec),
    "delta_net": (DeltaNet, DeltaNetSpec),
    "gated_deltanet": (GatedDeltaNet, GatedDeltaNetSpec),
    "gla": (GLA, GLASpec),
    "hgrn2": (HGRN2, HGRN2Spec),
    "kda": (KDA, KDASpec),
    "latent": (LatentAttention, LatentSpec),
    "lightning": (LightningAttention, LightningSpec),
    "linear_attn": (LinearAttention, LinearAttentionSpec),
    "mamba": (Mamba, MambaSpec),
    "mamba2": (Mamba2, Mamba2Spec),
    "retnet": (Retention, RetentionSpec),
    "rg_lru": (RGLRU, RGLRUSpec),
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


def build(config: Config, block: int | None = 1) -> Model:
    """The model of these layers. With another `block` than 1 every layer is attention that sees beyond
    its token (AttentionSpec). Raises ValueError for layers that are not understood or cannot do so."""
    blocks: list[Block] = []
    for i, layer in enumerate(config.layers):
        blocks.append(_block(config, i, layer, block))
        if isinstance(blocks[i].branches[0].mixer, CrossLayerAttention):
            _lend(config, i, blocks)
    return Model(
        config,
        blocks,
        RMSNorm(config.hidden_size, config.norm_eps),
        vocab=config.vocab_size,
        d=config.hidden_size,
        tied=config.tie_word_embeddings,
        embed_scale=config.embed_scale,
    )


def _block(config: Config, i: int, layer: Mapping[str, Any], sight: int | None) -> Block:
    d, eps, where = config.hidden_size, config.norm_eps, f"layers[{i}]"
    if not set(layer) <= {"mixer", "mlp"} or not layer.get("mixer"):
        raise ValueError(f"{where} has the keys {sorted(layer)}; 'mixer' is wanted and 'mlp' allowed")
    branches: dict[str, tuple[RMSNorm, Mixer]] = {}
    settings = dict(layer["mixer"])
    kind = settings.pop("type", None)
    if kind not in MIXERS:
        raise ValueError(f"{where}.mixer has type {kind!r}; known are {', '.join(MIXERS)}")
    mixer, spec = MIXERS[kind]
    if "block" in settings:
        raise ValueError(f"{where}.mixer: 'block' is the whole model's, of model_type 'composed_diffusion'")
    if sight != 1 and kind != "attention":
        raise ValueError(f"{where}.mixer has type {kind!r}, which reads one way; attention alone sees ahead")
    if sight != 1:
        settings["block"] = sight
    if settings.get("kv_from") is not None and mixer is Attention:
        mixer = CrossLayerAttention
    branches["mixer"] = (RMSNorm(d, eps), mixer(d, _read(spec, settings, f"{where}.mixer ({kind})")))
    if layer.get("mlp"):
        branches["mlp"] = (RMSNorm(d, eps), _mlp(d, layer["mlp"], f"{where}.mlp"))
    return Block(**branches)


def _mlp(d: int, settings: Mapping[str, Any], where: str) -> Mixer:
    if "experts" in settings:
        return Experts(d, _read(ExpertsSpec, settings, f"{where} (experts)"))
    spec = _read(MLPSpec, settings, where)
    return GatedMLP(d, spec.width, act=spec.act)


def _lend(config: Config, i: int, blocks: Sequence[Block]) -> None:
    """Let layer i, the last of `blocks`, read the keys and values of the layer that it names."""
    lender, reader = config.layers[i]["mixer"]["kv_from"], blocks[i].branches[0].mixer
    source = blocks[lender].branches[0].mixer if lender in range(i) else None
    if not isinstance(source, Attention):
        raise ValueError(f"layers[{i}].mixer: kv_from {lender!r} is no earlier layer with keys and values")
    shaping = {"head_dim": "dim", "kv_heads": "hk", "window": "window", "rope": "rotary"}
    if odd := [key for key, held in shaping.items() if getattr(reader, held) != getattr(source, held)]:
        raise ValueError(f"layers[{i}].mixer: {', '.join(odd)} not as in layers[{lender}], which it reads")
    source.lends = lender


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

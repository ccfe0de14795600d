"""What flash-linear-attention's models share: the config, the blocks and the weights' names around a mixer.

Every layer is a mixer and a SwiGLU MLP, each behind an RMS norm; `attn` puts softmax attention in place of
the mixer in the layers it lists. A family's file adds the keys, the mixer and the mixer's names. No
architecture by itself, and no mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..core.attention import Attention, AttentionSpec
from ..core.mixer import Mixer
from ..core.mlp import GatedMLP
from ..core.model import Block, Model
from ..core.norms import RMSNorm
from ..core.weights import Rule, fuse, head, same

ATTENTION_KEYS = ("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The keys that every family's config.json has, with flash-linear-attention's defaults where its
    models have one; the sizes have none."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    hidden_ratio: int | float | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    elementwise_affine: bool = True
    norm_eps: float = 1e-6
    attn: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.hidden_act not in ("swish", "silu"):
            raise ValueError(f"hidden_act {self.hidden_act!r}: 'swish' is what these models have")
        if not self.elementwise_affine:
            raise ValueError("elementwise_affine false (norms without a weight) is not supported")
        _ = self.attention  # raises for a faulty `attn`

    @property
    def width(self) -> int:
        """The MLP's hidden width: given, or 2/3 of hidden_ratio times the model's, rounded up to 256s."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-int(self.hidden_size * (self.hidden_ratio or 4) * 2 / 3) // 256) * 256

    @property
    def listed(self) -> Sequence[Mapping[str, Any]]:
        """`attn` as a list, whichever way it is written."""
        return () if self.attn is None else (self.attn,) if isinstance(self.attn, Mapping) else self.attn

    @property
    def attention(self) -> Mapping[int, AttentionSpec]:
        """The layers that are softmax attention. Raises ValueError for keys and layers that do not fit."""
        specs: dict[int, AttentionSpec] = {}
        for each in self.listed:
            if unknown := sorted(set(each) - set(ATTENTION_KEYS)):
                raise ValueError(f"attn has unknown keys {unknown}; known are {', '.join(ATTENTION_KEYS)}")
            if missing := [key for key in ("layers", "num_heads") if key not in each]:
                raise ValueError(f"attn lacks {', '.join(missing)}")
            h, theta = each["num_heads"], each.get("rope_theta")
            if self.hidden_size % h:
                raise ValueError(f"attn: {h} heads do not divide hidden_size {self.hidden_size}")
            spec = AttentionSpec(
                heads=h,
                head_dim=self.hidden_size // h,
                kv_heads=each.get("num_kv_heads"),
                window=each.get("window_size"),
                rope={"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta},
                bias=bool(each.get("qkv_bias")),
            )
            for i in each["layers"]:
                if i in specs or not 0 <= i < self.num_hidden_layers:
                    place = f"layer {i} of {self.num_hidden_layers}"
                    raise ValueError(f"attn: {place} is not there or listed twice")
                specs[i] = spec
        return specs


def build(config: Frame, mixer: Callable[[int], Mixer]) -> Model:
    """The model with `mixer(i)` in every layer i that is not attention."""
    d, eps, attention = config.hidden_size, config.norm_eps, config.attention

    def block(i: int) -> Block:
        mixed = Attention(d, attention[i]) if i in attention else mixer(i)
        return Block(mixer=(RMSNorm(d, eps), mixed), mlp=(RMSNorm(d, eps), GatedMLP(d, config.width)))

    return Model(
        config,
        [block(i) for i in range(config.num_hidden_layers)],
        RMSNorm(d, eps),
        vocab=config.vocab_size,
        d=d,
        tied=config.tie_word_embeddings,
    )


def weights(config: Frame, mixer: Callable[[str, str], list[Rule]]) -> list[Rule]:
    """All rules; `mixer(source, ours)` gives those of a mixer from the two prefixes of its names."""
    layer, ours = "model.layers.{i}.", "blocks.{i}."
    gate_up = [layer + f"mlp.{p}_proj.weight" for p in ("gate", "up")]
    rules = [
        same("model.embeddings.weight", "embed.weight"),
        same("model.norm.weight", "norm.weight"),
        same(layer + "attn_norm.weight", ours + "mixer_norm.weight"),
        same(layer + "mlp_norm.weight", ours + "mlp_norm.weight"),
        fuse(gate_up, ours + "mlp.gate_up.weight", [config.width] * 2),
        same(layer + "mlp.down_proj.weight", ours + "mlp.down.weight"),
        head("lm_head.weight", config.tie_word_embeddings),
    ]
    attention = config.attention
    for i, spec in attention.items():
        rules += _attention(spec, f"model.layers.{i}.attn.", f"blocks.{i}.mixer.")
    if not attention:
        return rules + mixer(layer + "attn.", ours + "mixer.")
    others = (i for i in range(config.num_hidden_layers) if i not in attention)
    return rules + [rule for i in others for rule in mixer(f"model.layers.{i}.attn.", f"blocks.{i}.mixer.")]


def _attention(spec: AttentionSpec, source: str, ours: str) -> list[Rule]:
    keys = (spec.kv_heads or spec.heads) * spec.head_dim
    sizes = [spec.heads * spec.head_dim, keys, keys]
    return [
        *(
            fuse([source + f"{p}_proj.{part}" for p in "qkv"], ours + f"qkv.{part}", sizes)
            for part in (("weight", "bias") if spec.bias else ("weight",))
        ),
        same(source + "o_proj.weight", ours + "out.weight"),
    ]


def fuse_convs(src: Sequence[str], dst: str, sizes: Sequence[int]) -> Rule:
    """Depthwise convolutions side by side: each (c, 1, w) in the file, one (sum of c, w) here."""
    joined = fuse(src, dst, sizes)

    def forth(tensors: list[Tensor]) -> list[Tensor]:
        (whole,) = joined.forth(tensors)
        if whole.ndim != 3 or whole.shape[1] != 1:
            raise ValueError(f"shape {tuple(whole.shape)}, wanted (channels, 1, width)")
        return [whole.squeeze(1)]

    return replace(joined, forth=forth, back=lambda t: joined.back([t[0].unsqueeze(1)]))


def heads_of(name: str, width: float, heads: int) -> int:
    """How many channels a head has where `heads` share `width`, which may come from a ratio. Raises
    ValueError, naming the keys, where that is no whole number."""
    if abs(width - round(width)) > 1e-6 or round(width) % heads:
        raise ValueError(f"{name} gives {width:g} channels, which {heads} heads do not share evenly")
    return round(width) // heads

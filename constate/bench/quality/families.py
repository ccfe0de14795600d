"""Models to compare on a probe: one pattern of layers, in which nothing but the mixer differs.

Every mixer stands behind a short convolution (core/convolution.py) and before an MLP whose width evens
out the parameters, and holds the same number of numbers of state: `size` keys of WIDTH values. So what
differs is what is done with them. Knows configs; no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ...core.architecture import read_config
from ...core.model import Model
from ...hybrid import composed

WIDTH = 64
LAYERS = 4
LEAST_MLP = 16  # channels: of whichever mixer is largest

RANKS = {"decay_rank": 8, "rate_rank": 8, "gate_rank": 16}

Mixer = Mapping[str, Any]


def mixers(size: int) -> Mapping[str, Mixer]:
    """Each mixer by name with `size` x WIDTH numbers of state; attention keeps 2 x WIDTH a token, and a
    window as many tokens as that makes."""
    attention = {"type": "attention", "heads": 1, "head_dim": WIDTH, "qk_norm": True}
    keyed = {"heads": 1, "key_dim": size, "value_dim": WIDTH}
    return {
        "attention": attention,
        "window": {**attention, "window": max(1, size // 2)},
        "linear": {**keyed, "type": "linear_attn", "feature_map": "unit", "normaliser": False},
        "mamba2": {"type": "mamba2", "heads": 1, "head_dim": WIDTH, "state_size": size},
        "delta_net": {**keyed, "type": "delta_net", "conv": 0},
        "gated_deltanet": {**keyed, "type": "gated_deltanet", "conv": 0},
        "gla": {**keyed, "type": "gla"},
        "mamba": {"type": "mamba", "inner": WIDTH, "state_size": size},
        "rwkv7": {**keyed, "type": "rwkv7", **RANKS},
        "delta_net_negative": {**keyed, "type": "delta_net", "conv": 0, "negative": True},
        "gated_deltanet_negative": {**keyed, "type": "gated_deltanet", "conv": 0, "negative": True},
    }


FAMILIES: Mapping[str, Sequence[str]] = {
    "attention": ("attention",) * LAYERS,
    "window": ("window",) * LAYERS,
    "linear": ("linear",) * LAYERS,
    "mamba2": ("mamba2",) * LAYERS,
    "delta_net": ("delta_net",) * LAYERS,
    "gated_deltanet": ("gated_deltanet",) * LAYERS,
    "hybrid": ("linear", "attention", "linear", "linear"),  # last, it learns later and not from every seed
}

FULL: Mapping[str, Sequence[str]] = {
    **FAMILIES,
    "gla": ("gla",) * LAYERS,
    "mamba": ("mamba",) * LAYERS,
    "rwkv7": ("rwkv7",) * LAYERS,
    "delta_net_negative": ("delta_net_negative",) * LAYERS,
    "gated_deltanet_negative": ("gated_deltanet_negative",) * LAYERS,
    "hybrid_1_of_2": ("linear", "attention", "linear", "attention"),
    "hybrid_3_of_4": ("linear", "attention", "attention", "attention"),
}


def layers(family: str) -> Sequence[str]:
    """The mixers of a family, by its name or as a pattern with commas. Raises ValueError for neither."""
    if family in FULL:
        return FULL[family]
    pattern = tuple(part.strip() for part in family.split(","))
    if unknown := [part for part in pattern if part not in mixers(2)]:
        raise ValueError(
            f"model {family!r}: {unknown[0]!r} is not known; known are {', '.join(FULL)}, or mixers with "
            f"commas between them, of {', '.join(mixers(2))}"
        )
    return pattern


def config(family: str, ids: int, size: int) -> dict[str, Any]:
    """The config.json of a family that reads `ids` ids and holds `size` x WIDTH numbers of state a layer."""
    if size < 2 or size % 2:
        raise ValueError(f"state size {size}: an even number of keys, at least 2, is wanted")
    listed: list[dict[str, Any]] = []
    for name in layers(family):
        listed.append({"mixer": {"type": "convolution", "conv": 4}})
        listed.append({"mixer": dict(mixers(size)[name]), "mlp": {"width": _mlp(name, size)}})
    return {
        "model_type": "composed",
        "vocab_size": ids,
        "hidden_size": WIDTH,
        "embed_scale": WIDTH**0.5,
        "layers": listed,
    }


def build(family: str, ids: int, size: int) -> Model:
    """The family's model with PyTorch's own starting weights, drawn from torch's generator."""
    return composed.build(read_config(composed.Config, config(family, ids, size)))


def _mlp(name: str, size: int) -> int:
    """The MLP's width beside this mixer: so that both together have as many parameters as the largest mixer
    with LEAST_MLP, to within half a channel."""
    most = max(_parameters(other, size) for other in mixers(size))
    return LEAST_MLP + round((most - _parameters(name, size)) / (3 * WIDTH))


@cache
def _parameters(name: str, size: int) -> int:
    spare: dict[str, Any] = {"model_type": "composed", "vocab_size": 2, "hidden_size": WIDTH}
    with torch.device("meta"):
        model = composed.build(
            read_config(composed.Config, {**spare, "layers": [{"mixer": dict(mixers(size)[name])}]})
        )
    return sum(p.numel() for p in model.blocks.parameters())

"""GGUF's architectures, each with its way to Hugging Face's keys and names. A head that equals the embedding
is left out of a file, so a file without one is tied. Knows metadata, names and shapes; no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...core.weights import Rule
from ..names import near
from . import ssm, transformer
from .keys import Metadata


@dataclass(frozen=True)
class Map:
    """How one GGUF architecture is read: config.json's content out of the metadata and the tensors, and
    rules from its names to Hugging Face's."""

    config: Callable[[Metadata, Mapping[str, Tensor]], dict[str, Any]]
    rules: Callable[[Mapping[str, Any]], list[Rule]]


def config_of(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], outlines: Mapping[str, Tensor]
) -> dict[str, Any]:
    """config.json's content; `outlines` have the tensors' shapes without reading them. Raises ValueError
    for an architecture or a key that is not known."""
    arch = str(metadata.get("general.architecture"))
    if metadata.get("general.type", "model") != "model":
        raise ValueError(f"the file holds an {metadata['general.type']}, a whole model is wanted")
    if arch not in MAPS:
        raise ValueError(f"GGUF architecture {arch!r} has no map; {near(arch, MAPS)}")
    if "token_embd.weight" not in tensors:
        raise ValueError("the file has no token_embd.weight, the embedding that every model starts from")
    keys = Metadata(arch, metadata)
    layers, config = keys.take("block_count"), MAPS[arch].config(keys, tensors)
    keys.finish()
    return {
        "vocab_size": outlines["token_embd.weight"].shape[0],
        "num_hidden_layers": layers,
        "tie_word_embeddings": "output.weight" not in tensors,
        **config,
    }


def rules_of(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> list[Rule]:
    """The rules from this file's names to those of the model_type in `config`."""
    return MAPS[metadata["general.architecture"]].rules(config)


_TRANSFORMER = Map(transformer.config, transformer.rules)
MAPS: Mapping[str, Map] = {
    "llama": _TRANSFORMER,
    "qwen2": _TRANSFORMER,
    "qwen3": _TRANSFORMER,
    "mamba": Map(ssm.mamba, ssm.mamba_rules),
    "mamba2": Map(ssm.mamba2, ssm.mamba2_rules),
}

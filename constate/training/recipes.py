"""What is trained: a pattern of mixers, each with the MLP that makes every layer weigh the same.

A recipe is a config of the `composed` format, or of `composed_diffusion`, and how long to train it. All
recipes share the optimisers' settings, the text and the batches, so that shipped models differ in their
mixers alone, or in what they see. Knows no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

WIDTH, EMBEDDINGS = 128, 1024
STEPS = 2000

MIXERS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"heads": 4, "head_dim": 32, "rope": {"rope_theta": 10000.0}},
    "nope": {"type": "attention", "heads": 4, "head_dim": 32},
    "gated_deltanet": {"heads": 4, "key_dim": 32, "value_dim": 32},
    "gla": {"heads": 4, "key_dim": 16, "value_dim": 32, "conv": 4},
    "gla_k4": {"type": "gla", "heads": 4, "key_dim": 4, "value_dim": 32, "conv": 4},
    "gla_k64": {"type": "gla", "heads": 4, "key_dim": 64, "value_dim": 32, "conv": 4},
    "mamba2": {"heads": 8, "head_dim": 32, "state_size": 64},
    "mamba": {"inner": 256, "state_size": 8},
}
"""Mixers of width 128 by the name that a pattern gives them; `nope` is attention without positions, for
beside a recurrence, which tells the order already. `gla_k4` and `gla_k64` hold a quarter and four times the
state of `gla`."""

MLP: Mapping[str, int] = {
    "attention": 384,
    "nope": 384,
    "gated_deltanet": 336,
    "gla": 376,
    "gla_k4": 408,
    "gla_k64": 232,
    "mamba2": 248,
    "mamba": 264,
}
"""The MLP's width beside each mixer: so that mixer and MLP together have about 213,000 parameters."""

SHIPPED: Mapping[str, tuple[str, ...]] = {
    "hybrid": ("gated_deltanet", "gated_deltanet", "gated_deltanet", "nope"),
    "mamba2": ("mamba2",) * 4,
    "transformer": ("attention",) * 4,
    "gated_deltanet": ("gated_deltanet",) * 4,
    "gla": ("gla",) * 4,
    "gla_k4": ("gla_k4",) * 4,
    "gla_k64": ("gla_k64",) * 4,
    "mamba": ("mamba",) * 4,
}

DIFFUSION: Mapping[str, int | None] = {"mdlm": None, "block_diffusion": 8}
"""Denoisers of the transformer's layers: the block that a place sees, None for the whole row. They start from
the trained transformer: from nothing, such a model stays at the unigram level for longer than all of this
takes."""
START, FURTHER = "tiny/transformer", 1800  # steps


@dataclass(frozen=True)
class Recipe:
    """A name, a config.json of the `composed` or `composed_diffusion` format, the number of steps of 2,048
    tokens, and the model whose weights it starts from, None for random ones."""

    name: str
    config: Mapping[str, Any]
    steps: int = STEPS
    seed: int = 0
    start: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"recipe {self.name}: steps {self.steps}; at least 1 is wanted")


def find(name: str | Path) -> Recipe:
    """A recipe by its name, by its pattern, or from a JSON file.

    The name of a shipped model; mixers with commas between them, one a layer ("mamba,attention,mamba");
    or a JSON file: a config.json, or the keys `name`, `config` and, if wanted, `steps`, `seed` and `start`.
    Raises ValueError for anything else, naming what there is.
    """
    name = str(name)
    if name in SHIPPED:
        return Recipe(name, config(SHIPPED[name]))
    if name in DIFFUSION:
        layers = config(SHIPPED["transformer"])
        return Recipe(name, masked(layers, DIFFUSION[name]), FURTHER, start=START)
    if name.endswith(".json"):
        return _from_file(Path(name))
    pattern = tuple(part.strip() for part in name.split(","))
    unknown = [part for part in pattern if part not in MIXERS]
    if unknown:
        near = get_close_matches(unknown[0], {*SHIPPED, *DIFFUSION, *MIXERS}, n=1)
        raise ValueError(
            f"recipe {name!r}: {unknown[0]!r} is not known"
            + (f"; {near[0]!r} is" if near else "")
            + f". A recipe is one of {', '.join([*SHIPPED, *DIFFUSION])}; or mixers with commas between "
            f"them, one a layer, of {', '.join(MIXERS)}; or a .json file"
        )
    return Recipe("-".join(pattern), config(pattern))


def config(pattern: tuple[str, ...]) -> dict[str, Any]:
    """The config.json of a pattern of mixers."""
    layers = [{"mixer": {"type": name, **MIXERS[name]}, "mlp": {"width": MLP[name]}} for name in pattern]
    return {
        "model_type": "composed",
        "vocab_size": EMBEDDINGS,
        "hidden_size": WIDTH,
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        # The embedding is also the head and starts small for that; scaled, its rows enter with length 1.
        "embed_scale": WIDTH**0.5,
        "eos_token_id": 0,
        "layers": layers,
    }


def masked(config: Mapping[str, Any], block: int | None) -> dict[str, Any]:
    """The config.json of a denoiser with these layers: one more id, the mask, and predictions shifted by
    one place, as the model that it starts from makes them."""
    mask = config["vocab_size"]
    extra = {"vocab_size": mask + 1, "mask_token_id": mask, "shift": True, "block": block}
    return {**config, **extra, "model_type": "composed_diffusion"}


def _from_file(path: Path) -> Recipe:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(given, dict) and "model_type" in given:  # a bare config.json
            given = {"name": path.stem, "config": given}
        recipe = Recipe(**given)
    except FileNotFoundError:
        raise ValueError(f"recipe {path}: no such file") from None
    except (json.JSONDecodeError, TypeError) as error:
        said = str(error).replace("Recipe.__init__()", "the file")
        raise ValueError(
            f"recipe {path}: {said}; wanted is a config.json, or name, config and perhaps steps, seed, start"
        ) from None
    rows = recipe.config.get("vocab_size", EMBEDDINGS)
    if not isinstance(rows, int) or rows < EMBEDDINGS:
        raise ValueError(f"recipe {path}: vocab_size {rows!r}; the tokenizer has {EMBEDDINGS} ids")
    mask = recipe.config.get("mask_token_id")
    beyond = isinstance(mask, int) and EMBEDDINGS <= mask < rows
    if recipe.config.get("model_type") == "composed_diffusion" and not beyond:
        raise ValueError(
            f"recipe {path}: mask_token_id {mask!r} and vocab_size {rows}; the tokenizer's {EMBEDDINGS} ids "
            "are all text, so that the mask is one beyond them, and vocab_size counts it"
        )
    return recipe

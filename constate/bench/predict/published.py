"""config.json of published models, by name, and of whatever else has one.

The files in configs/ hold the sizes that each model's publisher states, in Hugging Face's keys, and nothing
else of theirs. Knows where configs lie; reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.checkpoint import read_json
from ...loading.names import near, only_config

CONFIGS = Path(__file__).with_name("configs")
# What a config calls the longest sequence it was made for.
POSITIONS = (
    "max_position_embeddings",
    "max_sequence_length",
    "model_max_length",
    "model_length",
    "seq_length",
)


def names() -> list[str]:
    """The published models that can be named."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def config(name: str | Path) -> dict[str, Any]:
    """The content of a config.json: of a published model's name, a config.json or the folder that it lies
    in, tiny/NAME, or a hub id, of which nothing else is downloaded. Raises ValueError."""
    path, key = Path(name).expanduser(), str(name).lower()
    if key in names():
        return read_json(CONFIGS / f"{key}.json")
    if path.suffix == ".json" and path.is_file():
        return read_json(path)
    if path.is_dir() or "/" in str(name):
        return read_json(only_config(name))
    raise ValueError(
        f"no config {str(name)!r}: a published model's name, a config.json, its folder, tiny/NAME or a hub "
        f"id OWNER/NAME is wanted; {near(key, names())}"
    )


def positions(raw: Mapping[str, Any]) -> int | None:
    """The longest sequence that the config says the model was made for; None where it says none."""
    said = [raw[key] for key in POSITIONS if isinstance(raw.get(key), int)]
    return said[0] if said else None

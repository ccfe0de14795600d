"""Which architecture a checkpoint is of, and which dialect it is written in.

Hugging Face's folders name themselves by `model_type`. What does not, or what names itself and then calls
its tensors otherwise, is offered to the dialects that architectures declare. Knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size

from ..core.architecture import Architecture, Dialect, read_config
from ..core.weights import Rule
from .families import architectures, find


@dataclass(frozen=True)
class Told:
    """A checkpoint understood: its architecture, its config, the rules for its tensors' names, and the
    name of its dialect (None: the architecture's primary one)."""

    architecture: Architecture
    config: Any
    rules: Sequence[Rule]
    dialect: str | None


def tell(raw: Mapping[str, Any], shapes: Mapping[str, Size]) -> Told:
    """What config.json's content ({} where there is none) and the tensors' names and shapes are.

    A known `model_type` is offered its own dialects alone, and is otherwise its primary one; without one
    every architecture's dialects are asked. Raises ValueError where none or several answer.
    """
    if "model_type" in raw:
        architecture = find(str(raw["model_type"])).architecture
        spoken = [(architecture, dialect) for dialect in architecture.dialects if dialect.spoken(raw, shapes)]
        if not spoken:
            config = read_config(architecture.Config, raw)
            return Told(architecture, config, architecture.weights(config), None)
    else:
        known = [found.architecture for found in architectures().values()]
        spoken = [
            (each, dialect) for each in known for dialect in each.dialects if dialect.spoken(raw, shapes)
        ]
    if len(spoken) != 1:
        raise ValueError(_untold(raw, shapes, spoken))
    architecture, dialect = spoken[0]
    config = read_config(architecture.Config, dialect.config(raw, shapes))
    return Told(architecture, config, dialect.weights(config), dialect.name)


def _untold(
    raw: Mapping[str, Any], shapes: Mapping[str, Size], spoken: Sequence[tuple[Architecture, Dialect]]
) -> str:
    if spoken:
        names = " and ".join(f"{each.model_type} ({dialect.name})" for each, dialect in spoken)
        return f"this checkpoint reads as {names}; a config.json with a model_type decides"
    sought = [
        f"{dialect.name}'s for {found.model_type} ({dialect.signs or 'no signs given'})"
        for found in architectures().values()
        for dialect in found.architecture.dialects
    ]
    keys = ", ".join(list(raw)[:6])
    has = f"config.json has no model_type, only {keys}" if raw else "there is no config.json"
    some = ", ".join(list(shapes)[:3]) or "none"
    return (
        f"{has}, and neither it nor the tensors' names ({some}, ...) speak a dialect that is known: looked "
        f"for {'; '.join(sought)}"
    )

"""What a probe hands out: rows of ids and, at some places, the id that a model should say next.

Knows the form of a question; no model and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

SILENT = -1  # at a place where nothing is asked


@dataclass(frozen=True)
class Episodes:
    """tokens (rows, t) int64; wanted (rows, t) int64: the right answer behind that token, or SILENT."""

    tokens: Tensor
    wanted: Tensor

    @property
    def asked(self) -> Tensor:
        """Where an answer is wanted, (rows, t) bool."""
        return self.wanted != SILENT


class Probe(Protocol):
    """A kind of question. `ids` counts the ids that it uses, 0 to ids - 1; its answers lie in `answers`."""

    name: ClassVar[str]

    @property
    def ids(self) -> int: ...
    @property
    def answers(self) -> range:
        """The ids among which a model is made to choose."""
        ...

    @property
    def setting(self) -> str:
        """The settings as a row of results names them."""
        ...

    def easier(self) -> Sequence[Probe]:
        """What a training begins with, easiest first, then itself."""
        ...

    def longer(self, times: int) -> Probe:
        """The same question in rows of so many times the length."""
        ...

    def draw(self, rows: int, seed: int) -> Episodes:
        """As many episodes, the same for the same seed."""
        ...


def chance(probe: Probe) -> float:
    """The share of right answers of who guesses."""
    return 1 / len(probe.answers)


def distinct(rows: int, count: int, of: int, source: torch.Generator) -> Tensor:
    """`count` different numbers below `of` in each row, in random order, (rows, count) int64."""
    return torch.rand(rows, of, generator=source).argsort(-1)[:, :count]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def at_least(probe: str, **given: tuple[int, int]) -> None:
    """Each named (value, least). Raises ValueError for one that is smaller."""
    for name, (value, least) in given.items():
        if value < least:
            raise ValueError(f"probe {probe}: {name} {value}; at least {least} is wanted")

"""Copying: say again what was just read, symbol for symbol.

Uniform strings (Jelassi et al., Repeat After Me, 2402.01032). n symbols of an alphabet of V carry n log2 V
bits, so that whoever copies every string exactly has at least that many bits of state: the counting
bound. Attention copies any length that it has learned to; a fixed state ends where its bits do, and long
before, since few of them can be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .episodes import SILENT, Episodes, Probe, at_least, generator


@dataclass(frozen=True)
class Copy:
    """`length` symbols of an alphabet of `vocab`, a mark, and the symbols again, each of which is asked."""

    length: int = 32
    vocab: int = 32
    name: ClassVar[str] = "copy"

    def __post_init__(self) -> None:
        at_least("copy", length=(self.length, 1), vocab=(self.vocab, 2))

    @property
    def ids(self) -> int:
        return self.vocab + 1  # the mark comes last

    @property
    def answers(self) -> range:
        return range(self.vocab)

    @property
    def setting(self) -> str:
        return f"{self.length} of {self.vocab} symbols, {self.bits:.0f} bits"

    @property
    def bits(self) -> float:
        """What a state must hold to copy every such string."""
        return self.length * math.log2(self.vocab)

    def easier(self) -> Sequence[Probe]:
        shorter = [replace(self, length=max(1, self.length // by)) for by in (4, 2)]
        return [*shorter, self]

    def longer(self, times: int) -> Probe:
        return replace(self, length=times * self.length)

    def draw(self, rows: int, seed: int) -> Episodes:
        symbols = torch.randint(self.vocab, (rows, self.length), generator=generator(seed))
        mark = torch.full((rows, 1), self.vocab)
        tokens = torch.cat([symbols, mark, symbols[:, :-1]], dim=1)
        silent = torch.full_like(symbols, SILENT)
        return Episodes(tokens, torch.cat([silent, symbols], dim=1))

"""Recall: which value stood behind this key? What a fixed state forgets first.

Multi-query associative recall (Arora et al., Zoology, 2312.04927, section 3 and appendix): key value key
value ..., then the keys once more at random places among filler, each followed by a wish for its value. A
state of dk x dv numbers holds about dk pairs apart; attention holds all that it has read. Departures: the
second reading's places are uniform (theirs follow a power law of the distance), and the filler is one id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .episodes import SILENT, Episodes, Probe, at_least, distinct, generator


@dataclass(frozen=True)
class Recall:
    """`pairs` keys with values, each asked for once in rows of `length` ids (0: four ids a pair); keys and
    values are different halves of `vocab` ids, of which id 0 is filler."""

    pairs: int = 16
    vocab: int = 128
    length: int = 0
    name: ClassVar[str] = "recall"

    def __post_init__(self) -> None:
        at_least("recall", pairs=(self.pairs, 1), vocab=(self.vocab, 4))
        if self.length == 0:
            object.__setattr__(self, "length", 4 * self.pairs)
        at_least("recall", length=(self.length, 4 * self.pairs))
        if self.pairs >= self.vocab // 2:
            raise ValueError(
                f"probe recall: {self.pairs} pairs want as many different keys, and {self.vocab} ids hold "
                f"{self.vocab // 2 - 1}: raise vocab or lower pairs"
            )

    @property
    def ids(self) -> int:
        return self.vocab

    @property
    def answers(self) -> range:
        return range(self.vocab // 2, self.vocab)

    @property
    def setting(self) -> str:
        return f"{self.pairs} pairs in {self.length} ids of {self.vocab}"

    def easier(self) -> Sequence[Probe]:
        fewer = [replace(self, pairs=max(1, self.pairs // by)) for by in (4, 2)]
        return [*fewer, self]

    def longer(self, times: int) -> Probe:
        return replace(self, length=times * self.length)

    def draw(self, rows: int, seed: int) -> Episodes:
        source = generator(seed)
        keys = 1 + distinct(rows, self.pairs, self.vocab // 2 - 1, source)
        values = torch.randint(self.vocab // 2, self.vocab, (rows, self.pairs), generator=source)
        tokens = torch.zeros(rows, self.length, dtype=torch.int64)
        wanted = torch.full_like(tokens, SILENT)
        told = 2 * self.pairs
        tokens[:, 0:told:2], tokens[:, 1:told:2] = keys, values
        places = told + 2 * distinct(rows, self.pairs, (self.length - told) // 2, source)
        tokens.scatter_(1, places, keys)
        wanted.scatter_(1, places, values)
        return Episodes(tokens, wanted)

"""A passkey in a haystack: one thing to remember, said once, asked for at the end.

After the passkey task of Mohtashami & Jaggi (2305.16300, section 4.2), on ids: filler of uniform symbols, a
mark with the key behind it at some depth, more filler, the mark again. What it measures is not capacity
but for how long a state keeps what nothing refreshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .episodes import SILENT, Episodes, Probe, at_least, generator


@dataclass(frozen=True)
class Passkey:
    """Rows of `length` ids; one of `keys` keys stands at `depth` percent of the row, or, with -1, anywhere;
    the filler is of `filler` symbols."""

    length: int = 128
    depth: int = -1
    keys: int = 32
    filler: int = 32
    name: ClassVar[str] = "passkey"

    def __post_init__(self) -> None:
        at_least("passkey", length=(self.length, 4), keys=(self.keys, 2), filler=(self.filler, 1))
        if not -1 <= self.depth <= 100:
            raise ValueError(f"probe passkey: depth {self.depth}; 0 to 100 percent, or -1 for anywhere")

    @property
    def ids(self) -> int:
        return self.keys + self.filler + 1  # keys, filler, the mark

    @property
    def answers(self) -> range:
        return range(self.keys)

    @property
    def setting(self) -> str:
        where = "any depth" if self.depth < 0 else f"depth {self.depth}%"
        return f"{self.length} ids, {where}, {self.keys} keys"

    def easier(self) -> Sequence[Probe]:
        shorter = [replace(self, length=max(4, self.length // by)) for by in (8, 4, 2)]
        return [*shorter, self]

    def longer(self, times: int) -> Probe:
        return replace(self, length=times * self.length)

    def draw(self, rows: int, seed: int) -> Episodes:
        source = generator(seed)
        mark = self.keys + self.filler
        tokens = torch.randint(self.keys, mark, (rows, self.length), generator=source)
        key = torch.randint(self.keys, (rows, 1), generator=source)
        last = self.length - 3  # the key's mark stands at 0 to here, the key behind it
        if self.depth < 0:
            place = torch.randint(last + 1, (rows, 1), generator=source)
        else:
            place = torch.full((rows, 1), round(last * self.depth / 100))
        tokens.scatter_(1, place, mark).scatter_(1, place + 1, key)
        tokens[:, -1] = mark
        wanted = torch.full_like(tokens, SILENT)
        wanted[:, -1:] = key
        return Episodes(tokens, wanted)

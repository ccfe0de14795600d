"""State tracking: what is the product so far? Each symbol is a group element, each answer a running product.

Parity is the group of two elements. Grazzi et al. (2411.12537, theorem 1) prove that a linear recurrence
whose state matrices have positive eigenvalues alone cannot count it at every length in finite precision,
and that eigenvalues in [-1, 1] can; a transformer of fixed depth learns it for lengths that it has seen at
best (Merrill & Sabharwal, 2207.00729; Hahn, 1906.06755). S3, the permutations of three things, does not
commute: one Householder factor a token swaps two things, and a rotation takes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import ClassVar

import torch
from torch import Tensor

from .episodes import Episodes, Probe, at_least, generator


@dataclass(frozen=True)
class Parity:
    """`length` bits; behind each the parity of all bits so far is asked."""

    length: int = 32
    name: ClassVar[str] = "parity"

    def __post_init__(self) -> None:
        at_least("parity", length=(self.length, 1))

    @property
    def ids(self) -> int:
        return 2

    @property
    def answers(self) -> range:
        return range(2)

    @property
    def setting(self) -> str:
        return f"{self.length} bits"

    def easier(self) -> Sequence[Probe]:
        return [replace(self, length=max(1, self.length // by)) for by in (8, 4, 2)] + [self]

    def longer(self, times: int) -> Probe:
        return replace(self, length=times * self.length)

    def draw(self, rows: int, seed: int) -> Episodes:
        bits = torch.randint(2, (rows, self.length), generator=generator(seed))
        return Episodes(bits, bits.cumsum(1) % 2)


@dataclass(frozen=True)
class S3:
    """`length` permutations of three things; behind each their product so far is asked, the latest applied
    last."""

    length: int = 32
    name: ClassVar[str] = "s3"

    def __post_init__(self) -> None:
        at_least("s3", length=(self.length, 1))

    @property
    def ids(self) -> int:
        return 6

    @property
    def answers(self) -> range:
        return range(6)

    @property
    def setting(self) -> str:
        return f"{self.length} permutations"

    def easier(self) -> Sequence[Probe]:
        return [replace(self, length=max(1, self.length // by)) for by in (8, 4, 2)] + [self]

    def longer(self, times: int) -> Probe:
        return replace(self, length=times * self.length)

    def draw(self, rows: int, seed: int) -> Episodes:
        drawn = torch.randint(6, (rows, self.length), generator=generator(seed))
        table, product = _products(), torch.zeros(rows, dtype=torch.int64)
        wanted = torch.empty_like(drawn)
        for t in range(self.length):
            product = table[drawn[:, t], product]
            wanted[:, t] = product
        return Episodes(drawn, wanted)


def _products() -> Tensor:
    """table[a, b] is the permutation that b and then a makes, each by its place in lexicographic order."""
    group = list(permutations(range(3)))
    place = {p: i for i, p in enumerate(group)}
    return torch.tensor([[place[tuple(a[i] for i in b)] for b in group] for a in group])

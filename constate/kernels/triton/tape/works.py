"""The entries of a tape before it is run: products, launches of jobs, scans and what else there is, each with
the memory that it reads and writes, so that fuse.py may move and join them. Knows tensors and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from torch import Tensor

from .drafts import Draft

Run = Callable[[], object]


class Region(NamedTuple):
    """The part of a storage that a tensor is: columns `first` to `last` of lines `stride` apart, or, where
    that is 0, all from `begin` to `end`."""

    storage: int
    stride: int
    first: int
    last: int
    begin: int
    end: int

    def meets(self, other: Region) -> bool:
        if self.storage != other.storage or self.begin >= other.end or other.begin >= self.end:
            return False
        if self.stride != other.stride or not self.stride:
            return True
        return self.first < other.last and other.first < self.last

    def within(self, other: Region) -> bool:
        """Whether these are some of the other's columns, line for line."""
        return (
            self.storage == other.storage
            and self.stride == other.stride > 0
            and other.first <= self.first
            and self.last <= other.last
            and self.begin - self.first == other.begin - other.first
        )


def region(x: Tensor) -> Region:
    begin, storage = int(x.storage_offset()), x.untyped_storage().data_ptr()
    end = begin + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    stride = gcd(*x.stride()[:-1])
    if x.ndim > 1 and x.stride(-1) == 1 and x.shape[-1] <= stride:
        first = begin % stride
        return Region(storage, stride, first, first + x.shape[-1], begin, end)
    return Region(storage, 0, 0, 0, begin, end)


def meet(some: Iterable[Region], others: Iterable[Region]) -> bool:
    others = list(others)
    return any(a.meets(b) for a in some for b in others)


@dataclass(eq=False)
class Work:
    """One entry. `make` makes what is called in every step, once all is known, None where the kind of work
    says how it is done. Results go to `parts` where it has some, of which each may have become memory of
    another dtype, that of the product that alone reads it."""

    name: str
    reads: list[Tensor]
    writes: list[Tensor]
    make: Callable[[], Run] | None = None
    product: bool = False
    parts: list[Tensor] = field(default_factory=list, kw_only=True)

    def regions(self) -> tuple[list[Region], list[Region]]:
        """What is read, and what is written."""
        return [region(t) for t in self.reads], [region(t) for t in self.writes]

    @property
    def drafts(self) -> list[Draft]:
        return []


@dataclass(eq=False)
class Python(Work):
    """A step that is Python's own: nothing moves across it, and no graph captures it."""


@dataclass(eq=False)
class Product(Work):
    """A product of x (rows, in) with a matrix in `dtype`, to y (rows, out). The torch call reads `given`, x
    in the matrix's dtype, and writes `left`."""

    x: Tensor = field(kw_only=True)
    y: Tensor = field(kw_only=True)
    weight: Tensor = field(kw_only=True)
    bias: Tensor | None = field(kw_only=True)
    scales: Tensor | None = None
    exact: bool = False
    added: bool = False
    given: Tensor | None = None
    left: Tensor | None = None


@dataclass(eq=False)
class Launched(Work):
    """One launch of several jobs."""

    listed: list[Draft] = field(default_factory=list)

    @staticmethod
    def of(draft: Draft) -> Launched:
        return Launched("jobs", [], [], listed=[draft])

    @property
    def drafts(self) -> list[Draft]:
        return self.listed

    def regions(self) -> tuple[list[Region], list[Region]]:
        return (
            [region(t) for d in self.listed for t in d.read()],
            [region(t) for d in self.listed for t in d.written()],
        )


@dataclass(eq=False)
class Scan(Work):
    """A step of a recurrence or of attention that writes o (rows, heads, size), and what is done to o by the
    last program that wrote a part of it: anything where the kernel `ends` in job.leave, a sigmoid gate where
    it `gates`. `left` is what it writes in place of o for the product that alone reads it."""

    o: Tensor = field(kw_only=True)
    heads: int = field(kw_only=True)
    ends: bool = False
    gates: bool = False
    leaving: Draft | None = None
    left: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """What of it others read."""
        left = None if self.leaving is None else self.leaving.result
        return self.left if self.left is not None else self.o if left is None else left

    @property
    def drafts(self) -> list[Draft]:
        return [] if self.leaving is None else [self.leaving]

    def regions(self) -> tuple[list[Region], list[Region]]:
        reads, writes = super().regions()
        return (
            reads + [region(t) for d in self.drafts for t in d.read()],
            writes + [region(t) for d in self.drafts for t in d.written()],
        )

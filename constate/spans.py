"""Packed lengths: which tokens of a flat `(n, ...)` tensor belong to which row.

Knows lengths and the device they are needed on; knows nothing of models, states or kernels.
Both copies are kept from the start, host and device, so that nobody ever reads a device value back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class once(Generic[T]):
    """functools.cached_property without its lock of Python 3.11, which torch.compile cannot trace."""

    def __init__(self, make: Callable[[Any], T]):
        self.make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, holder: Any, owner: type | None = None) -> T:
        if holder is None:
            return self  # pyright: ignore[reportReturnType]  # of the class: the property itself, as usual
        value = holder.__dict__[self.name] = self.make(holder)
        return value


@dataclass(frozen=True)
class Spans:
    """Lengths of the sequences laid end to end in a packed tensor; a span may be empty.

    `lengths[r]` tokens belong to row r and lie at `[offsets[r], offsets[r + 1])`. Build one with
    `Spans.of`. Host values are Python ints; the properties that return tensors are int64 on `device`
    and are computed once.
    """

    lengths: tuple[int, ...]
    device: torch.device = field(default=torch.device("cpu"), compare=False)

    @staticmethod
    def of(lengths: Iterable[int], device: torch.device | str = "cpu") -> Spans:
        """Spans of these lengths. Raises ValueError for a negative length or no row at all, TypeError for a
        length that is no whole number."""
        lengths = tuple(index(n) for n in lengths)
        if not lengths:
            raise ValueError("Spans.of([]): at least one row is wanted; an empty row is Spans.of([0])")
        if min(lengths) < 0:
            raise ValueError(f"Spans.of({list(lengths)}): a span's length is at least 0")
        return Spans(lengths, torch.device(device))

    @staticmethod
    def ones(rows: int, device: torch.device | str = "cpu") -> Spans:
        """One token a row: what a decode step carries."""
        return Spans.of((1,) * rows, device)

    @once
    def offsets(self) -> tuple[int, ...]:
        """Where each row starts, then the total: rows + 1 host ints."""
        return (0, *accumulate(self.lengths))

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        return self.offsets[-1]

    @once
    def longest(self) -> int:
        return max(self.lengths)

    @once
    def uniform(self) -> bool:
        """Whether every row has the same length, so that `(n, ...)` views as `(rows, length, ...)`."""
        return min(self.lengths) == self.longest

    def slices(self) -> list[slice]:
        """The slice of the packed axis that holds each row."""
        return [slice(a, b) for a, b in zip(self.offsets, self.offsets[1:], strict=False)]

    @once
    def cu(self) -> Tensor:
        """Cumulative lengths, (rows + 1,): what variable-length kernels take."""
        return torch.tensor(self.offsets, dtype=torch.int64, device=self.device)

    @once
    def row(self) -> Tensor:
        """The row of each token, (n,)."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.device)
        rows = torch.arange(self.rows, dtype=torch.int64, device=self.device)
        return rows.repeat_interleave(lengths, output_size=self.total)

    @once
    def position(self) -> Tensor:
        """The place of each token within its span, from 0, (n,)."""
        return torch.arange(self.total, dtype=torch.int64, device=self.device) - self.cu[self.row]

    @once
    def last(self) -> Tensor:
        """The packed index of each row's last token, (rows,); -1 for an empty span."""
        ends = [end - 1 if length else -1 for end, length in zip(self.offsets[1:], self.lengths, strict=True)]
        return torch.tensor(ends, dtype=torch.int64, device=self.device)

    def tiles(self, size: int) -> SpanTiles:
        """The spans cut into tiles of `size` tokens, made once a size: what kernels launch over."""
        if size not in self._tiles:
            self._tiles[size] = SpanTiles(self, size)
        return self._tiles[size]

    @once
    def _tiles(self) -> dict[int, SpanTiles]:
        return {}

    def to(self, device: torch.device | str) -> Spans:
        """These spans on a device: themselves where they lie there, "cuda" for a "cuda:0" included, so
        that nothing is computed again for every call."""
        device = torch.device(device)
        here = device == self.device or device == self.cu.device
        return self if here else Spans(self.lengths, device)


@dataclass(frozen=True)
class SpanTiles:
    """Tiles of at most `size` tokens, none holding tokens of two rows, in packed order: row by row.

    Tile i holds the tokens from `start[i]` to the end of its row or `size` of them, whichever comes first;
    the tiles of row r are `first[r] : first[r + 1]`; an empty row has none. Tensors are int64 on the spans'
    device, computed once; `count` and `most` are host ints.
    """

    spans: Spans
    size: int

    @once
    def counts(self) -> tuple[int, ...]:
        """How many tiles each row has: host ints."""
        return tuple(-(-length // self.size) for length in self.spans.lengths)

    @once
    def count(self) -> int:
        """How many tiles there are."""
        return sum(self.counts)

    @property
    def most(self) -> int:
        """How many tiles the longest row has."""
        return -(-self.spans.longest // self.size)

    @once
    def first(self) -> Tensor:
        """The number of each row's first tile, then the total, (rows + 1,)."""
        return torch.tensor((0, *accumulate(self.counts)), dtype=torch.int64, device=self.spans.device)

    @once
    def row(self) -> Tensor:
        """The row of each tile, (count,)."""
        rows = torch.arange(self.spans.rows, dtype=torch.int64, device=self.spans.device)
        return rows.repeat_interleave(self.first.diff(), output_size=self.count)

    @once
    def start(self) -> Tensor:
        """The packed index of each tile's first token, (count,)."""
        number = torch.arange(self.count, dtype=torch.int64, device=self.spans.device)
        return self.spans.cu[self.row] + (number - self.first[self.row]) * self.size

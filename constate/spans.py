"""Packed lengths: which tokens of a flat `(n, ...)` tensor belong to which row.

Knows lengths and the device they are needed on; knows nothing of models, states or kernels.
Both copies are kept from the start, host and device, so that nobody ever reads a device value back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import index

import torch
from torch import Tensor


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

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each row starts, then the total: rows + 1 host ints."""
        return (0, *accumulate(self.lengths))

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        return self.offsets[-1]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def uniform(self) -> bool:
        """Whether every row has the same length, so that `(n, ...)` views as `(rows, length, ...)`."""
        return min(self.lengths) == self.longest

    def slices(self) -> list[slice]:
        """The slice of the packed axis that holds each row."""
        return [slice(a, b) for a, b in zip(self.offsets, self.offsets[1:], strict=False)]

    @cached_property
    def cu(self) -> Tensor:
        """Cumulative lengths, (rows + 1,): what variable-length kernels take."""
        return torch.tensor(self.offsets, dtype=torch.int64, device=self.device)

    @cached_property
    def row(self) -> Tensor:
        """The row of each token, (n,)."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.device)
        rows = torch.arange(self.rows, dtype=torch.int64, device=self.device)
        return rows.repeat_interleave(lengths, output_size=self.total)

    @cached_property
    def position(self) -> Tensor:
        """The place of each token within its span, from 0, (n,)."""
        return torch.arange(self.total, dtype=torch.int64, device=self.device) - self.cu[self.row]

    @cached_property
    def last(self) -> Tensor:
        """The packed index of each row's last token, (rows,); -1 for an empty span."""
        ends = [end - 1 if length else -1 for end, length in zip(self.offsets[1:], self.lengths, strict=True)]
        return torch.tensor(ends, dtype=torch.int64, device=self.device)

    def to(self, device: torch.device | str) -> Spans:
        device = torch.device(device)
        return self if device == self.device else Spans(self.lengths, device)

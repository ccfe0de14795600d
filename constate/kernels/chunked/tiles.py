"""Cuts packed spans into tiles of equal length, so that a tile is a matrix and a row a chain of tiles.

A tile never holds tokens of two rows. Where a span ends inside a tile the tail holds `fill`, which the
op chooses to be neutral (k = 0, log-decay 0, beta 0), so that the tail changes no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...spans import Spans


@dataclass(frozen=True)
class Tiles:
    """Tiles of `size` tokens over `spans`, ordered by place in the row, then by row.

    `levels[j]` lists (on the host) the rows that have a j-th tile; tile numbers of level j are
    `starts[j] : starts[j + 1]` in that order. A scan walks the levels, many rows at a time. Rows
    of one level are sorted by length, longest first, so level j + 1 holds a prefix of level j's rows.
    """

    spans: Spans
    size: int

    @staticmethod
    def of(spans: Spans, size: int) -> Tiles:
        """Tiles no longer than the longest span needs (a power of two, at least 1)."""
        need = 1 << max(0, spans.longest - 1).bit_length()
        return Tiles(spans, min(size, need))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Rows sorted by length, longest first; empty rows come last and have no tile."""
        lengths = self.spans.lengths
        return tuple(sorted(range(len(lengths)), key=lambda r: -lengths[r]))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        counts = [-(-n // self.size) for n in self.spans.lengths]
        return tuple(tuple(r for r in self.order if counts[r] > j) for j in range(max(counts)))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        starts = [0]
        for level in self.levels:
            starts.append(starts[-1] + len(level))
        return tuple(starts)

    @property
    def count(self) -> int:
        return self.starts[-1]

    @cached_property
    def contiguous(self) -> bool:
        """Whether tiles are a plain reshape of the packed tensor: one row, no tail."""
        return self.spans.rows == 1 and self.spans.total % self.size == 0

    @cached_property
    def index(self) -> Tensor:
        """Packed index of each place of each tile, (tiles, size) int64; `total` marks a tail."""
        spans, size = self.spans, self.size
        first = [spans.offsets[r] + j * size for j, level in enumerate(self.levels) for r in level]
        end = [spans.offsets[r + 1] for level in self.levels for r in level]
        first, end = torch.tensor([first, end], dtype=torch.int64, device=spans.device).unsqueeze(-1)
        index = first + torch.arange(size, device=spans.device)
        return torch.where(index < end, index, spans.total)

    @cached_property
    def inverse(self) -> Tensor:
        """Where each packed token lies in the flattened tiles, (n,) int64."""
        flat = self.index.flatten()
        inverse = torch.empty(self.spans.total + 1, dtype=torch.int64, device=flat.device)
        inverse[flat] = torch.arange(flat.numel(), device=flat.device)
        return inverse[:-1]

    def cut(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(n, ...) to (tiles, size, ...); differentiable."""
        if self.contiguous:
            return x.unflatten(0, (-1, self.size))
        tail = torch.full_like(x[:1], fill) if x.shape[0] else x.new_full((1, *x.shape[1:]), fill)
        return torch.cat([x, tail]).index_select(0, self.index.flatten()).unflatten(0, (-1, self.size))

    def join(self, y: Tensor) -> Tensor:
        """(tiles, size, ...) back to (n, ...), dropping the tails; differentiable."""
        flat = y.flatten(0, 1)
        return flat if self.contiguous else flat.index_select(0, self.inverse)

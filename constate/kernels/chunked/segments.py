"""Runs of consecutive tile levels: what a scan holds in memory at one time, and the chain through them.

Where nothing is differentiated a scan walks a long input segment by segment, so that its temporaries
stay within a budget and its memory is inputs, outputs and a constant. One row, and rows of equal
length, are cut by plain views; only ragged rows are gathered. Tails hold zeros. Knows no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .tiles import Tiles

BUDGET = 1 << 17
"""Elements of the largest temporary of a segment, about: half a MB, which stays in a CPU core's cache."""


@dataclass(frozen=True)
class Segment:
    """Levels `lo : hi` of `tiles`; its tiles are ordered by level, then by row, as `Tiles` orders them."""

    tiles: Tiles
    lo: int
    hi: int

    @property
    def sizes(self) -> list[int]:
        """How many rows have a tile, for each level."""
        return [len(level) for level in self.tiles.levels[self.lo : self.hi]]

    @property
    def _tokens(self) -> slice:
        """The places within a row, where all rows are equally long."""
        return slice(self.lo * self.tiles.size, min(self.hi * self.tiles.size, self.tiles.spans.longest))

    @property
    def _index(self) -> Tensor:
        starts = self.tiles.starts
        return self.tiles.index[starts[self.lo] : starts[self.hi]].flatten()

    def cut(self, x: Tensor) -> Tensor:
        """(n, ...) to (tiles, size, ...), a view where that is possible; differentiable."""
        spans, size = self.tiles.spans, self.tiles.size
        if spans.uniform:
            part = x.unflatten(0, (spans.rows, -1))[:, self._tokens]
            short = (self.hi - self.lo) * size - part.shape[1]
            if short:
                part = pad(part, (0, 0) * (x.ndim - 1) + (0, short))
            return part.unflatten(1, (-1, size)).transpose(0, 1).flatten(0, 1)
        index = self._index
        part = x.index_select(0, index.clamp(max=spans.total - 1))
        tail = (index == spans.total).view(-1, *(1,) * (x.ndim - 1))
        return part.masked_fill(tail, 0.0).unflatten(0, (-1, size))

    def write(self, out: Tensor, y: Tensor) -> None:
        """Puts the tiles' outputs (tiles, size, ...) at their places of `out` (n, ...)."""
        spans = self.tiles.spans
        if spans.uniform:
            out.unflatten(0, (spans.rows, -1))[:, self._tokens] = self._lined(y)
        else:
            index = self._index
            held = (index < spans.total).nonzero().squeeze(1)
            out.index_copy_(0, index[held], y.flatten(0, 1).index_select(0, held).to(out.dtype))

    def join(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """All levels' outputs (tiles, size, ...) to (n, ...); differentiable."""
        if self.tiles.spans.uniform:
            return self._lined(y).flatten(0, 1).to(dtype)
        return self.tiles.join(y).to(dtype)

    def _lined(self, y: Tensor) -> Tensor:
        """(tiles, size, ...) of equal rows to (rows, tokens, ...) without the tail."""
        rows, places = self.tiles.spans.rows, self._tokens
        return y.unflatten(0, (-1, rows)).transpose(0, 1).flatten(1, 2)[:, : places.stop - places.start]


def segments(tiles: Tiles, width: int, whole: bool, budget: int = BUDGET) -> Iterator[Segment]:
    """All levels at once where `whole`, else runs of levels whose tiles hold about `budget` elements.

    `width` is the number of elements of the op's largest temporary for one tile.
    """
    lo, count = 0, len(tiles.levels)
    while lo < count:
        hi = lo + 1
        while hi < count and (whole or (tiles.starts[hi + 1] - tiles.starts[lo]) * width <= budget):
            hi += 1
        yield Segment(tiles, lo, hi)
        lo = hi


class Chain:
    """The states of rows that walk the levels together, and of those whose last tile is past.

    Rows are held in the tiles' order, longest first. State and update are `(rows, ...)` float32.
    """

    def __init__(self, tiles: Tiles, initial: Tensor):
        order = tiles.order
        self.order = order
        self.sorted = order == tuple(range(len(order)))
        if not self.sorted:
            initial = initial.index_select(0, torch.tensor(order, device=initial.device))
        self.alive, self.ended = initial, []

    def walk(
        self,
        sizes: list[int],
        decay: Tensor,
        update: Tensor,
        by: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.addcmul,
    ) -> Tensor:
        """Through a segment's levels, state <- by(update, decay, state), which is decay * state + update;
        returns each tile's first state."""
        firsts = []
        # split, not slices: the gradient of many slices would cost levels squared.
        for size, kept, fresh in zip(sizes, decay.split(sizes), update.split(sizes), strict=True):
            if size < len(self.alive):
                self.ended.append(self.alive[size:])
                self.alive = self.alive[:size]
            firsts.append(self.alive)
            self.alive = by(fresh, kept, self.alive)
        return firsts[0] if len(firsts) == 1 else torch.cat(firsts)

    def final(self) -> Tensor:
        """(rows, ...) in the caller's order."""
        final = torch.cat([self.alive, *reversed(self.ended)]) if self.ended else self.alive
        if self.sorted:
            return final
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return final.index_select(0, torch.tensor(back, device=final.device))

"""Sends spans of one token to an op's step form, and the longer ones to its scan. Knows no op.

A decode step carries one token a row and a mixed batch carries some such rows: a tile for each would
be almost all tail. Differentiable: rows and tokens are picked and put back by index_select.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...spans import Spans

Scan = Callable[[Sequence[Tensor | None], Tensor, Spans], tuple[Tensor, Tensor]]
"""(packed tensors, initial, spans) -> (o, final)."""
One = Callable[[Sequence[Tensor | None], Tensor], tuple[Tensor, Tensor]]
"""The same for one token a row, pure: packed tensors are (rows, ...)."""


def route(
    tensors: Sequence[Tensor | None], initial: Tensor, spans: Spans, *, scan: Scan, one: One
) -> tuple[Tensor, Tensor]:
    """(o, final) of packed `tensors` (n, ...) and `initial` (rows, ...), as if all had gone through `scan`.

    Spans of length 1 go through `one`, the rest through `scan`; empty ones keep their state. A None
    among the tensors stays None. At least one token is wanted: the caller answers n == 0.
    """
    if spans.longest == 1 and spans.uniform:
        return one(tensors, initial)
    if 1 not in spans.lengths:
        return scan(tensors, initial, spans)
    rows = [r for r, length in enumerate(spans.lengths) if length == 1]
    rest = [r for r, length in enumerate(spans.lengths) if length != 1]
    places = [spans.offsets[r] for r in rows]
    others = [t for r in rest for t in range(spans.offsets[r], spans.offsets[r + 1])]
    o, final = one(_pick(tensors, places), _take(initial, rows))
    kept = _take(initial, rest)
    if others:
        more, kept = scan(
            _pick(tensors, others), kept, Spans.of([spans.lengths[r] for r in rest], spans.device)
        )
        o = torch.cat([o, more])
    return _take(o, _inverse(places + others)), _take(torch.cat([final, kept]), _inverse(rows + rest))


def _take(x: Tensor, at: list[int]) -> Tensor:
    return x.index_select(0, torch.tensor(at, dtype=torch.int64, device=x.device))


def _pick(tensors: Sequence[Tensor | None], at: list[int]) -> list[Tensor | None]:
    return [None if x is None else _take(x, at) for x in tensors]


def _inverse(order: list[int]) -> list[int]:
    """Where each of 0 .. len - 1 stands in `order`."""
    inverse = [0] * len(order)
    for place, value in enumerate(order):
        inverse[value] = place
    return inverse

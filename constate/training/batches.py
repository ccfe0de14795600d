"""Which tokens each step reads: a function of the step alone, the same for every model.

A step reads 2,048 tokens: three steps of four as 8 rows of 256, the fourth as 2 rows of 1,024. The rows'
places follow the golden ratio through the text: they spread evenly, so that after any number of steps no
stretch has been read much more often than another, and rows that are read together lie far apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spans import Spans

TOKENS = 2048  # a step
SHORT, LONG = 256, 1024
GOLDEN = (5**0.5 - 1) / 2


def batch(text: Tensor, step: int, seed: int = 0) -> tuple[Tensor, Tensor, Spans]:
    """The inputs and targets (2048,) of a step, and their spans. text (n,) int64, n > 1,024."""
    length = LONG if step % 4 == 3 else SHORT
    rows = TOKENS // length
    # Counted for each length apart: the step-th batch among those of its length.
    nth = step // 4 if length == LONG else step - step // 4
    starts = [place(nth * rows + row, len(text) - length - 1, seed) for row in range(rows)]
    pieces = torch.stack([text[start : start + length + 1] for start in starts])
    return pieces[:, :-1].flatten(), pieces[:, 1:].flatten(), Spans.of([length] * rows)


def place(i: int, last: int, seed: int) -> int:
    """The i-th of evenly spread starts in [0, last]."""
    return int(((i + 0.5) * GOLDEN + seed * 0.137) % 1 * (last + 1))

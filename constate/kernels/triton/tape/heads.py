"""A matrix product for each head, of few rows: what latent attention absorbs, and RG-LRU's gates."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS, OUT, IN = 16, 64, 64
"""A program's tile of rows and outputs, and how many inputs it takes at a time."""


@triton.jit
def heads_product(
    x,
    weight,
    bias,
    y,
    rows,
    size,
    out,
    x_row,
    x_head,
    weight_head,
    weight_in,
    weight_out,
    y_row,
    y_head,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
):
    """Programs (tiles of outputs, heads, tiles of rows): y = x W + bias, bias (heads, out) or None. NARROW:
    x goes to the weight's dtype for the product."""
    head = tl.cast(tl.program_id(1), tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * OUT + tl.arange(0, OUT)
    place = tl.cast(row, tl.int64) * x_row + head * x_head
    total = tl.zeros((ROWS, OUT), tl.float32)
    first = 0
    while first < size:
        i = first + tl.arange(0, IN)
        given = tl.load(x + place[:, None] + i[None, :], (row < rows)[:, None] & (i < size)[None, :], 0.0)
        at = weight + head * weight_head + tl.cast(i, tl.int64)[:, None] * weight_in
        w = tl.load(at + column[None, :] * weight_out, (i < size)[:, None] & (column < out)[None, :], 0.0)
        if NARROW:
            total += tl.dot(given.to(w.dtype), w)
        else:
            total += tl.dot(given.to(tl.float32), w.to(tl.float32), input_precision="ieee")
        first += IN
    if bias is not None:
        total += tl.load(bias + head * out + column, column < out, 0.0)[None, :]
    to = y + tl.cast(row, tl.int64)[:, None] * y_row + head * y_head + column[None, :]
    tl.store(to, total.to(y.dtype.element_ty), (row < rows)[:, None] & (column < out)[None, :])

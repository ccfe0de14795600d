"""A mixture of experts for the few rows of a decode step: choosing, and the products of those that are asked.

Each (row, expert) that is asked is a product of one vector, whose weights are read where they lie: nothing is
gathered or sorted, so that a graph may hold it. Knows what core/experts.py computes, and how it is laid out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..maths import activated, sigmoid

OUT, IN = 32, 128
"""A program's outputs, and how many inputs it takes at a time."""


@triton.jit
def best(values, i):
    """The largest of values and where, the earlier of equals."""
    most = tl.max(values, 0)
    return most, tl.min(tl.where(values == most, i, 1 << 30), 0)


@triton.jit
def choose(
    logits,
    correction,
    weights,
    chosen,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASKED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Programs (rows,): logits (rows, EXPERTS) to the chosen (rows, ASKED) int32, the most wanted first, and
    their weights. With GROUPS above 1 only the KEPT with the best two scores in sum are chosen from."""
    row = tl.cast(tl.program_id(0), tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < EXPERTS
    score = tl.load(logits + row * EXPERTS + i, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = tl.where(inside, sigmoid(score), 0.0)
    else:
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    appeal = score
    if correction is not None:
        appeal += tl.load(correction + i, mask=inside, other=0.0)
    appeal = tl.where(inside, appeal, float("-inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        group = i // SIZE
        promise = tl.full((BLOCK,), float("-inf"), tl.float32)  # of a group, at its number
        for g in tl.static_range(GROUPS):
            own = tl.where(group == g, appeal, float("-inf"))
            one, place = best(own, i)
            two, _ = best(tl.where(i == place, float("-inf"), own), i)
            promise = tl.where(i == g, one + two, promise)
        kept = inside & (i < 0)
        for _ in tl.static_range(KEPT):
            _, g = best(promise, i)
            promise = tl.where(i == g, float("-inf"), promise)
            kept = kept | (group == g)
        appeal = tl.where(kept & inside, appeal, float("-inf"))
    total = 0.0
    asked = tl.arange(0, 16) if ASKED <= 16 else tl.arange(0, 64)
    found = tl.zeros_like(asked)
    weight = tl.zeros_like(asked).to(tl.float32)
    for n in tl.static_range(ASKED):
        _, place = best(appeal, i)
        place = tl.minimum(place, EXPERTS - 1)  # a NaN is no largest: it asks somebody
        mine = tl.sum(tl.where(i == place, score, 0.0), 0)
        appeal = tl.where(i == place, float("-inf"), appeal)
        found = tl.where(asked == n, place, found)
        weight = tl.where(asked == n, mine, weight)
        total += mine
    if NORMALISE:
        weight = weight / (total + 1e-20)
    tl.store(chosen + row * ASKED + asked, found, mask=asked < ASKED)
    tl.store(weights + row * ASKED + asked, weight * scale, mask=asked < ASKED)


@triton.jit
def experts_up(
    x,
    up,
    chosen,
    hidden,
    size,
    width,
    x_row,
    ASKED: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
):
    """Programs (tiles of outputs, rows * ASKED): hidden (rows * ASKED, width) = act(up x), or act(gate x) up
    x where the first `width` rows of an expert are its gate; up (E, width or 2 width, size)."""
    pair = tl.cast(tl.program_id(1), tl.int64)
    expert = tl.load(chosen + pair).to(tl.int64)
    column = tl.program_id(0) * OUT + tl.arange(0, OUT)
    total = tl.zeros((OUT,), tl.float32)
    other = tl.zeros((OUT,), tl.float32)
    matrix = up + expert * size * width * (2 if GATED else 1)
    first = 0
    while first < size:
        i = first + tl.arange(0, IN)
        given = tl.load(x + pair // ASKED * x_row + i, mask=i < size, other=0.0).to(tl.float32)
        place = tl.cast(column, tl.int64)[:, None] * size + i[None, :]
        real = (column < width)[:, None] & (i < size)[None, :]
        w = tl.load(matrix + place, mask=real, other=0.0).to(tl.float32)
        total += tl.sum(w * given[None, :], 1)
        if GATED:
            w = tl.load(matrix + tl.cast(width, tl.int64) * size + place, mask=real, other=0.0)
            other += tl.sum(w.to(tl.float32) * given[None, :], 1)
        first += IN
    total = activated(total, ACT)
    if GATED:
        total *= other
    tl.store(hidden + pair * width + column, total, mask=column < width)


@triton.jit
def experts_down(
    hidden,
    down,
    chosen,
    weights,
    beside,
    gate,
    y,
    width,
    size,
    beside_row,
    gate_row,
    y_row,
    ASKED: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
):
    """Programs (tiles of outputs, rows): y = sum of weight down hidden, in the order in which the experts
    were chosen, plus beside, times the sigmoid of gate where there is one; down (E, size, width)."""
    row = tl.cast(tl.program_id(1), tl.int64)
    column = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inside = column < size
    total = tl.zeros((OUT,), tl.float32)
    for n in tl.static_range(ASKED):
        pair = row * ASKED + n
        matrix = down + tl.load(chosen + pair).to(tl.int64) * size * width
        said = tl.zeros((OUT,), tl.float32)
        first = 0
        while first < width:
            i = first + tl.arange(0, IN)
            given = tl.load(hidden + pair * width + i, mask=i < width, other=0.0)
            place = tl.cast(column, tl.int64)[:, None] * width + i[None, :]
            w = tl.load(matrix + place, mask=inside[:, None] & (i < width)[None, :], other=0.0)
            said += tl.sum(w.to(tl.float32) * given[None, :], 1)
            first += IN
        total += tl.load(weights + pair) * said
    if beside is not None:
        more = tl.load(beside + row * beside_row + column, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            more *= sigmoid(tl.load(gate + row * gate_row).to(tl.float32))
        total += more
    tl.store(y + row * y_row + column, total.to(y.dtype.element_ty), mask=inside)

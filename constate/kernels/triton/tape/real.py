"""RG-LRU's gates and its recurrence as one kernel: what a token adds, the decay, the state.

See native/gates.c and ssm/rg_lru.py for the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..job import leave
from ..maths import sigmoid


@triton.jit
def lost(x):
    """1 - e^x for x <= 0, right to the last digits near 0."""
    p = 1.0 + x / 9.0
    for i in tl.static_range(7):  # pyright: ignore[reportGeneralTypeIssues]  # the compiler's own loop
        p = 1.0 + p * x / (8.0 - i)
    return tl.where(x > -0.5, -x * p, 1.0 - tl.exp(x))


@triton.jit
def real_recurrence(
    gates,
    x,
    rate,
    past,
    state,
    o,
    heads,
    gates_row,
    x_row,
    state_row,
    o_row,
    least,
    P,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAVING: tl.constexpr,
):
    """Programs (heads, rows): gates (rows, heads, 2, SIZE) before their sigmoids, the input's first; rate
    (heads SIZE) below 0; state (rows, heads SIZE) in place. A row's first token enters unscaled."""
    head = tl.program_id(0)
    row = tl.cast(tl.program_id(1), tl.int64)
    i = tl.arange(0, BLOCK)
    c = head * SIZE + i
    inside = i < SIZE
    gate = gates + row * gates_row + 2 * head * SIZE + i
    log_a = tl.load(rate + c, mask=inside, other=0.0)
    log_a *= sigmoid(tl.load(gate + SIZE, mask=inside, other=0.0))
    fed = tl.load(x + row * x_row + c, mask=inside, other=0.0).to(tl.float32)
    fed *= sigmoid(tl.load(gate, mask=inside, other=0.0))
    if tl.load(past + row) > 0:
        fed *= tl.sqrt(tl.maximum(lost(2.0 * log_a), least))
    held = state + row * state_row + c
    h = tl.exp(log_a) * tl.load(held, mask=inside, other=0.0) + fed
    tl.store(held, h, mask=inside)
    tl.store(o + row * o_row + c, h, mask=inside)
    if LEAVING is not None:
        leave(P, LEAVING, row, head, 1)

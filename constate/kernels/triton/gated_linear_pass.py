"""Joins the states of a row's stretches: what each began from, of what each made of nothing.

S before stretch p + 1 is the product of p's decays times S before p, plus p's own: a walk over few states,
every number of a state by itself. Knows nothing of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, power

NONE, SCALAR, VECTOR = 0, 1, 2
"""What decays: nothing, a head as one, every channel of a head's keys by itself."""


@triton.jit
def linear_pass(
    states,
    kept,
    initial,
    final,
    first,
    initial_row,
    initial_head,
    initial_key,
    initial_value,
    h,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Programs (rows * h * blocks of BK keys,): of the own states of a row's stretches, (pieces, h, dk, dv)
    float32, the state before each, in place, and the row's final one, (rows, h, dk, dv)."""
    number = tl.program_id(0)
    BLOCKS: tl.constexpr = (DK + BK - 1) // BK
    head = tl.cast(number // BLOCKS % h, tl.int64)
    row = tl.cast(number // BLOCKS // h, tl.int64)
    key = tl.cast(number % BLOCKS * BK + tl.arange(0, BK), tl.int64)
    value = tl.cast(tl.arange(0, BV), tl.int64)
    real = (key < DK)[:, None] & (value < DV)[None, :]
    at = key[:, None] * DV + value[None, :]
    s = tl.zeros((BK, BV), dtype=tl.float32)
    if initial is not None:
        begun = initial + row * initial_row + head * initial_head
        begun += key[:, None] * initial_key + value[None, :] * initial_value
        s = tl.load(begun, mask=real, other=0.0)
    piece, stop = tl.load(first + row), tl.load(first + row + 1)
    while piece < stop:
        place = piece * h + head
        own = tl.load(states + place * (DK * DV) + at, mask=real, other=0.0)
        tl.store(states + place * (DK * DV) + at, s, mask=real)
        if DECAY == 0:
            s += own
        if DECAY == 1:
            s = s * tl.load(kept + place) + own
        if DECAY == 2:
            s = s * tl.load(kept + place * DK + key, mask=key < DK, other=0.0)[:, None] + own
        piece += 1
    tl.store(final + (row * h + head) * (DK * DV) + at, s, mask=real)


def join(
    states: Tensor, kept: Tensor | None, initial: Tensor | None, final: Tensor, first: Tensor, kind: int
) -> None:
    """States before each stretch in the place of each stretch's own, and the final ones."""
    rows, h, dk, dv = final.shape
    bk = max(1, min(power(dk, 1), 2048 // power(dv)))
    launch(
        linear_pass,
        (rows * h * -(-dk // bk),),
        final,
        states=states,
        kept=kept,
        initial=initial,
        final=final,
        first=first,
        **state_strides(initial),
        h=h,
        DK=dk,
        DV=dv,
        BK=bk,
        BV=power(dv),
        DECAY=kind,
    )


def state_strides(state: Tensor | None) -> dict[str, int]:
    """The strides of an initial state, as kernels name them."""
    names = ("initial_row", "initial_head", "initial_key", "initial_value")
    return dict(zip(names, (0, 0, 0, 0) if state is None else state.stride(), strict=True))

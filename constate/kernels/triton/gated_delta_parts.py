"""What the delta rules' kernels share: the sizes of their blocks, the inverse of a tile's system, the record
of what a tile is before it meets the state, the cases of their compile tables. Knows no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spans import Spans
from .launch import Compiled, as_launched, power

FLOOR = tl.constexpr(-1e4)
"""Log-decays are clamped here, whose exponential is 0 in float32 already: -inf is legal."""


@dataclass(frozen=True)
class Sizes:
    """`size` tokens a tile; blocks of `bk` key and `bv` value channels where tiles are prepared, of `walked`
    value channels where they are walked; warps of both kernels' programs."""

    size: int
    bk: int
    bv: int
    walked: int
    tile_warps: int
    walk_warps: int


def sizes(dk: int, dtype: torch.dtype, decay: str) -> Sizes:
    """By the class of a head's width, the dtype's and the decay's alone, never by lengths: what fits the
    registers. `decay` is "head" (or none), "channel" or "lowrank"."""
    wide, exact = power(dk), dtype == torch.float32
    size = 64 if wide <= 128 else 32
    if exact or (decay == "lowrank" and size > 32):
        size = 32 if wide <= 128 else 16
    bk, walked, walk_warps = 64 if decay == "head" else 16, 32, 4 if wide <= 64 else 8
    if exact or (decay == "lowrank" and wide > 128):
        bk, walked = 16, 16
    return Sizes(size, bk, 32, walked, 8, walk_warps)


class Cut(NamedTuple):
    """Spans cut into tiles, on the device: see Spans.tiles."""

    cu: Tensor
    first: Tensor
    row: Tensor
    start: Tensor


@dataclass(frozen=True)
class Prepared:
    """Tiles before they meet the state; see gated_delta_walk for what becomes of each.

    q, k (n, hk or h, dk) of any strides; u (n, h, dv), w (n, h, dk), reads (n, h, size); since and until
    (n, h) float32 or whole (tiles, h, dk) float32 or none of the three; also (n, h, dk), v and local
    (n, h, dv) where a second key writes v.
    """

    q: Tensor
    k: Tensor
    u: Tensor
    w: Tensor
    reads: Tensor
    since: Tensor | None = None
    until: Tensor | None = None
    whole: Tensor | None = None
    also: Tensor | None = None
    v: Tensor | None = None
    local: Tensor | None = None


def ranged(dtype: torch.dtype) -> torch.dtype:
    """In what a tile's writes and states are kept: they may leave float16's range."""
    return torch.float32 if dtype == torch.float16 else dtype


@triton.jit
def inverse(m, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + m)^-1 of a strictly lower m (SIZE, SIZE) float32; SIZE is 16 times a power of two.

    The diagonal blocks of 16 by forward substitution, all of them at once; then blocks are joined two and
    two, where [[A, 0], [M, B]]^-1 has -B^-1 M A^-1 below. A power series in m would need half as many steps,
    but its terms can be 1e18 where the inverse itself is 2 (equal keys, beta 2).
    """
    BLOCKS: tl.constexpr = SIZE // 16
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(same, tl.reshape(m, (BLOCKS, 16, BLOCKS, 16)), 0.0), axis=2)
    i = tl.arange(0, 16)
    t = tl.zeros((BLOCKS, 16, 16), dtype=tl.float32) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None]
    for row in range(1, 16):
        here = i[None, :, None] == row
        reads = tl.sum(tl.where(here, own, 0.0), axis=1)
        t = tl.where(here, t - tl.sum(reads[:, :, None] * t, axis=1)[:, None, :], t)
    whole = tl.reshape(tl.where(same, t[:, :, None, :], 0.0), (SIZE, SIZE))
    LEVELS: tl.constexpr = (SIZE > 16) + (SIZE > 32) + (SIZE > 64)
    at = tl.arange(0, SIZE)
    for level in tl.static_range(LEVELS):
        joined = (at[:, None] >> (level + 5)) == (at[None, :] >> (level + 5))
        below = joined & ((at[:, None] >> (level + 4)) > (at[None, :] >> (level + 4)))
        left = tl.dot(whole, tl.where(below, m, 0.0), input_precision=PRECISION)
        whole -= tl.dot(left, whole, input_precision=PRECISION)
    return whole


def classes() -> Iterator[tuple[dict[str, Any], tuple[int, int, int, int, int], torch.dtype]]:
    """The classes of head sizes and dtypes that the delta rules' compile tables walk: what as_launched is
    told about them, (n, h, hk, dk, dv), and the dtype. float16 mostly becomes what bfloat16 does."""
    heads = ((64, 64), (128, 128), (64, 128), (100, 100), (256, 256))
    for dtype, name, some in (
        (torch.bfloat16, "bf16", heads),
        (torch.float32, "fp32", heads),
        (torch.float16, "fp16", heads[1::3]),
    ):
        for dk, dv in some:
            default = dtype == torch.bfloat16 and dk == dv and dk in (64, 128)
            h = 16 if default else 8  # few enough for two passes, however narrow the blocks
            yield {"head": dk, "dtype": name, "default": default}, (4800, h, h // 4, dk, dv), dtype


def every_way(
    scan: Callable[..., object],
    step: Callable[..., object],
    given: Sequence[Tensor | None],
    state: tuple[int, int, int],
    note: str,
    **about: Any,
) -> Iterator[Compiled]:
    """The cases of a scan of these tensors (n, ...) in two passes and in one, and of its step; `state` is
    (h, dk, dv)."""
    n = next(x.shape[0] for x in given if x is not None)

    def call(lengths: tuple[int, ...]) -> object:
        return scan(*given, torch.empty(len(lengths), *state), Spans.of(lengths))

    yield from as_launched(scan.__name__, lambda: call((n,)), **about, note=note)
    once = as_launched(
        scan.__name__, lambda: call((n // 50,) * 50), **about, note=f"{note}, one pass".strip(", ")
    )
    yield from (case for case in once if case.kernel.__name__ == "delta_walk")
    few = [None if x is None else x[:32] for x in given]
    yield from as_launched(step.__name__, lambda: step(*few, torch.empty(32, *state)), **about, note=note)

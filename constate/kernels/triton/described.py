"""What a job of a decode step is, as its kernel is compiled for it: sizes, options, and which tensors it has.

Hashable and plain, so that Triton takes it as one constant; kernels read it through `of`, `start`, `count`
and `at`. What the options do is in job.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton


@dataclass(frozen=True)
class Job:
    """`width` channels in slices of `size`, of which each leaves `out` (as many, but for "taylor" and a
    divisor) and `ones` ones behind them, `copies` times. Strides are those of rows, steps those of slices.

    `kind` is an activation, "elu", "taylor", "decays", "bounded" (log-decays below `bound`) or "forget".
    `norm` is "rms", "centred", "sum", "absolute" or "length". `heads` of a scan make one slice, whose numbers
    other programs have just written: they are then read past the first `cache`, ".cg".
    """

    size: int
    width: int
    out: int
    block: int
    x_stride: int
    x_step: int
    o_stride: int = 0
    o_step: int = 0
    divide: float | None = None
    taps: int = 0
    history_row: int = 0
    history_tap: int = 0
    conv_silu: bool = False
    kind: str = ""
    least: float = 0.0
    most: float = math.inf
    bound: float = 0.0
    first: str = ""
    first_stride: int = 0
    keep: float = 1.0
    said: float = 1.0
    kept_stride: int = 0
    sum_stride: int = 0
    norm: str = ""
    eps: float = 0.0
    shared: bool = False
    turned: int = 0
    scale: float = 1.0
    low: float = -math.inf
    bonus: int = 0
    key_stride: int = 0
    value_stride: int = 0
    by: str = ""
    by_stride: int = 0
    copies: int = 1
    ones: int = 0
    second_stride: int = 0
    narrow_stride: int = 0
    heads: int = 1
    cache: str = ""


@dataclass(frozen=True)
class Jobs:
    """Several, side by side: those of job i are the programs from starts[i] on."""

    jobs: tuple[Job, ...]
    starts: tuple[int, ...]


POINTERS = (
    *("x", "scales", "taps", "conv_bias", "history", "bias", "rate", "first", "kept", "sum", "weight"),
    *("norm_bias", "turns", "reads", "key", "bonus", "value", "by", "o", "second", "narrow", "slots"),
    "arrivals",
)
"""The places of a job's tensors in its tuple of pointers. `slots` are (capacity, row, place), where o is a
cache of keys or values; `bias` and `rate` are also the bounds and their logarithms of "forget", and in
"taylor" `bias`, `rate` and `scales` say which channels a feature multiplies, and its weight."""


@triton.constexpr_function
def of(jobs: Jobs, j: int, name: str) -> Any:
    return getattr(jobs.jobs[j], name)


@triton.constexpr_function
def start(jobs: Jobs, j: int) -> int:
    return jobs.starts[j]


@triton.constexpr_function
def count(jobs: Jobs) -> int:
    return len(jobs.jobs)


@triton.constexpr_function
def at(name: str) -> int:
    return next(i for i, other in enumerate(POINTERS) if other == name)


@triton.constexpr_function
def power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

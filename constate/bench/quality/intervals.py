"""How sure a score is: 95% intervals. Knows numbers alone.

Answers of one episode stand or fall together, so that the spread is taken between episodes, and between
seeds where there are several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from torch import Tensor

Z = 1.959964  # of a normal distribution
# Student's t, two-sided 95%, by degrees of freedom; beyond, nearly the normal's.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def share(right: Tensor, asked: Tensor) -> tuple[float, float, float]:
    """The share of right answers and its interval: right, asked (episodes,) counts.

    Wilson's interval over as many answers as the spread between episodes is worth, at least one an episode
    and at most all of them. Raises ValueError where nothing was asked.
    """
    total, episodes = float(asked.sum()), len(asked)
    if total == 0:
        raise ValueError("no answer was asked for")
    p = float(right.sum()) / total
    worth = float(episodes)
    if episodes > 1 and 0 < p < 1:
        residual = right.double() - p * asked.double()
        variance = float(residual.square().sum()) * episodes / (episodes - 1) / total**2
        worth = p * (1 - p) / variance if variance else total
    n = min(max(worth, episodes), total)
    middle, half = (p + Z**2 / (2 * n)), Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    low, high = ((middle + side * half) / (1 + Z**2 / n) for side in (-1, 1))
    return p, max(0.0, low), min(1.0, high)


def times(count: int) -> float:
    """How many standard errors of the mean of `count` values, two at least, lie on each side of 95%."""
    return T[count - 2] if count - 2 < len(T) else Z


def mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of several seeds' scores and Student's interval; one value alone has none: NaN."""
    if len(values) < 2:
        return values[0], math.nan, math.nan
    middle, half = fmean(values), times(len(values)) * stdev(values) / math.sqrt(len(values))
    return middle, middle - half, middle + half

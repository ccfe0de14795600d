"""The Pareto front: of points with two costs each, those that no other point betters. Knows numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def front(points: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Those of `points` for which there is no other with both costs as low and one of them lower; by their
    first cost. Twins stay together."""
    told = [(costs(point), point) for point in points]
    kept = [(c, point) for c, point in told if not any(_betters(other, c) for other, _ in told)]
    return [point for _, point in sorted(kept, key=lambda pair: pair[0])]


def _betters(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] <= b[1] and a != b

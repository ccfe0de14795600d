"""What one sequence holds at any length, from the lengths at which it is known: straight lines between.

Exact where memory grows evenly, or not at all. Knows points; knows no bench.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Line:
    """Lengths in rising order, one at least, and the bytes at each. Beyond its ends a line goes on as in its
    last piece, and from a single point level."""

    lengths: tuple[float, ...]
    bytes: tuple[float, ...]

    @staticmethod
    def through(points: Mapping[float, float]) -> Line:
        lengths = sorted(points)
        return Line(tuple(lengths), tuple(points[n] for n in lengths))

    def slope(self, length: float) -> float:
        """Bytes a token, of the piece that ends at `length` or holds it."""
        if len(self.lengths) < 2:
            return 0.0
        i = min(max(bisect_left(self.lengths, length), 1), len(self.lengths) - 1)
        return (self.bytes[i] - self.bytes[i - 1]) / (self.lengths[i] - self.lengths[i - 1])

    def at(self, length: float) -> float:
        i = min(max(bisect_left(self.lengths, length) - 1, 0), len(self.lengths) - 1)
        return self.bytes[i] + self.slope(length) * (length - self.lengths[i])

    def reaches(self, bytes: float) -> float | None:
        """The first length, 0 or more, at which it holds more than `bytes`; None for none."""
        if self.at(0) > bytes:
            return 0.0
        places = [0.0, *(n for n in self.lengths if n > 0)]
        for a, b in pairwise(places):
            if self.at(b) > bytes:
                return a + (bytes - self.at(a)) / (self.at(b) - self.at(a)) * (b - a)
        end = self.lengths[-1]
        rise = self.slope(end)
        return end + (bytes - self.at(end)) / rise if rise > 0 else None

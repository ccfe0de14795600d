"""Predictions between the lengths that were measured, where the model is at hand to be put on paper again.

Knows points of `bench memory`; draws nothing. A checkpoint on the hub is not asked for: a report opens no
network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...loading import checkpoints
from ..memory_rows import row
from ..peak import Point
from ..shapes import SHAPES
from .evidence import Row

SAME = ("predicted_peak_bytes", "predicted_bytes", "weight_bytes")


def on_paper(measured: Sequence[Row], lengths: Sequence[int], rows: int | None = None) -> list[Row] | None:
    """Rows of `bench memory` at these lengths, nothing in them measured, for the model and settings of the
    `measured` ones, with `rows` sequences (None: as many as the first has). None where the model is not at
    hand, or does not give the predictions that they came with (another of that name, another version)."""
    point = Point(**measured[0]["point"]) if measured[0].get("point") else None
    if point is None or not _at_hand(point.name):
        return None
    try:
        again = [row(replace(point, length=one["length"], rows=one["rows"]), None) for one in measured]
        if any(mine[key] != one[key] for mine, one in zip(again, measured, strict=True) for key in SAME):
            return None
        count = measured[0]["rows"] if rows is None else rows
        return [row(replace(point, length=n, rows=count), None) for n in lengths]
    except ValueError:
        return None


def _at_hand(name: str) -> bool:
    return name in SHAPES or name in checkpoints() or Path(name).expanduser().is_dir()

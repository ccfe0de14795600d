"""Quality results that come with the package: nothing needs to be trained or asked to see them.

`constate quality all` wrote those of the zoo's checkpoints, `constate quality compare` those of families that
were trained on the probes. Knows files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...training.text import ZOO
from ..results import Record, read

SCORES = ZOO / "scores.jsonl"
GRID = Path(__file__).parent / "grid.jsonl"


def scores(model: str | None = None) -> list[Mapping[str, Any]]:
    """Every row of the zoo's checkpoints, or of one model by its name; none where none ship with it."""
    found = [row for record in read(SCORES) for row in record.rows]
    return [row for row in found if model in (None, row["model"])]


def grid() -> Sequence[Record]:
    """The records of the trained families."""
    return read(GRID)

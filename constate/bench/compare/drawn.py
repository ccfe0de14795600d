"""Rows to draw: of a bench's rows those that belong together, lines between points, corners of a front.

Knows rows; knows no charts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..memory_rows import OFF
from ..units import size
from .evidence import Row
from .front import front
from .line import Line
from .paper_lines import on_paper
from .standing import peak, remarks

STEPS = 64  # places along a line: what is straight between two lengths bends in log-log

Size = Callable[[Row], Any]


def points(rows: Sequence[Row], predicted: Size, measured: Size) -> list[Row]:
    """The measured points of memory, with what is told of each on hovering. The two read a row's bytes."""
    return [
        {
            "series": row["series"],
            "length": row["length"],
            "bytes": measured(row),
            "flagged": abs(measured(row) / predicted(row) - 1) > OFF,
            "tokens": f"{row['length']:,}",
            "measured": size(measured(row)),
            "predicted": size(predicted(row)),
            "remark": remarks(row) or "none",
        }
        for row in rows
        if peak(row) is not None and measured(row) > 0
    ]


def lines(rows: Sequence[Row], predicted: Size) -> list[Row]:
    """Rows along each series' predictions, near enough to each other for a curve: on paper wherever the model
    is at hand, and else in straight pieces between the lengths that were measured."""
    found = []
    for series in dict.fromkeys(row["series"] for row in rows):
        mine = [row for row in rows if row["series"] == series]
        known = {row["length"]: float(predicted(row)) for row in mine}
        first, last = min(known), max(known)
        places = sorted({round(first * (last / first) ** (i / STEPS)) for i in range(STEPS + 1)} | set(known))
        told = on_paper(mine, places)
        line = Line.through({row["length"]: predicted(row) for row in told} if told else known)
        found += [{"series": series, "length": n, "bytes": line.at(n)} for n in places]
    return found


def edge(rows: Sequence[Row], costs: Callable[[Row], tuple[float, float]]) -> list[Row]:
    """The front's corners and its ends, which belong to no series: from as bad a score as any to as costly as
    any."""
    kept = [{k: row[k] for k in ("bytes", "tokens_per_s", "bits")} for row in front(rows, costs)]
    worst = max(row["bits"] for row in rows)
    dear = max(rows, key=lambda row: costs(row)[0])
    ends = {**kept[0], "bits": worst}, {**dear, "bits": kept[-1]["bits"]}
    return [{**row, "series": None, "at": i} for i, row in enumerate((ends[0], *kept, ends[1]))]


def single(rows: Sequence[Row]) -> list[Row]:
    """Those of one sequence; of the fewest there are where nobody measured one."""
    fewest = min((row["rows"] for row in rows), default=1)
    return [row for row in rows if row["rows"] == fewest]


def most_rows(speed: Sequence[Row]) -> int | None:
    """The prompt that was measured with the most numbers of sequences."""
    counts = {row["prompt"]: {r["rows"] for r in speed if r["prompt"] == row["prompt"]} for row in speed}
    return max(counts, key=lambda prompt: len(counts[prompt]), default=None)

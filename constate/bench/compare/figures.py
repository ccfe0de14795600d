"""What the report draws: for each figure a title, a caption, and a chart for each machine.

Turns evidence and standings into the plain rows that charts.py draws, numbers that are told on hovering among
them, as text. Knows what belongs into which figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import altair as alt

from ...core.decode import PIECE
from ..units import seconds, size
from . import charts
from .charts import Look, Row
from .drawn import edge, lines, most_rows, points, single
from .evidence import Evidence
from .standing import Standing, held_bytes, peak

Measured = tuple[Evidence, Sequence[Standing]]


@dataclass(frozen=True)
class Figure:
    """`name` is that of its picture's file; a panel is a machine's label and its chart."""

    name: str
    title: str
    caption: str
    panels: tuple[tuple[str, alt.LayerChart], ...]


def figures(measured: Sequence[Measured], look: Look) -> list[Figure]:
    """Those for which there is something to draw."""
    return [figure for make in ALL for figure in make(measured, look) if figure.panels]


def _memory(measured: Sequence[Measured], look: Look) -> Iterator[Figure]:
    def rows(one: Measured) -> tuple[list[Row], list[Row]]:
        kept = single(one[0].memory)
        return lines(kept, _peak), points(kept, _peak, peak)

    yield _lines_and_points(
        "memory",
        "Memory against length",
        "The peak with one sequence: weights, what the sequence holds, activations and workspace. Lines are "
        "predicted from the configuration alone, points measured; hollow ones are off by more than a tenth. "
        f"A prompt is read in pieces of {PIECE:,} tokens, so that activations stop growing there.",
        "memory, weights included",
        [(one[0].label, *rows(one)) for one in measured],
        look,
    )


def _held(measured: Sequence[Measured], look: Look) -> Iterator[Figure]:
    def rows(one: Measured) -> tuple[list[Row], list[Row]]:
        kept = [row for row in single(one[0].memory) if held_bytes(row)]
        return lines(kept, held_bytes), points(kept, held_bytes, _really_held)

    yield _lines_and_points(
        "held",
        "What one sequence holds",
        "State, convolution history, keys and values: what a sequence carries from token to token and what "
        "each further sequence costs. Lines are predicted, points measured, hollow where off by more than a "
        "tenth: on a CPU pages of the whole process are counted, which shows beside the smallest.",
        "bytes that a sequence holds",
        [(one[0].label, *rows(one)) for one in measured],
        look,
    )


def _lines_and_points(
    name: str,
    title: str,
    caption: str,
    axis: str,
    told: Sequence[tuple[str, list[Row], list[Row]]],
    look: Look,
) -> Figure:
    beside = [row for _, lines, points in told for row in (*lines, *points)]
    panels = [
        (label, charts.bytes_by_length(lines, points, look, beside, axis))
        for label, lines, points in told
        if lines
    ]
    return Figure(name, title, caption, tuple(panels))


def _peak(row: Row) -> int:
    return row["predicted_peak_bytes"]


def _really_held(row: Row) -> int:
    return row["measured_held_bytes"] - row["weight_bytes"]


def _time(measured: Sequence[Measured], look: Look) -> Iterator[Figure]:
    def rows(one: Measured) -> list[Row]:
        return [
            {
                "series": row["series"],
                "length": row["prompt"],
                "ms": row["itl_s"] * 1e3,
                "ms_high": (row.get("itl_p90_s") or row["itl_s"]) * 1e3,
                "tokens": f"{row['prompt']:,}",
                "time": seconds(row["itl_s"]),
                "high": seconds(row["itl_p90_s"]) if row.get("itl_p90_s") else "not told",
            }
            for row in single(one[0].speed)
        ]

    yield _figure(
        "time",
        "Time per token",
        "One sequence, after prompts of several lengths: the median of the decode steps, with a line up to "
        "the 90th percentile.",
        measured,
        rows,
        lambda mine, all: charts.time_per_token(mine, look, all),
    )


def _throughput(measured: Sequence[Measured], look: Look) -> Iterator[Figure]:
    def rows(one: Measured) -> list[Row]:
        prompt = most_rows(one[0].speed)
        return [
            {
                "series": row["series"],
                "rows": row["rows"],
                "tokens_per_s": row["decode_tokens_per_s"],
                "sequences": f"{row['rows']:,}",
                "rate": f"{row['decode_tokens_per_s']:,.0f}",
                "tokens": f"{row['prompt']:,}",
            }
            for row in one[0].speed
            if row["prompt"] == prompt and row.get("decode_tokens_per_s")
        ]

    yield _figure(
        "throughput",
        "Throughput against sequences at once",
        "Tokens decoded a second by all sequences together, prompts of one length.",
        measured,
        rows,
        lambda mine, all: charts.throughput(mine, look, all),
    )


def _quality(measured: Sequence[Measured], look: Look) -> Iterator[Figure]:
    def rows(one: Measured) -> list[Row]:
        return [
            {
                "series": s.series,
                "bits": s.bits,
                "low": s.low,
                "high": s.high,
                "bytes": s.held,
                "tokens_per_s": s.rate,
                "held": size(s.held) if s.held is not None else "not told",
                "rate": f"{s.rate:,.0f}" if s.rate else "not told",
                "score": f"{'at most ' * s.bound}{s.bits:.3f}",
            }
            for s in one[1]
            if s.bits is not None
        ]

    best = "The dashed line joins those that nothing here betters in both."
    yield _figure(
        "quality_by_bytes",
        "Bits a byte against bytes held",
        f"Left and low is better. {best}",
        measured,
        lambda one: [row for row in rows(one) if row["bytes"]],
        lambda mine, all: charts.quality_by_bytes(
            mine, edge(mine, lambda row: (row["bytes"], row["bits"])), look, all
        ),
    )
    yield _figure(
        "quality_by_speed",
        "Bits a byte against speed",
        f"Right and low is better; the speed is that of the whole workload, prompts included. {best}",
        measured,
        lambda one: [row for row in rows(one) if row["tokens_per_s"]],
        lambda mine, all: charts.quality_by_speed(
            mine, edge(mine, lambda row: (-row["tokens_per_s"], row["bits"])), look, all
        ),
    )


ALL: Sequence[Callable[[Sequence[Measured], Look], Iterator[Figure]]] = (
    _memory,
    _held,
    _time,
    _throughput,
    _quality,
)


def _figure(
    name: str,
    title: str,
    caption: str,
    measured: Sequence[Measured],
    rows: Callable[[Measured], list[Row]],
    draw: Callable[[list[Row], list[Row]], alt.LayerChart],
) -> Figure:
    """A panel for each machine that has rows, all on the same axes."""
    told = [(one[0].label, rows(one)) for one in measured]
    beside = [row for _, mine in told for row in mine]
    return Figure(name, title, caption, tuple((label, draw(mine, beside)) for label, mine in told if mine))

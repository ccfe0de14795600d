"""How each model stands for a workload: arithmetic on one machine's evidence.

Knows rows and a workload. What no row tells is None. What lies between two lengths is taken from the straight
line between their predictions, which is exact where memory grows evenly. The peak at the workload is the
bench's prediction where it was asked there or the model is at hand, and else has the workspace of the nearest
point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..memory_rows import OFF
from .evidence import Evidence, Row
from .line import Line
from .paper_lines import on_paper
from .workload import Workload


@dataclass(frozen=True)
class Standing:
    """One series for the workload. Bytes: `weight`, what one sequence has `held` at the end and how that
    `grows` a token, with the `line` over all lengths; the peak of all sequences, weights and workspace
    included, `predicted` and, at that very point, measured. The `sequences` that the limit holds beside
    the workspace of these, and whether these `fits`. Seconds of the workload's own prompt and sequences:
    `ttft`, `itl` and its 90th percentile, `seconds` for the whole; `rate` is new tokens a second over it.
    `bits` a byte, from above where `bound`, between `low` and `high`, with weights as `scored_in`. Of the
    measured `points` those whose peak is `off` its prediction."""

    series: str
    model: str
    dtype: str | None
    weight: int | None = None
    held: float | None = None
    grows: float | None = None
    line: Line | None = None
    predicted: float | None = None
    peak: int | None = None
    sequences: int | None = None
    fits: bool | None = None
    ttft: float | None = None
    itl: float | None = None
    itl_high: float | None = None
    seconds: float | None = None
    rate: float | None = None
    bits: float | None = None
    low: float | None = None
    high: float | None = None
    bound: bool = False
    scored_in: str | None = None
    points: int = 0
    off: tuple[Row, ...] = ()


def standings(evidence: Evidence, quality: Mapping[str, Row], workload: Workload) -> list[Standing]:
    """Every series of this machine, in the order of its first row."""
    rows = [*evidence.memory, *evidence.speed]
    limit = evidence.limit if workload.memory_limit is None else workload.memory_limit
    return [
        _standing(
            name,
            [row for row in evidence.memory if row["series"] == name],
            [row for row in evidence.speed if row["series"] == name],
            quality.get(next(row["model"] for row in rows if row["series"] == name), {}),
            workload,
            limit,
        )
        for name in dict.fromkeys(row["series"] for row in rows)
    ]


def _standing(
    name: str, memory: Sequence[Row], speed: Sequence[Row], score: Row, workload: Workload, limit: int | None
) -> Standing:
    first = [*memory, *speed][0]
    found: dict[str, Any] = {"series": name, "model": first["model"], "dtype": first.get("dtype")}
    if memory:
        found |= _bytes(memory, workload, limit)
    for row in speed:
        if (row["rows"], row["prompt"]) == (workload.concurrency, workload.prompt):
            found |= _seconds(row, workload)
    if score:
        found |= {"bits": score["score"], "low": score.get("low"), "high": score.get("high")}
        found |= {"bound": bool(score.get("bound")), "scored_in": score.get("dtype")}
    return Standing(**found)


def _bytes(memory: Sequence[Row], workload: Workload, limit: int | None) -> dict[str, Any]:
    tokens, rows = workload.tokens, workload.concurrency
    weight, line = memory[0]["weight_bytes"], line_of(memory)
    held = line.at(tokens)
    near = min(
        memory,
        key=lambda m: (m["rows"] != rows, abs(m["tokens"] * m["rows"] - tokens * rows), peak(m) is None),
    )
    exact = (near["tokens"], near["rows"]) == (tokens, rows)
    length = tokens - (near["tokens"] - near["length"])  # what the bench reads for as many tokens in the end
    told = [near] if exact else on_paper(memory, [length], rows) if length > 0 else None
    work = near["predicted_peak_bytes"] - near["predicted_bytes"]
    found = {
        "weight": weight,
        "held": held,
        "grows": line.slope(tokens),
        "line": line,
        "predicted": told[0]["predicted_peak_bytes"] if told else weight + rows * held + work,
        "peak": peak(near) if exact else None,
        "points": sum(peak(m) is not None for m in memory),
        "off": tuple(m for m in memory if off(m)),
    }
    work = found["predicted"] - weight - rows * held
    if limit is not None:
        found["sequences"] = max(0, int((limit - weight - work) // held)) if held else None
        found["fits"] = max(found["predicted"], found["peak"] or 0) <= limit
    return found


def _seconds(row: Row, workload: Workload) -> dict[str, Any]:
    seconds = row["ttft_s"] + workload.new * row["itl_s"]
    return {
        "ttft": row["ttft_s"],
        "itl": row["itl_s"],
        "itl_high": row.get("itl_p90_s"),
        "seconds": seconds,
        "rate": workload.concurrency * workload.new / seconds,
    }


def line_of(memory: Sequence[Row]) -> Line:
    """What one sequence holds, as the rows of one series predict it, and beyond the longest as that grows."""
    points = {row["tokens"]: held_bytes(row) / row["rows"] for row in memory}
    last = max(memory, key=lambda row: row["tokens"])
    points[last["tokens"] + 1] = points[last["tokens"]] + last["growth_bytes_per_token"]
    return Line.through(points)


def held_bytes(row: Row) -> int:
    """State, history and KV of all rows: what sequences carry from token to token."""
    return row["kv_bytes"] + row["state_bytes"] + row["conv_bytes"]


def peak(row: Row) -> Any:
    """The measured peak, weights included; None for a point that was not measured."""
    return row.get("measured_peak_bytes")


def off(row: Row) -> bool:
    """Whether the measured peak is further from the predicted one than a tenth of it."""
    return peak(row) is not None and abs(peak(row) / row["predicted_peak_bytes"] - 1) > OFF


def remarks(row: Row) -> str:
    return "; ".join(row.get("flags") or ())

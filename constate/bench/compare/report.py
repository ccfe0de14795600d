"""The report of `constate compare`: from records and a workload to a folder with a page, pictures and data.

Puts together what its neighbours find, draw and write. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..quality.shipped import grid
from ..quality.shipped import scores as scores_of_zoo
from ..results import Record
from ..units import size
from . import tables
from .charts import Look
from .evidence import Evidence, gather, quality
from .figures import figures
from .findings import findings
from .page import key, page, picture
from .remembered import COLUMNS, remembered
from .standing import Standing, standings
from .workload import Workload

PAGE, RESULTS = "report.html", "results.jsonl"
TITLE = "What each architecture costs"
REMEMBERED = "What a fixed state remembers"


@dataclass(frozen=True)
class Report:
    """`rows` are standings as `--json` prints them, `said` the findings by machine and `remembered` those
    that belong to none, `files` what was written."""

    rows: tuple[Mapping[str, Any], ...]
    said: Mapping[str, Sequence[str]]
    remembered: Sequence[str]
    files: tuple[Path, ...]


def report(
    records: Sequence[Record],
    workload: Workload,
    out: Path,
    commands: Sequence[str],
    models: Sequence[str] = (),
) -> Report:
    """Write page and pictures into the folder `out`; `commands` are what makes the same report again, and
    only `models` (all, if none) are in it. Raises ValueError for records that tell of none of them."""
    evidence, scores = evidence_of(records, models), quality(records)
    measured = [(one, standings(one, scores, workload)) for one in evidence]
    look = Look(tuple(dict.fromkeys(s.series for _, found in measured for s in found)))
    drawn = figures(measured, look)
    models_of = {s.model: s.series for _, found in reversed(measured) for s in reversed(found)}
    kept = remembered(records, models_of, look, scores_of_zoo(), grid())
    said = {
        one.label: findings(found, workload, limit(one, workload)) + _missing(one, found, workload)
        for one, found in measured
    }
    told = {
        "title": TITLE,
        "asked": _asked(workload),
        "columns": ["model", *(name for name, _, _ in tables.STANDING)],
        "machines": [
            {
                "label": one.label,
                "findings": said[one.label],
                "rows": [
                    {"name": s.series, "key": key(s.series, look), "cells": tables.named(tables.STANDING, s)}
                    for s in found
                ],
            }
            for one, found in measured
        ],
        "remembered": {
            "title": REMEMBERED,
            "said": kept.said,
            "columns": ["model", *COLUMNS.values()],
            "rows": [
                {"name": name, "cells": list(zip(COLUMNS.values(), cells, strict=True))}
                for name, cells in kept.rows
            ],
            "came_out": kept.came_out,
        },
        "commands": commands,
        "facts": tables.facts(evidence),
        "details": tables.details(evidence),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / PAGE).write_text(page(drawn, kept.figures, look, told), encoding="utf-8")
    drawn = [*drawn, *kept.figures]
    for figure in drawn:
        (out / f"{figure.name}.png").write_bytes(picture(figure))
    names = [PAGE, *(f"{figure.name}.png" for figure in drawn), RESULTS]
    return Report(
        tuple(_row(one, s, workload) for one, found in measured for s in found),
        said,
        (*kept.said, *kept.came_out),
        tuple(out / name for name in names if (out / name).exists()),
    )


def evidence_of(records: Sequence[Record], models: Sequence[str]) -> list[Evidence]:
    """What `report` would tell of. Raises ValueError where that is nothing."""
    if not (evidence := gather(records, models)):
        raise ValueError(
            f"no measured memory or speed of {', '.join(models) or 'any model'} in {len(records)} records: "
            "results files of `constate bench memory` and `constate bench speed` (--out F) are wanted"
        )
    return evidence


def limit(evidence: Evidence, workload: Workload) -> int | None:
    return evidence.limit if workload.memory_limit is None else workload.memory_limit


def _asked(w: Workload) -> str:
    memory = "the memory of the machine" if w.memory_limit is None else size(w.memory_limit)
    many = f"{w.concurrency:,} sequence{'s' * (w.concurrency > 1)} at once"
    return f"{many}, each with a prompt of {w.prompt:,} tokens and {w.new:,} new ones, in {memory}."


def _missing(one: Evidence, found: Sequence[Standing], workload: Workload) -> list[str]:
    """What is missing on this machine, and why where that is known."""
    notes = [
        f"{row['engine']} did not run {row['model']}: {row['error']}"
        + (f" ({row['install']})" if row.get("install") else "")
        for row in one.absent
    ]
    if one.speed and all(s.seconds is None for s in found):
        notes.append(
            f"No speed was measured with {workload.concurrency:,} sequences after prompts of "
            f"{workload.prompt:,} tokens, so that the workload has no time here."
        )
    return list(dict.fromkeys(notes))


def _row(one: Evidence, s: Standing, workload: Workload) -> dict[str, Any]:
    """A standing with the keys and units of the benches."""
    return {
        "machine": one.label,
        "model": s.model,
        "series": s.series,
        "dtype": s.dtype,
        "prompt": workload.prompt,
        "new": workload.new,
        "rows": workload.concurrency,
        "memory_limit_bytes": limit(one, workload),
        "weight_bytes": s.weight,
        "held_bytes": s.held,
        "growth_bytes_per_token": s.grows,
        "predicted_peak_bytes": s.predicted,
        "measured_peak_bytes": s.peak,
        "sequences": s.sequences,
        "fits": s.fits,
        "ttft_s": s.ttft,
        "itl_s": s.itl,
        "workload_s": s.seconds,
        "workload_tokens_per_s": s.rate,
        "bits_per_byte": s.bits,
        "bound": s.bound,
        "points_off": len(s.off),
    }

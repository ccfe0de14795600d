"""What quality there is besides bits a byte: of the models compared on each probe, and of families that were
trained on the probes.

From rows of `constate quality` to text, tables and charts. A machine has no part in it. Knows rows; asks no
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..quality import report as trained
from ..quality.asked import usual
from ..quality.findings import Finding, findings
from ..quality.grid import rows as of_families
from ..quality.probes import PROBES
from ..results import Record
from ..units import listed, size
from . import charts
from .charts import Look
from .evidence import PROBED, Row, of_book
from .figures import Figure
from .tables import NOTHING

COLUMNS: Mapping[str, str] = {
    "bpb": "bits a byte, Shakespeare",
    "repeat": "first and second reading",
    "cloze": "cloze",
    **{name: name for name in PROBES},
}
CHANCE = "by chance"


@dataclass(frozen=True)
class Remembered:
    """`said` of the models and `came_out` of the families, in sentences; `rows` of a table (name, cells by
    COLUMNS); `figures` without a machine."""

    said: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    came_out: Sequence[str]
    figures: Sequence[Figure]


def remembered(
    records: Sequence[Record],
    models: Mapping[str, str],
    look: Look,
    shipped: Sequence[Row],
    grid: Sequence[Record],
) -> Remembered:
    """What `records` tell of these models, each with the series that it is drawn as, and of families where
    they hold any, else what `grid` does; `shipped` are the scores of checkpoints that the first chart sets
    beside each other."""
    mine = {name: told for name in models if (told := _newest(records, name))}
    families = of_families(records) or of_families(grid)
    return Remembered(
        list(_said(mine)),
        _table(mine),
        [_came_out(finding) for finding in findings(families)] if families else [],
        [*_by_state(shipped, look), *_places(mine, models, look), *trained.figures(families)],
    )


def _newest(records: Sequence[Record], model: str) -> list[Row]:
    """Of each usual question the row that stands for all its seeds, the newest last; bits a byte of the book
    are told elsewhere."""
    found: dict[tuple[str, str], Row] = {}
    for record in sorted((r for r in records if r.bench == "quality"), key=lambda r: r.taken):
        for row in record.rows:
            mine = row.get("model") == model and "family" not in row and "setting" in row
            if mine and row.get("probe") in PROBED and row["score"] is not None and usual(row):
                key = (row["probe"], row["setting"])
                if row.get("seed") is None or key not in found or found[key].get("seed") is not None:
                    found.pop(key, None)
                    found[key] = row
    return list(found.values())


def _table(mine: Mapping[str, Sequence[Row]]) -> list[tuple[str, Sequence[str]]]:
    rows = [
        (name, [_cell([r for r in told if r["probe"] == p]) for p in COLUMNS]) for name, told in mine.items()
    ]
    everything = [row for told in mine.values() for row in told]
    guessed = [_guessed([row for row in everything if row["probe"] == p]) for p in COLUMNS]
    return [*rows, (CHANCE, guessed)] if rows else []


def _cell(rows: Sequence[Row]) -> str:
    """One score with its interval, or the mean of several settings."""
    if not rows:
        return NOTHING
    row = rows[-1]
    if "first_reading" in row:
        return f"{row['first_reading']:.3f}, {row['score']:.3f}"
    if row["probe"] == "bpb":
        return f"{'at most ' * bool(row.get('bound'))}{row['score']:.2f}"
    if len(rows) > 1 or row.get("low") is None or row.get("high") is None:
        return f"{fmean(r['score'] for r in rows):.2f}"
    return f"{row['score']:.2f} ({max(0.0, row['low']):.2f} to {min(1.0, row['high']):.2f})"


def _between(row: Row) -> str:
    """A score's interval, where it has one."""
    low, high = row.get("low"), row.get("high")
    return "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"


def _guessed(rows: Sequence[Row]) -> str:
    levels = {f"{row['chance']:.2f}" for row in rows}
    return levels.pop() if len(levels) == 1 else NOTHING


def _said(mine: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    everything = [row for told in mine.values() for row in told]
    again = [
        (row["first_reading"] - row["score"], row["model"]) for row in everything if row["probe"] == "repeat"
    ]
    if again:
        (most, best), (least, worst) = max(again), min(again)
        other = f", {worst} {_less(least)}" if worst != best else ""
        yield (
            f"A passage that is read again costs {best} {_less(most)} bits a byte than at first{other}: who "
            "remembered it would pay next to nothing."
        )
    if asked := [row for row in everything if row["probe"] in PROBES]:
        above = dict.fromkeys(
            f"{r['model']} on {r['probe']}" for r in asked if (r.get("low") or 0) > r["chance"]
        )
        yield (
            "These checkpoints have read text and were trained on no probe of ids. Above chance by more than "
            f"their intervals, as one score in 40 is by luck: {listed(list(above)) if above else 'none'}, of "
            f"{len(asked)} scores. What a mixer can hold is told by the families below, which were trained "
            "on the probes."
        )
    if met := list(dict.fromkeys(row["model"] for row in everything if row.get("contaminated"))):
        yield f"{listed(met)} read these very texts in training: its scores on them are not held out."


def _less(bits: float) -> str:
    return f"{bits:.3f} less" if bits > 0 else f"{-bits:.3f} more"


def _came_out(finding: Finding) -> str:
    words = {True: "Came out", False: "Did not come out", None: "Was not measured"}
    return f"{words[finding.holds]}: {finding.claim} ({finding.source}). Seen: {finding.seen}."


def _by_state(shipped: Sequence[Row], page: Look) -> Iterator[Figure]:
    """Checkpoints that read one text from left to right, and what a sequence of each holds."""
    newest = {
        row["model"]: row
        for row in shipped
        if row["probe"] == "bpb" and of_book(row) and not row["bound"] and row["score"] is not None
    }
    points = [
        {
            "series": name,
            "bytes": row["state_bytes"] + row["conv_bytes"] + row["kv_bytes"],
            "bits": row["score"],
            "held": size(row["state_bytes"] + row["conv_bytes"] + row["kv_bytes"]),
            "score": f"{row['score']:.3f}",
        }
        for name, row in newest.items()
    ]
    if not points:
        return
    families: dict[str, list[Row]] = {}
    for point in points:
        families.setdefault(re.sub(r"_k\d+$", "", str(point["series"])), []).append(point)
    joined = [sorted(each, key=lambda p: p["bytes"]) for each in families.values() if len(each) > 1]
    look = Look(tuple(dict.fromkeys(str(p["series"]) for p in points)), True, page.series)
    yield Figure(
        "bits_by_state",
        "The zoo: bits a byte against bytes held",
        "Checkpoints of one size, text and schedule, one training each; the line joins sizes of one family.",
        (("the unseen book", charts.bits_by_state(points, joined, look)),),
    )


def _places(mine: Mapping[str, Sequence[Row]], models: Mapping[str, str], look: Look) -> Iterator[Figure]:
    points = [
        {
            "series": models[name],
            "place": row["last"] + 1,
            "bits": row["score"],
            "places": f"{row['first']:,} to {row['last']:,}",
            "score": f"{row['score']:.3f}" + _between(row),
        }
        for name, told in mine.items()
        for row in told
        if row["probe"] == "positions"
    ]
    if points:
        yield Figure(
            "places",
            "What the context is worth",
            "Bits a byte by place in windows of the unseen book: where a line stops falling, what was read "
            "before helps no more.",
            (("windows of the unseen book", charts.bits_by_place(points, look)),),
        )

"""What `constate quality compare` leaves in its folder: charts, the table of findings, the results.

Puts together what grid.py measured and findings.py says; draws with the marks and scales of compare's report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..compare.charts import Look, score_by_bytes
from ..compare.figures import Figure
from ..compare.page import picture
from ..results import Record
from ..units import size
from .findings import Finding, Score, findings, scores
from .grid import rows
from .probes import probe

RESULTS, TABLE = "results.jsonl", "findings.md"
CAPTION = (
    "One pattern of layers trained from nothing, in which the mixer alone differs, at matched parameters: "
    "the mean over seeds with Student's 95% interval. All were trained for as many steps, so that who learns "
    "slowly scores low too. Bytes are those after one episode, which attention's alone grow with. Dashed: "
    "guessing."
)
DRAWN: Mapping[str, str] = {"recall": "pairs recalled", "copy": "symbols copied"}


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]
    files: tuple[Path, ...]


def report(records: Sequence[Record], out: Path) -> Report:
    """Draw and write into the folder `out`. Raises ValueError for records without a trained model."""
    told = rows(records)
    if not told:
        raise ValueError("no trained model in these results: `constate quality compare` writes such")
    found, files = findings(told), []
    out.mkdir(parents=True, exist_ok=True)
    for figure in figures(told):
        files.append(out / f"{figure.name}.png")
        files[-1].write_bytes(picture(figure))
    (out / TABLE).write_text(_table(found, told), encoding="utf-8")
    return Report(tuple(found), (*files, out / TABLE, out / RESULTS))


def figures(told: Sequence[Mapping[str, object]]) -> Iterator[Figure]:
    """Scores of trained families against the bytes that a sequence holds, a figure a probe."""
    families = tuple(dict.fromkeys(str(row["family"]) for row in told))
    for name, axis in DRAWN.items():
        setting = probe(name).setting
        kept = [s for s in scores(told, name) if s.setting == setting]
        if not kept:
            continue
        look = Look(tuple(dict.fromkeys(s.family for s in kept)), legend=True, others=families)
        points = [_point(s) for s in kept]
        chart = score_by_bytes(points, look, axis, kept[0].chance)
        yield Figure(name, f"{axis.capitalize()} by bytes held", CAPTION, ((f"{name}: {setting}", chart),))


def _point(s: Score) -> dict[str, object]:
    known = s.seeds > 1
    return {
        "series": s.family,
        "bytes": s.held_bytes,
        "score": s.score,
        "low": max(0.0, s.low) if known else None,
        "high": min(1.0, s.high) if known else None,
        "held": size(s.held_bytes),
        "told": str(s),
    }


def _table(found: Sequence[Finding], told: Sequence[Mapping[str, object]]) -> str:
    """Findings, then every score with its interval, as Markdown."""
    words = {True: "yes", False: "NO", None: "not measured"}
    lines = ["| claim | source | came out | seen |", "|---|---|---|---|"]
    lines += [f"| {f.claim} | {f.source} | {words[f.holds]} | {f.seen} |" for f in found]
    lines += [
        "",
        "A score is the mean over seeds of the share of right answers, with Student's 95% interval.",
        "",
        "| probe | asked | family | keys | held | parameters | score | interval | chance | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(str(row["probe"]) for row in told):
        for s in scores(told, name):
            spread = f"{max(0.0, s.low):.3f} to {min(1.0, s.high):.3f}" if s.seeds > 1 else "one seed"
            lines.append(
                f"| {name} | {s.setting} | {s.family} | {s.size} | {size(s.held_bytes)} | {s.params:,} | "
                f"{s.score:.3f} | {spread} | {s.chance:.3f} | {s.seeds} |"
            )
    return "\n".join(lines) + "\n"

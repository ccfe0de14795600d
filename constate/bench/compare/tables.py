"""The page's tables: which columns each has, and how a value is written in it. Knows rows and their units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..units import seconds, size
from .evidence import Evidence, Row
from .standing import Standing, peak, remarks

NOTHING = "–"


def count(value: float) -> str:
    return f"{value:,.0f}"


def bits(s: Standing) -> str | None:
    return None if s.bits is None else f"{'at most ' * s.bound}{s.bits:.3f}"


# A column's name, what it reads, and how that is written where it is not None.
Column = tuple[str, Callable[[Any], Any], Callable[[Any], str]]
STANDING: Sequence[Column] = (
    ("weights", lambda s: s.weight, size),
    ("held by one", lambda s: s.held, size),
    ("peak, predicted", lambda s: s.predicted, size),
    ("peak, measured", lambda s: s.peak, size),
    ("fit at once", lambda s: s.sequences, count),
    ("first token", lambda s: s.ttft, seconds),
    ("per token", lambda s: s.itl, seconds),
    ("whole workload", lambda s: s.seconds, seconds),
    ("new tokens/s", lambda s: s.rate, count),
    ("bits a byte", bits, str),
)
MEMORY: Sequence[Column] = (
    ("model", lambda r: r["series"], str),
    ("tokens", lambda r: r["length"], count),
    ("sequences", lambda r: r["rows"], count),
    ("peak, predicted", lambda r: r["predicted_peak_bytes"], size),
    ("peak, measured", peak, size),
    ("held, predicted", lambda r: r["predicted_bytes"], size),
    ("held, measured", lambda r: r.get("measured_held_bytes"), size),
    ("with what the allocator keeps", lambda r: r.get("reserved_peak_bytes"), size),
    ("remarks", remarks, str),
)
SPEED: Sequence[Column] = (
    ("model", lambda r: r["series"], str),
    ("prompt", lambda r: r["prompt"], count),
    ("sequences", lambda r: r["rows"], count),
    ("first token", lambda r: r["ttft_s"], seconds),
    ("per token", lambda r: r["itl_s"], seconds),
    ("90th percentile", lambda r: r.get("itl_p90_s"), seconds),
    ("tokens/s", lambda r: r.get("decode_tokens_per_s"), count),
    ("backend", lambda r: r.get("backend"), str),
)


def cells(columns: Sequence[Column], row: Any) -> list[str]:
    told = ((read(row), write) for _, read, write in columns)
    return [NOTHING if value is None else write(value) for value, write in told]


def named(columns: Sequence[Column], row: Any) -> list[tuple[str, str]]:
    return list(zip([name for name, _, _ in columns], cells(columns, row), strict=True))


def details(evidence: Sequence[Evidence]) -> list[dict[str, Any]]:
    """A table of every point, for each machine and bench."""
    return [
        {
            "title": f"{title} on {one.label} ({len(rows)})",
            "columns": [name for name, _, _ in columns],
            "rows": [cells(columns, row) for row in rows],
        }
        for one in evidence
        for title, columns, rows in (
            ("Every memory point", MEMORY, one.memory),
            ("Every speed point", SPEED, one.speed),
        )
        if rows
    ]


def facts(evidence: Sequence[Evidence]) -> list[tuple[str, str]]:
    """Machines, versions, revisions and times, as what and which."""
    found = []
    for one in evidence:
        found.append((one.label, ", ".join(_words(one.machine))))
        found += [("versions", ", ".join(f"{k} {v}" for k, v in each.items() if v)) for each in one.versions]
        found += [("git revision", ", ".join(one.revisions))] if one.revisions else []
        found.append(("measured", " to ".join(dict.fromkeys(one.taken))))
    return found


def _words(machine: Row) -> list[str]:
    told: Mapping[str, Any] = {key: value for key, value in machine.items() if value is not None}
    return [
        f"{key.removesuffix('_bytes').replace('_', ' ')} {size(value) if key.endswith('_bytes') else value}"
        for key, value in told.items()
    ]

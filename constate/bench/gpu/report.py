"""What a measurement says: what was wrong, and each speed as a part of what the card did at its best.

Knows the record that `run.measure` returns; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

TABLES: Mapping[str, Sequence[str]] = {
    "ops": ("op", "backend", "checks", "wrong", "max_error"),
    "families": ("family", "ok", "max_error", "bfloat16_error"),
    "scans": (
        *("case", "length", "engine", "seconds", "bandwidth_fraction", "flops_fraction"),
        *("against_ours_ratio", "difference", "peak_bytes", "error"),
    ),
    "steps": (
        *("case", "rows", "engine", "seconds", "captured_s", "bandwidth_fraction"),
        *("against_ours_ratio", "difference", "error"),
    ),
    "models": (
        *("model", "phase", "rows", "length", "graph", "seconds", "tokens_per_s", "bandwidth_fraction"),
        *("flops_fraction", "peak_bytes", "graph_reason"),
    ),
    "sanitizer": ("tool", "ok", "errors", "reason"),
    "failures": ("what", "error"),
}
"""The tables that people read, and their columns."""


def wrong(record: Row) -> list[str]:
    """What makes the measurement a failed one: results that differ, answers that are errors, complaints of
    the sanitizer. What time ran out for, and peers that failed, are told and do not."""
    found = [_named(row) for name in ("ops", "families") for row in record[name] if row["ok"] is False]
    found += [f"{_item(each['item'])}: {each['error']}" for each in record["failures"]]
    return found + [f"{r['tool']}: {r['reason']}" for r in record["sanitizer"] or () if r["ok"] is False]


def tables(record: Row) -> Iterator[tuple[str, Sequence[str], list[dict[str, Any]]]]:
    """(title, columns, rows) of every table that has rows."""
    rows = {
        "ops": list(_summed(record["ops"])),
        "families": record["families"],
        "scans": _compared(record, "scans", "length"),
        "steps": _compared(record, "steps", "rows"),
        "models": [{**row, **_fractions(record, row)} for row in record["models"]],
        "sanitizer": record["sanitizer"] or [],
        "failures": [{"what": _item(each["item"]), "error": each["error"]} for each in record["failures"]],
    }
    for name, columns in TABLES.items():
        if rows[name]:
            yield name, columns, list(rows[name])


def _summed(checks: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """One row an op and backend: how many ways to call it were checked, how many were wrong, the worst."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in checks:
        groups.setdefault((row["op"], row["backend"]), []).append(row)
    for (op, backend), rows in groups.items():
        errors = [row["max_error"] for row in rows if row["dtype"] == "float32"]
        worst = None if None in errors or not errors else max(errors)
        bad = sum(row["ok"] is False for row in rows)
        yield {"op": op, "backend": backend, "checks": len(rows), "wrong": bad, "max_error": worst}


def _compared(record: Row, section: str, size: str) -> list[dict[str, Any]]:
    """Every time beside our own of the same case and size, cases together and sizes in order."""
    ours = {(row["case"], row[size]): row for row in record[section] if row["engine"] == "constate"}
    order = sorted(record[section], key=lambda row: (row["case"], row[size]))
    return [
        {
            **row,
            **_fractions(record, row),
            "against_ours_ratio": row["seconds"] / ours[row["case"], row[size]]["seconds"]
            if "seconds" in row
            else None,
        }
        for row in order
    ]


def _fractions(record: Row, row: Row) -> dict[str, float | None]:
    """Bytes and FLOPs a second over the copy's and the matrix product's, measured in the same run."""
    rule = record["yardsticks"]
    if "error" in rule:
        return {}
    copied, rates = rule["copy_bytes_per_s"], rule["matrix_flops_per_s"]
    moved, computed = row.get("bytes_per_s"), row.get("flops_per_s")
    return {
        "bandwidth_fraction": None if moved is None else moved / copied,
        "flops_fraction": None if not computed else computed / rates[row["dtype"]],
    }


def _named(row: Row) -> str:
    name = row.get("op") or row.get("family")
    how = " ".join(str(row[key]) for key in ("backend", "variant", "dk", "dv", "dtype") if row.get(key))
    return f"{name} {how}: off by {row['max_error']}"


def _item(item: Row) -> str:
    return " ".join(str(value) for value in item.values())

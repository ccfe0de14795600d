"""A row of `bench memory`: sizes on paper beside what was measured, and in words where the two part.

Knows what is printed. What is measured comes from peak.py, what is predicted from outlook.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .outlook import held, paper_of, scratch
from .peak import Point
from .units import size

OFF = 0.10  # measured and predicted peak differ by more: the row is flagged


def row(point: Point, told: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is printed for a point: sizes on paper, and what was measured (`told`, of peak.measure; None:
    nothing was).

    Bytes of all rows together: `weight_bytes`, `kv_bytes`, `state_bytes`, `conv_bytes` and their sum
    `predicted_bytes`, which is what is to be held; `predicted_workspace_bytes` beside it at the peak, and
    `predicted_peak_bytes` of both. `measured_peak_bytes` and `measured_held_bytes` are with the weights,
    `peak_above_model_bytes` without, `workspace_bytes` is the difference of the first two, and
    `reserved_peak_bytes` the peak with what the allocator keeps. On paper again: `growth_bytes_per_token`
    of one row, and `sequences_per_gb` of 10^9 bytes. `flags` tell what is to be known about the row.
    """
    about = paper_of(point.name, point.load)
    kept, work = held(about, point), scratch(about, point)
    weights, total = about.weight_bytes, about.weight_bytes + sum(kept.values())
    each = sum(held(about, replace(point, rows=1)).values())
    longer = sum(held(about, replace(point, rows=1, length=point.length + 1)).values())
    found: dict[str, Any] = {
        "model": point.name,
        "length": point.length,
        "rows": point.rows,
        "prefill": point.way,
        "weight_bytes": weights,
        **{f"{kind}_bytes": kept[kind] for kind in ("kv", "state", "conv")},
        "predicted_bytes": total,
        "predicted_workspace_bytes": work,
        "predicted_peak_bytes": total + work,
        **dict.fromkeys(_MEASURED),
        "growth_bytes_per_token": longer - each,
        "sequences_per_gb": 10**9 // each if each else None,
        "filled_tokens": point.filled,
        "positions": about.positions,
        "backend": point.load.get("backend", "auto"),
        "dtype": "int8" if point.load.get("weights") else about.dtype,
        "state_dtype": about.state_dtype,
        "device": point.load.get("device", "cpu"),
        "threads": point.threads,
        "method": None,
    }
    if told is not None:
        found |= {
            "measured_peak_bytes": weights + told["peak"],
            "peak_above_model_bytes": told["peak"],
            "measured_held_bytes": weights + told["held"],
            "workspace_bytes": told["peak"] - told["held"],
            "reserved_peak_bytes": weights + told["reserved"],
            **{key: told[key] for key in ("backend", "threads", "method")},
        }
    return found | {"flags": list(_flags(found))}


_MEASURED = (
    *("measured_peak_bytes", "peak_above_model_bytes", "measured_held_bytes", "workspace_bytes"),
    "reserved_peak_bytes",
)


def _flags(found: Mapping[str, Any]) -> Iterator[str]:
    length, places, peak = found["length"], found["positions"], found["measured_peak_bytes"]
    if places is not None and length > places:
        yield f"beyond the {places:,} positions that the model was made for"
    if found["filled_tokens"]:
        yield f"the first {found['filled_tokens']:,} places were filled, not computed"
    if peak is None:
        yield "not measured: its attention would take too long in one call (--fill never measures it)"
        return
    predicted = found["predicted_peak_bytes"]
    if abs(peak / predicted - 1) > OFF:
        kept = found["measured_held_bytes"] - found["predicted_bytes"]
        work = found["workspace_bytes"] - found["predicted_workspace_bytes"]
        if abs(work) >= abs(kept):
            parts = (found["workspace_bytes"], found["predicted_workspace_bytes"])
            why = "activations and workspace took {}, and the rule for them says {}"
        else:
            parts = (found["measured_held_bytes"], found["predicted_bytes"])
            why = "weights and sequences hold {}, and their sizes sum to {}"
        aside = "" if "never reset" not in found["method"] else "; this system cannot reset the peak"
        off = f"{abs(peak / predicted - 1):.0%} {'above' if peak > predicted else 'below'} the prediction"
        yield f"{off}: {why.format(*map(size, parts))}{aside}"

"""`constate doctor`: which backends live here, and whether each op is right on this machine."""

from __future__ import annotations

from .options import Device, Json
from .output import show


def doctor(device: Device = "cpu", as_json: Json = False) -> int:
    """Run every op of every backend beside the reference. Exit status 1 if one ran and was wrong."""
    from ..bench.doctor import doctor as examine

    rows = show(examine(device), as_json, ("op", "backend", "ok", "max_error", "reason"))
    return int(any(row["ok"] is False for row in rows))

"""Bytes, seconds and counts as a person reads them. Knows numbers alone; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence


def size(count: float) -> str:
    """Bytes in binary units: 1 KiB is 1,024 of them."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:,.0f} B" if unit == "B" else f"{amount:,.1f} {unit}"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

"""What memory against length says in the end: growth a token, where models cross, how many fit in a gigabyte.

All from rows of `bench memory` and the same models on paper. Knows rows and arithmetic; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .outlook import paper_of
from .predict.limits import crossover

Row = Mapping[str, Any]


def growth(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One a model and number of rows at once: bytes a token and row on paper, and as measured between its
    shortest and longest point (None where fewer than two were), and the sequences per gigabyte at the
    longest."""
    found = []
    for (model, count, way), mine in _grouped(rows).items():
        taken = [row for row in mine if row["measured_held_bytes"] is not None]
        slope = None
        if len({row["length"] for row in taken}) > 1:
            a, b = taken[0], taken[-1]
            slope = (
                (b["measured_held_bytes"] - a["measured_held_bytes"]) / (b["length"] - a["length"]) / count
            )
        found.append(
            {
                "model": model,
                "rows": count,
                "prefill": way,
                "growth_bytes_per_token": mine[-1]["growth_bytes_per_token"],
                "measured_growth_bytes_per_token": slope,
                "length": mine[-1]["length"],
                "sequences_per_gb": mine[-1]["sequences_per_gb"],
            }
        )
    return found


def crossings(models: Iterable[str], load: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each model whose sequences grow and each whose do not: from how many tokens on a sequence of the
    first holds more than one of the second. On paper, weights left out. Models that fill places in any order
    are left out: what they hold is a matter of their plan."""
    papers = {name: paper_of(name, load) for name in models}
    causal = {name: about for name, about in papers.items() if about.causal}
    slope = {name: about.row_bytes(2**30) - about.row_bytes(2**30 - 1) for name, about in causal.items()}
    return [
        {
            "growing": growing,
            "constant": constant,
            "tokens": crossover(causal[constant], causal[growing], traffic=False),
        }
        for growing in causal
        if slope[growing]
        for constant in causal
        if not slope[constant]
    ]


def sentences(crossed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The crossings in words, one a growing model."""
    for growing in dict.fromkeys(pair["growing"] for pair in crossed):
        mine = [pair for pair in crossed if pair["growing"] == growing]
        said = ", ".join(f"{pair['constant']} from {pair['tokens']:,}" for pair in mine)
        yield f"a sequence of {growing} holds as much as one of {said} tokens on"


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, int, str], list[Row]]:
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        groups.setdefault((row["model"], row["rows"], row["prefill"]), []).append(row)
    return groups

"""What the literature says of these families, and whether it came out here: each claim beside its numbers.

A claim holds where the numbers of the trained grid say so, and is told as it came out either way. Knows the
rows of grid.py; trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .intervals import mean
from .probes.recall import Recall

Row = Mapping[str, Any]
PAIRS = Recall().pairs
SOLVED, GUESSED = 0.95, 0.1  # a share that counts as solved; within so much of chance is chance


@dataclass(frozen=True)
class Finding:
    """A claim with its source, whether it came out (None: not among these results) and what was seen."""

    claim: str
    source: str
    holds: bool | None
    seen: str


@dataclass(frozen=True)
class Score:
    """One family's mean over seeds on a question, with its interval; `low` to `high` are NaN for one seed."""

    family: str
    size: int
    setting: str
    score: float
    low: float
    high: float
    chance: float
    seeds: int
    held_bytes: int
    params: int

    def __str__(self) -> str:
        spread = f" [{max(0.0, self.low):.2f}, {min(1.0, self.high):.2f}]" if self.seeds > 1 else ""
        return f"{self.family} {self.score:.2f}{spread}"


def scores(rows: Iterable[Row], probe: str) -> list[Score]:
    """A probe's scores, one for each family, size and setting, in the order of the rows; a seed that stands
    there twice (files were joined) counts once."""
    grouped: dict[tuple[str, int, str], dict[int, Row]] = {}
    for row in rows:
        if row["probe"] == probe and row["seed"] is not None:
            grouped.setdefault((row["family"], row["size"], row["setting"]), {})[row["seed"]] = row
    found = []
    for (family, size, setting), seeds in grouped.items():
        mine = list(seeds.values())
        middle, low, high = mean([row["score"] for row in mine])
        first = mine[0]
        about = (first["chance"], len(mine), first["held_bytes"], first["params"])
        found.append(Score(family, size, setting, middle, low, high, *about))
    return found


def findings(rows: Sequence[Row]) -> list[Finding]:
    """All claims, in the order in which one builds on another."""
    recall, copy, parity = (scores(rows, name) for name in ("recall", "copy", "parity"))
    return [
        _solve(recall),
        _bounded(recall),
        _erase(recall),
        _few_layers(recall),
        _copied(copy),
        _counted(parity),
        _not_counted(parity),
    ]


def _solve(recall: Sequence[Score]) -> Finding:
    asked = _named(recall, "attention", "hybrid")
    return _finding(
        "attention and a hybrid with one attention layer in four solve recall",
        "Arora et al., 2312.04927",
        asked if {s.family for s in asked} == {"attention", "hybrid"} else [],
        lambda: all(s.score >= SOLVED for s in asked),
    )


def _bounded(recall: Sequence[Score]) -> Finding:
    asked = sorted(_named(recall, "linear"), key=lambda s: s.size)
    return _finding(
        "linear attention recalls as much as its keys have dimensions: more state, more recall",
        "Arora et al., 2402.18668",
        asked if len(asked) > 1 else [],
        lambda: all(a.score < b.score for a, b in pairwise(asked)),
        sized=True,
    )


def _erase(recall: Sequence[Score]) -> Finding:
    """With fewer dimensions than pairs nothing is claimed: whoever overwrites learns that more slowly, and
    both are still rising when the grid's steps end."""
    asked = _named(recall, "linear", "delta_net")
    both = {s.family for s in asked if s.size == PAIRS} == {"linear", "delta_net"}
    return _finding(
        f"with as many key dimensions as pairs, {PAIRS}, the delta rule, which overwrites, recalls more than "
        "plain linear attention from the same bytes",
        "Yang et al., 2406.06484",
        asked if both else [],
        lambda: _of(asked, "delta_net", PAIRS).score > _of(asked, "linear", PAIRS).score,
        sized=True,
    )


def _few_layers(recall: Sequence[Score]) -> Finding:
    least = min((s.size for s in recall), default=0)
    asked = [s for s in _named(recall, "linear", "hybrid") if s.size == least]
    return _finding(
        "one attention layer in four recovers what a small state forgets",
        "Waleffe et al., 2406.07887",
        asked if len(asked) == 2 else [],
        lambda: _of(asked, "hybrid", least).score > _of(asked, "linear", least).score + GUESSED,
    )


def _copied(copy: Sequence[Score]) -> Finding:
    least = min((s.size for s in copy), default=0)
    trained = [s for s in copy if s.setting == copy[0].setting]
    asked = [s for s in trained if s.size == least and s.family != "hybrid"]
    return _finding(
        "attention copies what it has read, and a small fixed state does not",
        "Jelassi et al., 2402.01032",
        asked if len(asked) > 1 else [],
        lambda: all((s.score >= SOLVED) == (s.family == "attention") for s in asked),
    )


def _counted(parity: Sequence[Score]) -> Finding:
    asked = [s for s in parity if s.family.endswith("_negative")]
    return _finding(
        "delta rules with eigenvalues down to -1 count parity, at four times the length of training too",
        "Grazzi et al., 2411.12537",
        asked,
        lambda: any(
            all(s.score >= SOLVED for s in asked if s.family == family)
            for family in {s.family for s in asked}
        ),
        lengths=True,
    )


def _not_counted(parity: Sequence[Score]) -> Finding:
    longest = parity[1].setting if len(parity) > 1 else ""
    asked = [s for s in parity if not s.family.endswith("_negative") and s.setting == longest]
    return _finding(
        "attention and recurrences with positive eigenvalues guess parity beyond the length of training",
        "Grazzi et al., 2411.12537; Merrill & Sabharwal, 2207.00729",
        asked,
        lambda: all(abs(s.score - s.chance) <= GUESSED for s in asked),
    )


def _finding(
    claim: str,
    source: str,
    asked: Sequence[Score],
    holds: Callable[[], bool],
    *,
    sized: bool = False,
    lengths: bool = False,
) -> Finding:
    if not asked:
        return Finding(claim, source, None, "not among these results")
    several = sized or len({s.size for s in asked}) > 1
    seen = [
        str(s)
        + (f" at {s.size} keys" if several else "")
        + (f" ({s.setting.split(',')[0]})" if lengths else "")
        for s in asked
    ]
    return Finding(claim, source, holds(), "; ".join(seen))


def _named(found: Sequence[Score], *families: str) -> list[Score]:
    return [s for s in found if s.family in families]


def _of(found: Sequence[Score], family: str, size: int) -> Score:
    return next(s for s in found if s.family == family and s.size == size)

"""Loaded models and a probe by name: every row that `constate quality PROBE` prints.

Knows which probe is asked how; not how any works. A checkpoint was trained on text and on no probe: what it
does with one it does from context alone, and a tiny one mostly does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...core.model import Model
from .asking import ask
from .bpb import bpb
from .cloze import cloze
from .drift import drift
from .intervals import mean
from .positions import positions, repeat
from .probes import PROBES, probe
from .probes.passkey import Passkey

READING = ("bpb", "positions", "repeat", "cloze", "drift")  # of a text
DEPTHS = (0, 25, 50, 75, 100)  # percent: where a passkey stands, unless told
NAMES = (*READING, *PROBES)


def known(name: str) -> None:
    """Raises ValueError for a probe that is not known."""
    if name not in NAMES:
        raise ValueError(f"probe {name!r} is not known; known are {', '.join(NAMES)}")


def rows(
    name: str,
    model: Model,
    model_name: str,
    *,
    seeds: int = 1,
    text: str | None = None,
    settings: Mapping[str, int] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of one model: one a seed and setting, then, of several seeds, their mean with `seed` None.

    What draws nothing (bpb of a model that reads left to right, positions, repeat) is asked once, whatever
    `seeds` says. Raises ValueError for an unknown probe or setting, and as the probes do.
    """
    known(name)
    settings = settings or {}
    if name in READING and settings:
        raise ValueError(f"probe {name} has no setting {next(iter(settings))!r}: it reads a text")
    if name == "bpb":
        yield bpb(model, model_name, text)
    elif name == "positions":
        yield from positions(model, model_name, text)
    elif name == "repeat":
        yield repeat(model, model_name, text)
    elif name == "drift":
        yield from drift(model, model_name, text)
    elif name == "cloze":
        yield from summed([cloze(model, model_name, text, seed=seed) for seed in range(seeds)])
    else:
        asked = probe(name, **settings)
        each = [asked]
        if isinstance(asked, Passkey) and "depth" not in settings:
            each = [replace(asked, depth=depth) for depth in DEPTHS]
        for one in each:
            yield from summed([ask(model, model_name, one, seed=seed) for seed in range(seeds)])


def summed(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of one setting, and behind several their mean over seeds with Student's interval."""
    found = list(found)
    yield from found
    if len(found) > 1:
        score, low, high = mean([row["score"] for row in found])
        n = sum(row["n"] for row in found)
        yield found[0] | {"seed": None, "score": score, "low": low, "high": high, "n": n}

"""Loaded models and a probe by name: every row that `constate quality PROBE` prints.

Knows which probe is asked how; not how any works. A checkpoint was trained on text and on no probe: what it
does with one it does from context alone, and a tiny one mostly does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.model import Model
from ...training.score import WINDOW
from .asking import EPISODES, ask
from .bpb import bpb
from .cloze import cloze
from .drift import drift
from .intervals import mean
from .positions import PASSAGE, positions, repeat
from .positions import WINDOW as PLACES
from .probes import PROBES, Probe, probe
from .probes.passkey import Passkey
from .texts import BOOK, SECOND

# Of a text, with the settings of each.
READING: Mapping[str, Sequence[str]] = {
    "bpb": ("window", "every"),
    "positions": ("length", "most"),
    "repeat": ("length", "most"),
    "cloze": ("most",),
    "drift": ("length",),
}
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
    `seeds` says. `settings` are the probe's, and of a probe of ids `episodes`, how many are drawn for a seed.
    Raises ValueError for an unknown probe or setting, and as the probes do.
    """
    known(name)
    settings = settings or {}
    if name in READING:
        yield from _read(name, model, model_name, seeds, text, settings)
    else:
        given = dict(settings)
        if (episodes := given.pop("episodes", EPISODES)) < 1:
            raise ValueError(f"probe {name}: episodes {episodes}; at least 1 is wanted")
        for one in _drawn(name, given):
            asked = [ask(model, model_name, one, seed=seed, episodes=episodes) for seed in range(seeds)]
            yield from summed(asked)


def usual(row: Mapping[str, Any]) -> bool:
    """Whether a row answers a question as it is asked unless told otherwise, and of a text that ships (bits a
    byte: the second): what rows of several models can be set side by side by."""
    name, setting = row["probe"], row["setting"]
    if name in PROBES:
        return setting in [one.setting for one in _drawn(name, {})]
    text, _, rest = setting.partition(", ")
    return {
        "bpb": text == SECOND and rest.startswith(f"windows of {WINDOW} tokens"),
        "positions": text == BOOK and rest.endswith(f" of windows of {PLACES}"),
        "repeat": text == BOOK and rest == f"passages of {PASSAGE} tokens read again",
        "cloze": text == BOOK,
    }.get(name, False)


def _drawn(name: str, settings: Mapping[str, int]) -> list[Probe]:
    """A probe of ids, a passkey's at each depth unless that is told."""
    asked = probe(name, **settings)
    if isinstance(asked, Passkey) and "depth" not in settings:
        return [replace(asked, depth=depth) for depth in DEPTHS]
    return [asked]


def _read(
    name: str, model: Model, model_name: str, seeds: int, text: str | None, settings: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows of a probe of a text. Raises ValueError for a setting that it does not have, or a value that
    none can have."""
    for setting, value in settings.items():
        if setting not in READING[name]:
            raise ValueError(f"probe {name} has no setting {setting!r}; it has {', '.join(READING[name])}")
        least = 0 if setting == "window" else 1
        if value < least:
            raise ValueError(f"probe {name}: {setting} {value}; at least {least} is wanted")
    if name == "bpb":
        yield bpb(model, model_name, text, **settings)
    elif name == "positions":
        yield from positions(model, model_name, text, **settings)
    elif name == "repeat":
        yield repeat(model, model_name, text, **settings)
    elif name == "drift":
        yield from drift(model, model_name, text, **settings)
    else:
        yield from summed([cloze(model, model_name, text, seed=seed, **settings) for seed in range(seeds)])


def summed(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of one setting, all shares, and behind several their mean over seeds with Student's interval,
    cut off at 0 and 1."""
    found = list(found)
    yield from found
    if len(found) > 1:
        score, low, high = mean([row["score"] for row in found])
        n = sum(row["n"] for row in found)
        yield found[0] | {"seed": None, "score": score, "low": max(0.0, low), "high": min(1.0, high), "n": n}

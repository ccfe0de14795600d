"""Questions that need no download: each a small generator of episodes, with its chance level and its source.

A probe is a frozen record of its settings. It counts its own ids from 0, so that it knows no tokenizer; who
asks a loaded checkpoint maps them to ids of the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .copying import Copy
from .episodes import Episodes, Probe
from .passkey import Passkey
from .recall import Recall
from .tracking import S3, Parity

__all__ = ["PROBES", "Episodes", "Probe", "probe"]

PROBES: Mapping[str, type[Any]] = {p.name: p for p in (Recall, Copy, Passkey, Parity, S3)}


def probe(name: str, **settings: int) -> Probe:
    """A probe by its name. Raises ValueError for an unknown name, setting or value."""
    if name not in PROBES:
        raise ValueError(f"probe {name!r} is not known; known are {', '.join(PROBES)}")
    known = [f.name for f in fields(PROBES[name])]
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"probe {name} has no setting {unknown[0]!r}; it has {', '.join(known)}")
    return PROBES[name](**settings)

"""Probes on checkpoints, kept: a record for each model, probe and text, so that a long run resumes.

Knows which probes belong on a sheet; asked.py knows how each is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.model import Model
from ...loading import checkpoints, load, locate
from ..results import Results
from .asked import NAMES, READING, known, rows
from .texts import SECOND, SHIPPED, read

ALL = "all"
PART = {"every": 10}  # of SECOND's five megabytes, which is read for bits a byte beside the first text


@dataclass(frozen=True)
class Sheet:
    """`models` by name and the `probe` to ask them, or ALL; the rest as asked.rows takes it, and `options` as
    constate.load does. Raises ValueError for a probe or a text that is not there, no seed, and settings of
    ALL."""

    models: Sequence[str]
    probe: str = ALL
    seeds: int = 1
    text: str | None = None
    settings: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.probe != ALL:
            known(self.probe)
        elif self.settings:
            raise ValueError("settings are those of one probe: name one in place of all")
        if self.seeds < 1:
            raise ValueError(f"seeds {self.seeds}; at least 1 is wanted")
        if self.text is not None:
            read(self.text)

    @property
    def questions(self) -> Sequence[tuple[str, str | None, Mapping[str, int]]]:
        """Which probes, on which text, with which settings."""
        if self.probe != ALL:
            return [(self.probe, self.text, self.settings)]
        asked = [(name, self.text if name in READING else None, {}) for name in NAMES]
        return asked if self.text is not None else [*asked, ("bpb", SECOND, PART)]

    @property
    def total(self) -> int:
        return len(self.models) * len(self.questions)


def scored(
    sheet: Sheet, results: Results, remark: Callable[[str], None]
) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """(what was asked, its rows) of every question, those that `results` holds among them; new ones are kept.

    Among all probes, one that a model cannot be asked leaves no rows and a remark why. Raises ValueError,
    before anything is asked, for a model that is not there, and as asked.rows does where one probe alone was
    asked for.
    """
    for name in sheet.models:
        locate(name)
    for name in sheet.models:
        model: Model | None = None
        for probe, text, given in sheet.questions:
            settings = {
                **{"probe": probe, "model": name, "text": text, "seeds": sheet.seeds},
                **{"settings": dict(given), "load": dict(sheet.options)},
                **stamped(model=name, text=text),
            }
            label = f"{probe} of {name}"
            if (kept := results.done("quality", settings)) is not None:
                yield label, kept.rows
                continue
            model = model or load(name, **sheet.options)
            try:
                found = list(rows(probe, model, name, seeds=sheet.seeds, text=text, settings=given))
            except ValueError as error:
                if sheet.probe != ALL:
                    raise
                remark(f"{label} is left out: {error}")
                yield label, ()
            else:
                yield label, results.add("quality", settings, found).rows


def stamped(model: str, text: str | None = None) -> dict[str, Any]:
    """The sizes and times, `stamps`, of whichever of these is a file or a folder of one's own, so that what
    was kept of it stands for it no longer once it was written anew; nothing for what ships, whatever else is
    called so here."""
    found = {}
    for what, name, ships in (("model", model, checkpoints()), ("text", text, SHIPPED)):
        if name and name not in ships and (path := Path(name).expanduser()).exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            told = [(file.name, file.stat()) for file in files if file.is_file()]
            found[what] = [[each, stat.st_size, stat.st_mtime_ns] for each, stat in told]
    return {"stamps": found} if found else {}

"""Measurements as they are kept: JSON lines, one record a point, in a versioned schema.

Each line stands by itself (what was measured, on which machine, with which versions and settings), so that
files of several machines are joined by writing one behind the other. A record is

    {"schema": "constate.bench.1", "bench": "memory", "settings": {...}, "rows": [{...}, ...],
     "machine": {...}, "versions": {...}, "revision": "..." or null, "taken": "2026-01-31T12:00:00+00:00"}

with `rows` as the command prints them with --json (one for most points; a point of `bench speed` has one an
engine) and `settings` all that the point was asked for. Knows files; measures nothing, imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .place import here

SCHEMA = "constate.bench.1"
START = f'{{"schema": "{SCHEMA}", "bench": "'  # of every line


@dataclass(frozen=True)
class Record:
    """One point. `bench` is the command's word: memory, speed, predict, quality."""

    bench: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    revision: str | None = None
    taken: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def key(self) -> str:
        """What makes two records the same point: see `key`."""
        return key(self.bench, self.settings, {"machine": self.machine, "versions": self.versions})

    def line(self) -> str:
        # ASCII, and one line whatever the text: no reader takes U+2028 for the end of it.
        return json.dumps({"schema": SCHEMA, **plain(asdict(self))}) + "\n"


def plain(value: Any) -> Any:
    """The same with None for numbers that JSON has no word for: NaN, and what is infinite."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def key(bench: str, settings: Mapping[str, Any], place: Mapping[str, Any] | None = None) -> str:
    """The identity of a point: the bench, every setting, the machine and the versions (here, if `place` is
    None). The git revision is no part of it: a change of a README would throw every point away."""
    place = here() if place is None else place
    told = [bench, settings, place["machine"], place["versions"]]
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=12).hexdigest()


class Results:
    """Records being gathered, those of `path` among them; a path of None keeps them in memory alone.

    `add` writes a record through to the disk before it returns, so that whatever ends the run later costs
    the point being measured and no other. Nothing in the file is ever rewritten. Opening raises ValueError
    as `read` does.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else Path(path).expanduser()
        self.records: list[Record] = []
        if self.path is not None and self.path.exists():
            self.records = read(self.path)
            _end_the_line(self.path)
        elif self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._by_key = {record.key: record for record in self.records}

    def done(self, bench: str, settings: Mapping[str, Any], anywhere: bool = False) -> Record | None:
        """The record of this point where it has been measured on this machine, or on whichever machine if
        `anywhere`, with these versions."""
        if not anywhere:
            return self._by_key.get(key(bench, settings))
        places = (record.machine for record in self.records)
        keys = (key(bench, settings, {**here(), "machine": machine}) for machine in places)
        return next((self._by_key[k] for k in keys if k in self._by_key), None)

    def add(
        self,
        bench: str,
        settings: Mapping[str, Any],
        rows: Iterable[Mapping[str, Any]],
        place: Mapping[str, Any] | None = None,
    ) -> Record:
        """Keep a point; `place` is where it was measured if not here (see place.here)."""
        told = [plain(row) for row in rows]  # as a reader of the file will see them
        record = Record(bench, dict(settings), told, **(here() if place is None else place))
        if self.path is not None:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(handle, record.line().encode())  # in one piece: several writers do not mix lines
                os.fsync(handle)
            finally:
                os.close(handle)
        self.records.append(record)
        self._by_key[record.key] = record
        return record


def read(*paths: str | Path) -> list[Record]:
    """The records of these files, in order. An unfinished last line (its writer was killed) is left out.
    Raises ValueError for a file that is missing, is not JSON lines or has another schema."""
    records = []
    for path in map(Path, paths):
        try:
            text = path.expanduser().read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"{path}: no such results file; --out of a bench command writes one") from None
        except (UnicodeDecodeError, IsADirectoryError):
            raise ValueError(f"{path} is no results file: JSON lines are wanted, one record each") from None
        whole = text if _complete(_last(text)) else text[: text.rfind("\n") + 1]
        cut = text[len(whole) : len(whole) + len(START)]
        if not START.startswith(cut):  # no record of ours that was cut off: nobody's to throw away
            raise ValueError(
                f"{path} is no results file: its last line is neither whole nor a record's start"
            )
        records += [_record(path, i, line) for i, line in enumerate(whole.split("\n"), 1) if line.strip()]
    return records


def _record(path: Path, number: int, line: str) -> Record:
    try:
        told = json.loads(line)
        schema = told.pop("schema", None)
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{path}, line {number} is no record: JSON with a schema is wanted") from None
    if schema != SCHEMA:
        raise ValueError(
            f"{path}, line {number} has schema {schema!r} and this version reads {SCHEMA!r}: read it with "
            "the version that wrote it, or name another --out file"
        )
    try:
        record = Record(**told)
    except TypeError as error:
        raise ValueError(f"{path}, line {number} calls itself {SCHEMA} and is not: {error}") from None
    if wrong := [name for name, kind in KINDS.items() if not isinstance(getattr(record, name), kind)]:
        raise ValueError(f"{path}, line {number} calls itself {SCHEMA} and is not: its {', '.join(wrong)}")
    if not all(isinstance(row, dict) for row in record.rows):
        raise ValueError(f"{path}, line {number} calls itself {SCHEMA} and is not: a row is no object")
    return record


KINDS: Mapping[str, type] = {
    **dict.fromkeys(("settings", "machine", "versions"), dict),
    **dict.fromkeys(("bench", "taken"), str),
    "rows": list,
}


def _end_the_line(path: Path) -> None:
    """Take off an unfinished last line, so that the next record does not begin in the middle of it; a whole
    one that lacks its end alone, as editors leave it, gets that."""
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    if _complete(_last(content.decode())):
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, content.rfind(b"\n") + 1)


def _last(text: str) -> str:
    """What stands behind the last end of a line."""
    return text[text.rfind("\n") + 1 :]


def _complete(line: str) -> bool:
    """Whether a line that begins as a record is all of one: what was cut off lacks its last brace."""
    try:
        return line.startswith(START) and bool(json.loads(line))
    except ValueError:
        return False

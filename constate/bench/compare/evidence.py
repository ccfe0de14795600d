"""Records of any number of files, sorted by the machine that they come from and by what they tell.

Knows the records of bench/results.py and the keys of each bench's rows; computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from json import dumps
from math import isfinite
from typing import Any

from ...training.score import WINDOW
from ..peak import Point
from ..quality.probes import PROBES
from ..quality.texts import BOOK
from ..results import Record

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """What was measured on one machine, in one of its places (the CPU, the GPU).

    `memory` and `speed` are rows as the benches print them, the newest of each point, with `series` added
    (the model's name, its dtype where several were measured, its engine where that is a peer) and to rows of
    `memory` the `tokens` of a sequence at the end and the bench's own `point`. Where a model read its prompts
    in pieces, as generation does, its rows that read them in one call are left out. `absent` are the rows of
    peers that did not run.
    """

    label: str
    machine: Row
    memory: tuple[Row, ...]
    speed: tuple[Row, ...]
    absent: tuple[Row, ...]
    versions: tuple[Row, ...]
    revisions: tuple[str, ...]
    taken: tuple[str, str]

    @property
    def limit(self) -> int | None:
        """Bytes of memory that this place has, where it told."""
        on_gpu = self.machine.get("gpu") and self.label.startswith(str(self.machine["gpu"]))
        return self.machine.get("gpu_memory_bytes" if on_gpu else "memory_bytes")


def gather(records: Iterable[Record], models: Sequence[str] = ()) -> list[Evidence]:
    """The evidence of each machine, in the order of their first records; of these models alone, if any.
    Raises ValueError for rows of memory, speed or quality that lack what a report reads."""
    places: dict[str, list[Record]] = {}
    for record in records:
        _check(record)
        if record.bench in ("memory", "speed"):
            place = dumps([record.machine, _on_gpu(record)], sort_keys=True)
            places.setdefault(place, []).append(record)
    found = [_evidence(mine, models) for mine in places.values()]
    found = [one for one in found if one.memory or one.speed]
    labels = [one.label for one in found]
    return [
        _relabelled(one, labels[:i].count(one.label) + 1) if labels.count(one.label) > 1 else one
        for i, one in enumerate(found)
    ]


def quality(records: Iterable[Record]) -> dict[str, Row]:
    """For each model the newest row of bits a byte on the whole of the unseen book."""
    found: dict[str, Row] = {}
    for record in sorted(records, key=lambda r: r.taken):
        if record.bench == "quality":
            asked = [row for row in record.rows if row.get("probe") == "bpb" and of_book(row)]
            found |= {row["model"]: row for row in asked if row["score"] is not None}
    return found


def of_book(row: Row) -> bool:
    """Whether a row is about the unseen book, all of it, in the windows that every model is scored in."""
    read = f"windows of {WINDOW} tokens"
    text, _, part = str(row.get("setting", f"{BOOK}, {read}")).partition(", ")
    return text == BOOK and part.startswith(read) and "one in" not in part


def _evidence(records: Sequence[Record], models: Sequence[str]) -> Evidence:
    newest: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: r.taken):
        newest[dumps([record.bench, record.settings], sort_keys=True)] = record
    kept = list(newest.values())
    told = [(r, row) for r in kept for row in r.rows if not models or row["model"] in models]
    memory = [
        {**row, "tokens": row["length"] + r.settings.get("new", 0), "point": _point(r)}
        for r, row in told
        if r.bench == "memory"
    ]
    in_pieces = {row["model"] for row in memory if row.get("prefill") == "pieces"}
    memory = [row for row in memory if row["model"] not in in_pieces or row.get("prefill") == "pieces"]
    speed = [row for r, row in told if r.bench == "speed"]
    absent = [row for row in speed if row.get("error")]
    timed = [row for row in speed if not row.get("error")]
    several = len({row.get("dtype") for row in [*memory, *timed] if _ours(row)}) > 1
    machine = kept[0].machine
    gpu = machine.get("gpu") if _on_gpu(kept[0]) else None
    versions = {dumps(r.versions, sort_keys=True): r.versions for r in kept}
    times = sorted(r.taken for r in kept)
    return Evidence(
        gpu or f"{machine.get('cpu') or 'unnamed machine'}, {machine.get('cores')} cores",
        machine,
        tuple({**row, "series": series(row, several)} for row in memory),
        tuple({**row, "series": series(row, several)} for row in timed),
        tuple(absent),
        tuple(versions.values()),
        tuple(dict.fromkeys(r.revision for r in kept if r.revision)),
        (times[0], times[-1]),
    )


NAMES = {"memory": ("model",), "speed": ("model", "engine")}
NUMBERS = {
    "memory": (
        *("length", "rows", "weight_bytes", "kv_bytes", "state_bytes", "conv_bytes", "predicted_bytes"),
        *("predicted_peak_bytes", "growth_bytes_per_token"),
    ),
    "speed": ("rows", "prompt", "ttft_s", "itl_s"),
}
TRAINED = ("size", "score", "chance", "held_bytes", "params")  # of a family on a probe
PLACED = {"repeat": ("first_reading",), "positions": ("first", "last")}
PROBED = ("bpb", "cloze", *PLACED, *PROBES)  # what a report tells of a checkpoint


def _check(record: Record) -> None:
    """Raises ValueError for a record whose rows, by another's hand, lack what is told of them."""
    for row in record.rows:
        names, numbers = _wanted(record.bench, row)
        wrong = [key for key in names if not isinstance(row.get(key), str)]
        wrong += [key for key in numbers if not _number(row.get(key))]
        wrong += [
            key for key in ("low", "high") if names and row.get(key) is not None and not _number(row[key])
        ]
        if wrong:
            said = (
                f"a row of bench {record.bench}, taken {record.taken}, does not tell its {', '.join(wrong)}"
            )
            command = "quality" if record.bench == "quality" else f"bench {record.bench}"
            raise ValueError(f"{said}: files that `constate {command} --out` wrote are wanted")


def _wanted(bench: str, row: Row) -> tuple[Sequence[str], Sequence[str]]:
    """The keys of text and of numbers that a row is read by; none of what no report tells."""
    if bench in NAMES:
        return NAMES[bench], () if row.get("error") else NUMBERS[bench]
    if bench == "quality" and "family" in row:
        return ("probe", "setting", "family"), (
            *TRAINED,
            *(["seed"] if row.get("seed", "") is not None else []),
        )
    if bench != "quality" or row.get("probe") not in PROBED:
        return (), ()
    if "score" in row and row["score"] is None:  # it was no number
        return ("probe", "model"), ()
    if row["probe"] == "bpb" and of_book(row):
        return ("probe", "model"), ("score",)
    return ("probe", "model", "setting"), ("score", "chance", *PLACED.get(row["probe"], ()))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def series(row: Row, several: bool) -> str:
    """What a row's points are called in charts: the model, and what else sets it apart."""
    dtype = [str(row.get("dtype"))] if several else []
    engine = [] if _ours(row) else [str(row["engine"])]
    return " · ".join([str(row["model"]), *dtype, *engine])


def _ours(row: Row) -> bool:
    return row.get("engine", "constate") == "constate"


def _point(record: Record) -> Row | None:
    """The settings that make a point of `bench memory`; None where they are of another version."""
    names = [f.name for f in fields(Point)]
    return {k: record.settings[k] for k in names} if all(k in record.settings for k in names) else None


def _on_gpu(record: Record) -> bool:
    return any(str(row.get("device")).startswith("cuda") for row in record.rows)


def _relabelled(one: Evidence, number: int) -> Evidence:
    return replace(one, label=f"{one.label} ({number})")

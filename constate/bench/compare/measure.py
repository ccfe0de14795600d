"""What a comparison measures where no results are given: memory and speed of every model, and its score.

Points are the benches' own, and each is kept as soon as it is there, so that a run that was interrupted goes
on. Knows which points a workload asks for; the benches know how they are measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...loading import load, locate
from ..executor import check as runs
from ..memory import memory, points
from ..outlook import TooLarge, paper_of, refuse
from ..peak import NEW, Point
from ..peers import check as known
from ..quality.bpb import bpb
from ..quality.sheet import stamped
from ..quality.shipped import scores
from ..quality.texts import BOOK
from ..results import Results, plain
from ..shapes import SHAPES
from ..timings import Timing, timings
from .evidence import Row, of_book
from .workload import Workload

STEPS = 16  # timed after each prompt, of which the workload may want more: a step's time changes slowly
ROUNDS = 3
NORMAL = 1.96  # standard errors on both sides of 95 in 100 estimates
TITLE = "Northanger Abbey"  # as training/run.py calls BOOK in quality.json


@dataclass(frozen=True)
class Sweep:
    """`models` by name (a shape's too). Memory with one sequence at every one of `lengths`; speed with one
    sequence after each of `prompts`, and with each of `rows` after the workload's prompt, the peers `against`
    in turn; both at the workload itself. `load` holds the options of constate.load. `score`: bits a byte are
    measured even where they come with the checkpoint."""

    models: tuple[str, ...]
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)
    prompts: tuple[int, ...] = (256, 1024, 4096)
    rows: tuple[int, ...] = (1, 4, 16)
    load: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    score: bool = False
    against: tuple[str, ...] = ()
    executor: str = "local"


def measure(
    sweep: Sweep, workload: Workload, results: Results, remark: Callable[[str], None]
) -> Iterator[tuple[int, int, str]]:
    """Measure whatever is not yet in `results`. Yields (done, of how many, what was done). `remark` is told
    of what is left out and why. Raises ValueError, before anything is measured, for a peer or an executor
    that is not known, a device that is not here, and a model that does not load."""
    runs(sweep.executor)
    known(sweep.against)
    weighed = [point for point in memory_points(sweep, workload) if _fits(point, remark)]
    timed = [point for name in sweep.models for point in speed_points(name, sweep, workload)]
    total, done = len(weighed) + len(timed) + len(sweep.models), 0
    yield 0, total, ""
    for row in memory(weighed, results, executor=sweep.executor):
        done += 1
        yield done, total, f"memory of {row['model']}"
    for rows in timings(timed, results, executor=sweep.executor):
        done += 1
        yield done, total, f"speed of {rows[0]['model']}"
    for name in sweep.models:
        _score(name, sweep, results, remark)
        done += 1
        yield done, total, f"bits a byte of {name}"


def memory_points(sweep: Sweep, workload: Workload) -> list[Point]:
    """One sequence at every length, and the workload's at its end (the bench writes NEW tokens after what a
    model reads, unless it fills places)."""
    asked = {"threads": sweep.threads, **sweep.load}
    made = points(sweep.models, sweep.lengths, [1], **asked)
    for name in sweep.models:
        written = NEW if paper_of(name, sweep.load).causal else 0
        made += points([name], [max(1, workload.tokens - written)], [workload.concurrency], **asked)
    return made


def _fits(point: Point, remark: Callable[[str], None]) -> bool:
    try:
        refuse(point)
    except TooLarge as error:
        remark(f"left out: {error}")
        return False
    return True


def speed_points(name: str, sweep: Sweep, workload: Workload) -> list[Timing]:
    """One sequence after each prompt, and after the workload's with each number of them. A model that fills
    places in any order is timed at the workload alone, with one sequence and with all, in one round: what a
    token costs it depends on how many are asked for, and it is slow."""
    ours = [(workload.prompt, rows) for rows in sorted({*sweep.rows, 1, workload.concurrency})]
    causal = paper_of(name, sweep.load).causal
    if causal:
        asked = [(prompt, 1) for prompt in sorted({*sweep.prompts} - {workload.prompt})] + ours
        new, rounds = min(workload.new, STEPS), ROUNDS
    else:
        asked = [(prompt, rows) for prompt, rows in ours if rows in (1, workload.concurrency)]
        new, rounds = workload.new, 1
    given: dict[str, Any] = {"threads": sweep.threads, "load": dict(sweep.load)}
    if causal:
        given["against"] = sweep.against
    return [Timing(name, prompt, new, rows, rounds, **given) for prompt, rows in asked]


def _score(name: str, sweep: Sweep, results: Results, remark: Callable[[str], None]) -> None:
    if name in SHAPES:
        return
    settings: dict[str, Any] = {"probe": "bpb", "model": name}
    ships, book = {"source": "scores that ship"}, []
    if told := scores(name):
        book = [row for row in told if row["probe"] == "bpb" and of_book(row)]
        _keep({**settings, "probe": "all", **ships}, [row for row in told if row not in book], results)
    shipped = None if sweep.score else shipped_score(name)
    if sweep.score:
        settings |= {"source": "measured", "load": dict(sweep.load), **stamped(model=name)}
        if results.done("quality", settings) is None:
            try:
                results.add("quality", settings, [bpb(load(name, **sweep.load), name)])
            except ValueError as error:
                remark(f"no score: {error}")
    elif shipped is not None:
        _keep(settings | {"source": "quality.json beside the checkpoint"}, [shipped], results)
    elif book:
        _keep(settings | ships, book, results)


def _keep(settings: Mapping[str, Any], rows: Sequence[Row], results: Results) -> None:
    """What was read and not measured, once, and again where it has changed since: a newer record stands."""
    kept = results.done("quality", settings)
    if kept is None or list(kept.rows) != [plain(row) for row in rows]:
        results.add("quality", settings, rows)


def shipped_score(name: str) -> Row | None:
    """The row of `constate quality bpb` that quality.json beside a checkpoint tells; None where there is
    none on that book. It was measured in float32 when training ended, wherever that was."""
    file = locate(name) / "quality.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = told.get("held_out", {}).get(TITLE)
    if found is None:
        return None
    bound = "bits_per_byte_bound" in found
    score, error = found["bits_per_byte_bound" if bound else "bits_per_byte"], found.get("standard_error")
    return {
        "probe": "bpb",
        "model": name,
        "seed": None,
        "setting": f"{BOOK}, windows of {told['window']} tokens, as scored when its training ended",
        "score": score,
        "n": found["bytes"],
        "low": score - NORMAL * error if error else None,
        "high": score + NORMAL * error if error else None,
        "bound": bound,
        "params": told["params"],
        "dtype": "float32",
    }

"""Memory against length: what a model holds on paper beside what a process really took.

The method. Each point runs in a process of its own, forked from one that has computed nothing (forks.py),
because memory that an earlier point touched is never quite given back. The child loads the model, reads and
writes a little (threads, buffers, whatever is tuned or compiled on first use), hands free memory back to the
system and notes its resident size; it resets the kernel's high-water mark (/proc/self/clear_refs), reads a
prompt of `length` tokens, in pieces as generation does or in one call, writes NEW tokens, notes what is
resident then, with the sequences still alive, and the mark. Rise and weights together are comparable with the
prediction; the peak less what is held is activations and workspace.

A CPU's point is run twice. In the first child glibc returns every large block at once (ALLOCATOR), so that
what is counted is memory in use; in the second it has its defaults, and the difference is what the allocator
keeps for later (`reserved_peak_bytes`). On CUDA PyTorch's own marks, allocated and reserved, are read in one
child. Where the system cannot reset the mark it is the peak since the process began, and `method` says so.

The prediction is of an outline of the model, made from its config anew, and of the rule in workspace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .executor import Done, in_order
from .executor import points as spread
from .forks import Forks
from .memory_rows import row
from .outlook import filled, paper_of, refuse, too_long
from .peak import NEW, PLACES, WARM, Point
from .results import Results

PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait do not spin: nothing is timed here
ALLOCATOR = {
    **PATIENT,
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",  # not one a thread, of which each keeps a little
}
WAYS = ("pieces", "one-shot")
FILLS = ("auto", "never", "always")


def points(
    models: Sequence[str],
    lengths: Sequence[int],
    rows: Sequence[int] = (1,),
    ways: Sequence[str] = ("pieces",),
    *,
    fill: str = "auto",
    threads: int | None = None,
    **load: str | None,
) -> list[Point]:
    """What `memory` is to measure, model by model: each number of rows and way at every length. `load` has
    the options of constate.load. `fill`: with "auto" keys and values are filled in, instead of computed, for
    all but the last piece of a prompt whose attention is LONG; "always" does so for every prompt of more
    than a piece, "never" computes all. Raises ValueError for a count below 1 or a word that is not known."""
    if min(*rows, *lengths) < 1:
        raise ValueError(f"lengths {list(lengths)}, rows {list(rows)}: at least 1 each")
    if unknown := [way for way in ways or ("",) if way not in WAYS]:
        raise ValueError(f"prefill {unknown[0]!r} is not known; known are {', '.join(WAYS)}")
    if fill not in FILLS:
        raise ValueError(f"fill {fill!r} is not known; known are {', '.join(FILLS)}")
    given = {key: value for key, value in load.items() if value is not None}
    made = []
    for name in models:
        usual = paper_of(name, given).causal
        for way in ways if usual else ("one-shot",):
            for count in rows:
                for length in lengths:
                    point = Point(name, length, count, way, 0, threads, given)
                    made.append(replace(point, filled=filled(point, fill)))
    return made


def memory(
    wanted: Sequence[Point],
    results: Results | None = None,
    *,
    executor: str = "local",
    lift: bool = False,
    done: Callable[[Point], None] = lambda point: None,
) -> Iterator[dict[str, Any]]:
    """A row for each point, in their order, with the keys of `bench memory`; see memory_rows.row.

    Points that `results` has are not measured again, and each new one is kept there before the next is
    begun. `done` is told of every point. A point whose attention is too long to compute in one call is left
    out, and its row says so, unless `lift`. Raises ValueError before anything is measured where memory would
    not suffice, with the largest length that fits, and later where a process failed.
    """
    results = Results() if results is None else results
    if executor == "local":  # another machine has its own memory, and refuses there
        for point in wanted:
            refuse(point)
    kept = [results.done("memory", _settings(point), anywhere=executor != "local") for point in wanted]
    todo = [i for i, record in enumerate(kept) if record is None and (lift or not too_long(wanted[i]))]
    fresh = _measured([wanted[i] for i in todo], results, executor)
    before: dict[Any, dict[str, Any]] = {}
    for i, point in enumerate(wanted):
        record = kept[i]
        if record is not None:
            found = dict(record.rows[0])
        elif i in todo:
            found = next(fresh)
        else:
            found = row(point, None)
        done(point)
        last = before.get((point.name, point.rows, point.way))
        before[point.name, point.rows, point.way] = found
        yield found | {"measured_growth_bytes_per_token": _slope(last, found)}


def measure(point: Point, plain: Forks | None = None, tuned: Forks | None = None) -> dict[str, Any]:
    """One point's row, measured by children of these servers, or of own ones. Raises ValueError."""
    refuse(point)
    if plain is None or tuned is None:
        with Forks(**PATIENT) as plain, Forks(**ALLOCATOR) as tuned:
            return measure(point, plain, tuned)
    if str(point.load.get("device", "cpu")).startswith("cuda"):
        return row(point, plain(point))
    used = tuned(point)
    return row(point, used | {"reserved": plain(point)["peak"]})


def _settings(point: Point) -> dict[str, Any]:
    """All that a point's result depends on."""
    writes = paper_of(point.name, point.load).causal  # others fill the last places of the row itself
    return {**asdict(point), "new": NEW if writes else 0, "places": PLACES, "warm": WARM}


def _measured(wanted: Sequence[Point], results: Results, executor: str) -> Iterator[dict[str, Any]]:
    """The rows of these points, in order, each kept as soon as there is one."""

    def kept(work: Callable[[Point], dict[str, Any]]) -> Iterator[Done[dict[str, Any]]]:
        cards = any(str(point.load.get("device", "cpu")).startswith("cuda") for point in wanted)
        for one in spread(work, wanted, executor, gpus=int(cards)):
            results.add("memory", _settings(wanted[one.index]), [one.result], one.place)
            yield one

    if executor == "local":
        with Forks(**PATIENT) as plain, Forks(**ALLOCATOR) as tuned:
            yield from (one.result for one in kept(lambda point: measure(point, plain, tuned)))
    else:
        yield from (one.result for one in in_order(kept(measure)))


def _slope(last: Mapping[str, Any] | None, found: Mapping[str, Any]) -> float | None:
    """Bytes that a row was measured to hold more for each token more than at the point before."""
    if last is None or None in (last["measured_held_bytes"], found["measured_held_bytes"]):
        return None
    longer = (found["length"] - last["length"]) * found["rows"]
    return (found["measured_held_bytes"] - last["measured_held_bytes"]) / longer if longer else None

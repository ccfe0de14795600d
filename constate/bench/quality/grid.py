"""What is trained to compare families, and the training of all of it, several side by side.

Every run is one lesson: a family, a probe, a size of state, a seed. A run takes a minute at most and is kept
whole, so that an interrupted grid goes on behind the last run that ended. Knows lessons and results; not
what came out (findings.py) and nothing of pictures (figures.py).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ..results import Record, Results
from .families import FULL, layers
from .probes import PROBES, Probe, probe

SIZES = (4, 16, 64)
SEEDS = (0, 1, 2)
STEPS: Mapping[str, int] = {"recall": 600, "copy": 500, "parity": 400, "s3": 600, "passkey": 300}
ROWS = 32
BEYOND = {"parity": 4, "s3": 4, "copy": 2}  # times the length of training that is asked for too
TAIL = 0.25  # of an episode's answers, where the product so far is asked

RECALL = ("attention", "window", "linear", "mamba2", "delta_net", "gated_deltanet", "hybrid")
COPY = ("attention", "linear", "mamba2", "gated_deltanet", "hybrid")
PARITY = (
    *("attention", "linear", "mamba2", "delta_net", "gated_deltanet"),
    *("delta_net_negative", "gated_deltanet_negative"),
)
STATELESS = ("attention",)  # whatever the size: all that was read is kept


@dataclass(frozen=True)
class Run:
    """One training: `settings` are the probe's where they are not its defaults."""

    family: str
    probe: str
    size: int
    seed: int
    steps: int
    settings: Mapping[str, int]

    @property
    def weight(self) -> float:
        """About how long it takes, in any unit: for a progress bar."""
        asked = self.lesson
        return self.steps * asked.draw(1, 0).tokens.shape[1]

    @property
    def lesson(self) -> Probe:
        return probe(self.probe, **self.settings)


def default(seeds: Sequence[int] = SEEDS) -> list[Run]:
    """The grid that ships: recall at three sizes of state, copying at two, parity at one."""
    runs = _crossed("recall", RECALL, SIZES, seeds)
    runs += _crossed("copy", COPY, SIZES[:2], seeds)
    return runs + _crossed("parity", PARITY, SIZES[1:2], seeds)


def full(seeds: Sequence[int] = SEEDS) -> list[Run]:
    """Every family on every probe that tells them apart, with how many layers are attention among them."""
    runs = _crossed("recall", tuple(FULL), SIZES, seeds) + _crossed("copy", tuple(FULL), SIZES, seeds)
    runs += _crossed("passkey", tuple(FULL), SIZES[1:2], seeds)
    return runs + [run for name in ("parity", "s3") for run in _crossed(name, tuple(FULL), SIZES[1:2], seeds)]


def smoke() -> list[Run]:
    """The least that shows a separation: attention recalls what a small linear state cannot hold."""
    few = {"pairs": 8, "vocab": 64}
    return [Run(family, "recall", 2, 0, 300, few) for family in ("attention", "linear")]


def train(
    runs: Sequence[Run], results: Results, *, jobs: int = 2, executor: str = "local"
) -> Iterator[tuple[Run, Record]]:
    """Every run that `results` does not hold is trained, `jobs` at a time in processes of one thread each, or
    as tasks of a Ray cluster, and kept; all are yielded, kept ones first. A run that fails ends the grid."""
    told = [(run, _settings(run)) for run in runs]
    missing = []
    for run, settings in told:
        if (kept := results.done("quality", settings)) is not None:
            yield run, kept
        else:
            missing.append((run, settings))
    for i, rows, place in _trained([run for run, _ in missing], jobs, executor):
        run, settings = missing[i]
        yield run, results.add("quality", settings, rows, place)


def score(run: Run) -> list[dict[str, Any]]:
    """Train one model and ask it: a row at the length of training, and one beyond where there is such a
    thing. Rows add `family`, `size`, `steps` and the bytes that a sequence holds, `held_bytes`."""
    import torch

    from .asking import ask
    from .teaching import Lesson, teach

    torch.set_num_threads(1)
    lesson = run.lesson
    until_solved = run.probe not in BEYOND
    taught = Lesson(run.family, lesson, run.size, run.steps, run.seed, ROWS, until_solved)
    steps, _, model = list(teach(taught))[-1]
    asked, tail = [lesson], TAIL if run.probe in ("parity", "s3") else 1.0
    if run.probe in BEYOND:
        asked.append(lesson.longer(BEYOND[run.probe]))
    rows = [ask(model, run.family, each, seed=run.seed, tail=tail) for each in asked]
    for row in rows:
        row |= {"family": run.family, "size": run.size, "steps": steps, "trained_on": lesson.setting}
        row["held_bytes"] = row["state_bytes"] + row["conv_bytes"] + row["kv_bytes"]
    return rows


def _crossed(name: str, families: Sequence[str], sizes: Sequence[int], seeds: Sequence[int]) -> list[Run]:
    assert name in PROBES
    return [
        Run(family, name, size, seed, STEPS[name], {})
        for size in sizes
        for family in families
        for seed in seeds
        if family not in STATELESS or size == sizes[0]
    ]


def _settings(run: Run) -> dict[str, Any]:
    """What makes two runs the same: a family is its layers, whatever its name."""
    return {**asdict(run), "settings": dict(run.settings), "rows": ROWS, "layers": list(layers(run.family))}


def _trained(
    runs: Sequence[Run], jobs: int, executor: str
) -> Iterator[tuple[int, list[dict[str, Any]], Mapping[str, Any] | None]]:
    """(which run, its rows, where), as they end."""
    if executor != "local":
        from ..executor import points

        yield from ((done.index, done.result, done.place) for done in points(score, runs, executor))
    elif jobs == 1 or len(runs) < 2:
        yield from ((i, score(run), None) for i, run in enumerate(runs))
    else:
        with _processes(jobs) as pool:
            waiting = {pool.submit(score, run): i for i, run in enumerate(runs)}
            yield from ((waiting[done], done.result(), None) for done in as_completed(waiting))


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh ones: a forked child of a process that has computed hangs in its first parallel region. What has
    not begun when the grid ends, or is interrupted, does not begin."""
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def rows(records: Iterable[Record]) -> list[Mapping[str, Any]]:
    """Every row of a trained model among these records."""
    return [row for record in records if record.bench == "quality" for row in record.rows if "family" in row]

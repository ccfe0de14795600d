"""`constate quality`: how well models predict and remember, by probe; and the families compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import (
    Backend,
    BlockSize,
    CacheWay,
    Confidence,
    Device,
    Dtype,
    Executor,
    Json,
    Models,
    Refresh,
    StateDtype,
    Weights,
    count,
    given,
    names,
    targets,
)
from .output import say, show
from .progress import progress

SCORES = ("model", "seed", "setting", "score", "low", "high", "chance", "n", "params", "state_bytes")
FRONTIER = ("model", "setting", "score", "generated_bpb", "distinct_4", "model_calls", "tokens_per_call")
HARNESS = ("model", "task", "metric", "score", "n", "bound")
FINDINGS = ("claim", "holds", "seen", "source")
UNMASKING = "tiny/mdlm"
OTHERS = ("all", "unmasking", "lm-eval", "compare")

Probe = Annotated[
    str,
    typer.Argument(
        help="Of a text: bpb, positions, repeat, cloze, drift (what a state in 16 bits costs). Of ids: "
        "recall, copy, passkey, parity, s3. all: each of these. unmasking: what fewer calls cost a masked "
        "diffusion model. lm-eval: the harness's own evaluation. compare: train every family on the probes."
    ),
]
Seeds = Annotated[
    int | None, typer.Option(parser=count, metavar="N", help="Draws of episodes, or trainings.")
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=N", help="A probe's setting, such as pairs=8; repeat for several."),
]
Rows = Annotated[
    int | None,
    typer.Option(parser=count, metavar="N", help="unmasking: texts to write; 16 times as many gaps."),
]
New = Annotated[
    int | None, typer.Option("--new", parser=count, metavar="N", help="unmasking: tokens a text.")
]
Text = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="northanger_abbey (no model here has read it), shakespeare, or a file."
    ),
]
Tasks = Annotated[str | None, typer.Option(metavar="T,T", help="lm-eval: which of the shipped tasks.")]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="compare: a folder for results.jsonl, charts and the table. A probe, or all: a results file; "
        "interrupted, the same command goes on from it.",
    ),
]
Grid = Annotated[
    str | None,
    typer.Option(help="compare: smoke (two minutes), default, or full (more families and probes)."),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="compare: trainings side by side.")]


def quality(
    probe: Probe,
    model: Models = None,
    text: Text = None,
    seeds: Seeds = None,
    settings: Setting = None,
    rows: Rows = None,
    new: New = None,
    block: BlockSize = None,
    confidence: Confidence = None,
    cache: CacheWay = None,
    refresh: Refresh = None,
    tasks: Tasks = None,
    out: Out = None,
    grid: Grid = None,
    jobs: Jobs = None,
    executor: Executor = "local",
    dtype: Dtype = "float32",
    weights: Weights = None,
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> int:
    """Score models on a probe; or train every family on the probes and compare them."""
    from ..bench.quality.asked import NAMES, READING

    if probe not in (*NAMES, *OTHERS):
        raise ValueError(f"probe {probe!r} is not known; known are {', '.join((*NAMES, *OTHERS))}")
    denoising = given(rows=rows, new=new, block=block, confidence=confidence, cache=cache, refresh=refresh)
    _only(probe, {"unmasking"}, **denoising)
    _only(probe, {"lm-eval"}, tasks=tasks)
    _only(probe, {"compare"}, grid=grid, jobs=jobs)
    _only(probe, {*NAMES, "all", "compare"}, out=out)
    _only(probe, {*NAMES, "all", "compare"} - {"bpb", "positions", "repeat", "drift"}, seeds=seeds)
    _only(probe, {*NAMES}, set=settings)
    _only(probe, {*READING, "all", "unmasking"}, text=text)
    load = given(dtype=dtype, weights=weights, state_dtype=state_dtype, device=device, backend=backend)
    if seeds == 0:
        raise ValueError("--seeds 0: at least 1 is wanted")
    if probe == "compare":
        return _compare(out or Path("quality"), grid or "default", seeds or 3, jobs or 2, executor, as_json)
    if probe == "unmasking":
        show(
            _unmasking(model or [UNMASKING], text, load, denoising),
            as_json,
            FRONTIER,
            "score: infill accuracy; the seconds and calls are for the texts",
        )
    elif probe == "lm-eval":
        from ..bench.quality.lmeval import TASKS, evaluate

        wanted = names(tasks) or TASKS
        found = (row for name, _ in targets(model, None) for row in evaluate(name, wanted, **load))
        show(found, as_json, HARNESS)
    else:
        models = [name for name, _ in targets(model, None)]
        show(_scores(out, models, probe, seeds or 1, text, _read(settings), load), as_json, SCORES)
    return 0


def _scores(out: Path | None, *asked: Any) -> Iterator[Mapping[str, Any]]:
    from ..bench.quality.sheet import Sheet, scored
    from ..bench.results import Results

    sheet, results = Sheet(*asked), Results(out)
    done = 0
    try:
        with progress("asking", sheet.total) as advance:
            for label, rows in scored(sheet, results, lambda text: say(f"constate: {text}")):
                yield from rows
                advance(1, label)
                done += bool(rows)
    except KeyboardInterrupt:
        kept = (
            f"are in {out}, and the same command goes on from there"
            if out
            else "were asked, and none is kept"
        )
        say(f"constate: interrupted: {done} of {sheet.total} questions {kept}")
        raise


def _unmasking(
    model: list[str], text: str | None, load: dict[str, Any], asked: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    from ..bench.quality.unmasking import JUDGE, unmasking
    from ..loading import load as loaded

    judge = loaded(JUDGE, **load)
    for name in model:
        yield from unmasking(loaded(name, **load), name, judge, text=text, **asked)


def _compare(out: Path, which: str, seeds: int, jobs: int, executor: str, as_json: bool) -> int:
    """Trains what `out`/results.jsonl does not hold; prints the findings, or with --json every row."""
    from ..bench.quality import grid
    from ..bench.quality.report import RESULTS, report
    from ..bench.results import Results

    known = {"smoke": grid.smoke, "default": grid.default, "full": grid.full}
    if which not in known:
        raise ValueError(f"--grid {which!r} is not known; known are {', '.join(known)}")
    runs = known[which]() if which == "smoke" else known[which](range(seeds))
    results, records = Results(out / RESULTS), []
    try:
        with progress("training", sum(run.weight for run in runs)) as advance:
            for run, record in grid.train(runs, results, jobs=jobs, executor=executor):
                records.append(record)
                advance(run.weight, f"{run.family} on {run.probe}")
                if as_json:
                    show(record.rows, True, SCORES)
    except KeyboardInterrupt:
        say(
            f"constate: interrupted: {len(records)} of {len(runs)} trainings are in {out / RESULTS}, and the "
            "same command goes on from there"
        )
        return 130
    done = report(records, out)
    if not as_json:
        show([vars(finding) for finding in done.findings], False, FINDINGS)
    say(f"wrote {', '.join(str(path) for path in done.files)}")
    return 0 if all(finding.holds is not False for finding in done.findings) else 1


def _only(probe: str, probes: set[str], **options: Any) -> None:
    """Raises ValueError for an option that was given and that this probe does not heed."""
    if (asked := given(**options)) and probe not in probes:
        those = f"the probe{'s' * (len(probes) > 1)} {', '.join(sorted(probes))}"
        raise ValueError(f"--{next(iter(asked))} is for {those}; this one is {probe}")


def _read(settings: list[str] | None) -> dict[str, int]:
    """NAME=N, each once."""
    found: dict[str, int] = {}
    for told in settings or ():
        name, equals, value = told.partition("=")
        if not equals or not re.fullmatch(r"-?[0-9]{1,9}", value.strip()):
            raise ValueError(
                f"--set {told}: a name, = and a whole number below a billion are wanted, as in pairs=8"
            )
        if name.strip() in found:
            raise ValueError(f"--set {told}: {name.strip()} is {found[name.strip()]} already; once is enough")
        found[name.strip()] = int(value)
    return found

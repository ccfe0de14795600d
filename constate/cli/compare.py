"""`constate compare`: memory, speed and quality of several models for a workload, as one report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    Backend,
    Device,
    Dtype,
    Executor,
    Json,
    Models,
    Shapes,
    StateDtype,
    Threads,
    Weights,
    count,
    counts,
    given,
    names,
    nbytes,
    targets,
)
from .output import say, show
from .progress import progress

if TYPE_CHECKING:
    from ..bench.compare.workload import Workload
    from ..bench.results import Record

# Of the zoo those that write one token after another: they differ in their mixers alone.
MODELS = ["tiny/transformer", "tiny/hybrid", "tiny/mamba", "tiny/mamba2", "tiny/gla", "tiny/gated_deltanet"]
STANDING = (
    *(
        "model",
        "weight_bytes",
        "held_bytes",
        "predicted_peak_bytes",
        "measured_peak_bytes",
        "sequences",
        "fits",
    ),
    *("ttft_s", "itl_s", "workload_s", "workload_tokens_per_s", "bits_per_byte"),
)

Prompt = Annotated[int, typer.Option(parser=count, metavar="N", help="The workload: tokens of each prompt.")]
New = Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens written after each.")]
Concurrency = Annotated[int, typer.Option(parser=count, metavar="N", help="Sequences at once.")]
Limit = Annotated[
    int | None,
    typer.Option(
        "--memory-limit",
        parser=nbytes,
        metavar="SIZE",
        help="Such as 2GiB or 80GB; all there is, by default.",
    ),
]
Lengths = Annotated[str, typer.Option(metavar="N,N,...", help="Memory is measured at these lengths too.")]
Prompts = Annotated[str, typer.Option(metavar="N,N,...", help="Speed is measured after these prompts too.")]
Rows = Annotated[str, typer.Option(metavar="N,N,...", help="And with so many sequences at once.")]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "--results",
        metavar="FILE",
        help="Measure nothing and read what `bench memory`, `bench speed` or compare kept; repeat to set "
        "several machines side by side.",
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="A folder for report.html, PNGs and results.jsonl.")]
Against = Annotated[
    str | None, typer.Option(metavar="PEER,PEER", help="Peers to time beside them, as for `bench speed`.")
]
Score = Annotated[
    bool, typer.Option("--score", help="Measure bits a byte, even where they come with the checkpoint.")
]


def compare(
    context: typer.Context,
    model: Models = None,
    shape: Shapes = None,
    prompt: Prompt = 1024,
    new: New = 256,
    concurrency: Concurrency = 8,
    memory_limit: Limit = None,
    lengths: Lengths = "256,1k,4k,16k,64k",
    prompts: Prompts = "256,1k,4k",
    rows: Rows = "1,4,16",
    results: Files = None,
    out: Out = Path("compare"),
    score: Score = False,
    against: Against = None,
    executor: Executor = "local",
    threads: Threads = None,
    dtype: Dtype = "float32",
    weights: Weights = None,
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """What each model costs and what it is worth, for a workload: a page with charts, findings and data.

    Without --model it compares the six models of the zoo that write one token after another. What was
    measured is kept in DIR/results.jsonl at once, so that the same command goes on after an interruption.
    """
    from ..bench.compare.report import REMEMBERED, RESULTS, report
    from ..bench.compare.workload import Workload
    from ..bench.shapes import known

    workload = Workload(prompt, new, concurrency, memory_limit)
    asked = targets(model, shape) if model or shape else []
    wanted = [known(name) if is_shape else name for name, is_shape in asked]
    if results:
        records = _joined(results, out / RESULTS, wanted)
    else:
        load = given(dtype=dtype, weights=weights, state_dtype=state_dtype, device=device, backend=backend)
        sweep: dict[str, Any] = {
            "models": tuple(wanted or MODELS),
            "lengths": tuple(counts(lengths)),
            "prompts": tuple(counts(prompts)),
            "rows": tuple(counts(rows)),
            "load": load,
            "threads": threads,
            "score": score,
            "against": tuple(names(against)),
            "executor": executor,
        }
        records, wanted = _measured(sweep, workload, out / RESULTS), list(sweep["models"])
    done = report(records, workload, out, [_spelled(context)], wanted)
    if not as_json:
        for heading, sentences in {**done.said, REMEMBERED: done.remembered}.items():
            print(f"{heading}\n", *(f"- {sentence}" for sentence in sentences), "", sep="\n")
    show(done.rows, as_json, STANDING if len(done.said) == 1 else ("machine", *STANDING))
    say(f"wrote {', '.join(str(path) for path in done.files)}")


def _measured(sweep: dict[str, Any], workload: Workload, file: Path) -> list[Record]:
    from ..bench.compare.measure import Sweep, measure
    from ..bench.results import Results

    kept = Results(file)
    steps = measure(Sweep(**sweep), workload, kept, lambda text: say(f"constate: {text}"))
    before, total, _ = next(steps)
    try:
        with progress("measuring", total) as advance:
            for done, _, what in steps:
                advance(done - before, what)
                before = done
    except KeyboardInterrupt:
        say(f"interrupted: {file} keeps {len(kept.records)} points, and the same command goes on from there")
        raise
    return kept.records


def _joined(files: list[str], file: Path, models: list[str]) -> list[Record]:
    """The records of all files, written to `file` too. Raises ValueError where that would lose others, or
    where nothing is told of these models."""
    from ..bench.compare.report import evidence_of
    from ..bench.results import read

    records = read(*files)
    if file.exists() and file.resolve() not in {Path(name).expanduser().resolve() for name in files}:
        raise ValueError(f"{file} is there already: name it with --results too, or another folder with --out")
    evidence_of(records, models)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(record.line() for record in records), encoding="utf-8")
    return records


def _spelled(context: typer.Context) -> str:
    """The command line that asks the same: every option that was given."""
    words = ["constate", "compare"]
    for option in context.command.params:
        value = context.params.get(str(option.name))
        if value in (None, False, option.default) or option.name == "as_json":
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [option.opts[-1]] + ([] if value is True else [str(each)])
    return shlex.join(words)

"""`constate bench speed`: time to first token, time per token and throughput, beside peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from ..options import (
    Backend,
    BlockSize,
    CacheWay,
    Device,
    Dtype,
    Executor,
    Json,
    Models,
    Out,
    Policy,
    Refresh,
    Shapes,
    StateDtype,
    Steps,
    Threads,
    Weights,
    count,
    counts,
    given,
    names,
    targets,
)
from ..output import say, show, table
from ..progress import progress
from .common import Rows

SPEED = (
    *("model", "engine", "rows", "prompt", "ttft_s", "itl_s", "itl_p90_s", "prefill_tokens_per_s"),
    *("decode_tokens_per_s", "bandwidth_fraction", "flops_fraction", "prefill_ratio", "decode_ratio"),
    *("spread", "dtype"),
)
ABSENT = ("model", "engine", "error", "install")
DECIDING = ("tokens_per_call", "between_commits_s", "decoding")  # of models that fill places in any order

Prompts = Annotated[str, typer.Option("--prompt", metavar="N,N,...", help="Tokens of prompt a row.")]
New = Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens written after it.")]
Rounds = Annotated[int, typer.Option(parser=count, metavar="N", help="Turns that each engine takes.")]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="PEER,PEER",
        help="Peers with the same weights: transformers, llama.cpp; on a GPU also fla, mamba_ssm, vllm.",
    ),
]
Formats = Annotated[
    str | None,
    typer.Option(
        metavar="F,F",
        help="Measure each of float32, bfloat16, int8 in turn, in place of --dtype and --weights; peers run "
        "what they run fastest (transformers float32, llama.cpp F32 or, beside int8, Q8_0).",
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Where a peer's logits or greedy tokens are not ours, time nothing.")
]


def speed(
    model: Models = None,
    shape: Shapes = None,
    prompt: Prompts = "512",
    new: New = 20,
    rows: Rows = "1",
    against: Against = None,
    rounds: Rounds = 3,
    check: Check = False,
    out: Out = None,
    executor: Executor = "local",
    threads: Threads = None,
    policy: Policy = None,
    steps: Steps = None,
    block: BlockSize = None,
    cache: CacheWay = None,
    refresh: Refresh = None,
    dtype: Dtype = "float32",
    weights: Weights = None,
    formats: Formats = None,
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> int:
    """Time to first token, time per token and throughput, against peers on the same weights."""
    from ...bench.agreement import Disagreement
    from ...bench.executor import check as runs
    from ...bench.peers import check as known
    from ...bench.results import Results
    from ...bench.shapes import known as known_shape
    from ...bench.timings import Timing, heeds_plan, timings

    runs(executor)
    known(names(against))
    shared: dict[str, Any] = {"state_dtype": state_dtype, "device": device, "backend": backend}
    stored = [_stored(name) for name in names(formats)] or [{"dtype": dtype, "weights": weights}]
    chosen = [known_shape(name) if is_shape else name for name, is_shape in targets(model, shape)]
    plan = given(policy=policy, steps=steps, block=block, cache=cache, refresh=refresh) or None
    wanted = [
        Timing(
            name,
            length,
            new,
            many,
            rounds,
            () if len(chosen) > 1 and heeds_plan(name) else tuple(names(against)),
            check and (how == _stored("float32") or not formats),
            # Beside others a plan is for those that heed one; `decoding` says which. A lone model refuses it.
            plan if len(chosen) == 1 or heeds_plan(name) else None,
            threads,
            {**shared, **how},
        )
        for name in chosen
        for how in stored
        for length in counts(prompt)
        for many in counts(rows)
    ]
    if against and (alone := [point.name for point in wanted if not point.against]):
        say(
            f"constate: beside {', '.join(dict.fromkeys(alone))} no peer is set: it fills places in any order"
        )
    results, stopped = Results(out), False

    def found() -> Iterator[dict[str, Any]]:
        nonlocal stopped
        with progress("speed", len(wanted)) as advance:
            try:
                for each in timings(
                    wanted,
                    results,
                    executor=executor,
                    done=lambda p: advance(1, f"{p.name}, {p.rows} x {p.prompt:,}"),
                ):
                    yield from each
            except KeyboardInterrupt:
                stopped = True

    try:
        shown = show(found(), as_json, ()) if as_json else list(found())
    except Disagreement as error:
        say(f"constate: {error}")
        return 1
    if not as_json:
        columns = SPEED + DECIDING * any(map(heeds_plan, chosen))
        timed = [{**row, "spread": _spread(row)} for row in shown if not row["error"]]
        table(timed, columns, f"new {new}, medians of {rounds} rounds in turn; decode ratio with its spread")
        if absent := {(r["model"], r["engine"]): r for r in shown if r["error"]}:
            table(list(absent.values()), ABSENT, "not timed")
    for remark in sorted(set(_remarks(shown))):
        say(f"constate: {remark}")
    if stopped:
        kept = f"; what is measured is in {out}, and the same command goes on from there" if out else ""
        say(f"constate: interrupted{kept}")
        return 130
    return 0


def _stored(name: str) -> dict[str, str | None]:
    """What `load` takes for a format's name."""
    return {"dtype": "float32", "weights": "int8"} if name == "int8" else {"dtype": name, "weights": None}


def _spread(row: dict[str, Any]) -> str | None:
    low, high = row["decode_ratio_low"], row["decode_ratio_high"]
    return None if low is None or low == high else f"{low:.2f} to {high:.2f}"


def _remarks(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What is to be said of rows in the order in which they were measured: peers behind ours."""
    ours = None
    for row in rows:
        ours = row["dtype"] if row["engine"] == "constate" else ours
        yield from (f"{row['model']} is {flag}" for flag in row["flags"])
        share = row["tokens_equal"]
        if share is not None and share < 1:
            chose = f"{row['engine']} in {row['dtype']} chose {share:.0%} of the tokens"
            yield f"of {row['model']} {chose} that we chose in {ours}"

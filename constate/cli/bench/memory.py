"""`constate bench memory`: bytes against length, each point in a fresh process, beside its prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ..options import (
    Backend,
    Device,
    Dtype,
    Executor,
    Json,
    Models,
    Out,
    Shapes,
    StateDtype,
    Threads,
    Weights,
    counts,
    given,
    names,
    targets,
)
from ..output import say, show, table
from ..progress import progress
from .common import Rows

MEMORY = (
    *("model", "length", "rows", "weight_bytes", "kv_bytes", "state_bytes", "conv_bytes"),
    *("predicted_bytes", "measured_held_bytes", "predicted_peak_bytes", "measured_peak_bytes"),
    *("reserved_peak_bytes", "backend", "dtype", "flags"),
)
GROWTH = (
    *("model", "rows", "growth_bytes_per_token", "measured_growth_bytes_per_token"),
    *("length", "sequences_per_gb"),
)

Lengths = Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of prompt a row, such as 1k,16k.")]
Prefill = Annotated[
    str, typer.Option(metavar="WAY,WAY", help="How a prompt is read: pieces (as generation does), one-shot.")
]
Fill = Annotated[
    str,
    typer.Option(
        help="Keys and values filled in place of computed, but for the last piece: auto (of long prompts), "
        "always, never."
    ),
]


def memory(
    model: Models = None,
    shape: Shapes = None,
    lengths: Lengths = "256,1k,4k,16k,64k",
    rows: Rows = "1",
    prefill: Prefill = "pieces",
    fill: Fill = "auto",
    out: Out = None,
    executor: Executor = "local",
    threads: Threads = None,
    dtype: Dtype = "float32",
    weights: Weights = None,
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> int:
    """Memory against length, each point measured in a fresh process, beside its prediction. Without --model
    and --shape: every model that ships here."""
    from ...bench.growth import crossings, growth, sentences
    from ...bench.memory import memory as measure
    from ...bench.memory import points
    from ...bench.outlook import effort
    from ...bench.results import Results
    from ...bench.shapes import known
    from ...loading import checkpoints

    asked = targets(model, shape) if model or shape else [(name, False) for name in checkpoints()]
    chosen = [known(name) if is_shape else name for name, is_shape in asked]
    load = given(dtype=dtype, weights=weights, state_dtype=state_dtype, device=device, backend=backend)
    wanted = points(chosen, counts(lengths), counts(rows), names(prefill), fill=fill, threads=threads, **load)
    results, stopped = Results(out), False

    def found() -> Iterator[dict[str, Any]]:
        nonlocal stopped
        with progress("memory", sum(map(effort, wanted))) as advance:
            try:
                yield from measure(
                    wanted,
                    results,
                    executor=executor,
                    lift=fill == "never",
                    done=lambda point: advance(effort(point), f"{point.name} at {point.length:,}"),
                )
            except KeyboardInterrupt:
                stopped = True

    ways = ("prefill",) * (len({point.way for point in wanted}) > 1)  # else all rows read alike
    shown = show(found(), as_json, (*MEMORY[:3], *ways, *MEMORY[3:]))
    if stopped:
        kept = f"; they are in {out}, and the same command goes on from there" if out else ""
        say(f"constate: interrupted: {len(shown)} of {len(wanted)} points are measured{kept}")
        return 130
    if not as_json:
        table(
            growth(shown),
            (*GROWTH[:2], *ways, *GROWTH[2:]),
            "growth of a sequence by its tokens: on paper, and between two points",
        )
        for sentence in sentences(crossings(chosen, load)):
            print(sentence)
    return 0

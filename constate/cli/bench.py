"""`constate bench`: memory and speed, each measured number beside what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    Backend,
    Device,
    Dtype,
    Json,
    Models,
    Shapes,
    StateDtype,
    Threads,
    count,
    counts,
    names,
    targets,
)
from .output import show

if TYPE_CHECKING:
    from ..core.model import Model

app = typer.Typer(help="Measure memory and speed.", no_args_is_help=False)

MEMORY = (
    *("model", "length", "rows", "weight_bytes", "kv_bytes", "state_bytes", "conv_bytes"),
    *("predicted_bytes", "measured_peak_bytes", "peak_above_model_bytes", "backend", "dtype"),
)
SPEED = (
    *("model", "engine", "rows", "ttft_s", "itl_s", "prefill_tokens_per_s", "decode_tokens_per_s"),
    *("bytes_per_token", "bandwidth_fraction", "flops_fraction", "prefill_ratio", "decode_ratio", "dtype"),
)

Lengths = Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of prompt a row, such as 1k,16k.")]
Row = Annotated[int, typer.Option(parser=count, metavar="N", help="Sequences at once.")]
Rows = Annotated[str, typer.Option(metavar="N,N,...", help="Sequences at once.")]
Prompt = Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens of prompt a row.")]
New = Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens written after it.")]
Rounds = Annotated[int, typer.Option(parser=count, metavar="N", help="Turns that each engine takes.")]
Against = Annotated[
    str | None, typer.Option(metavar="PEER,PEER", help="Peers with the same weights: transformers.")
]
Check = Annotated[bool, typer.Option("--check", help="Compare logits and greedy tokens before timing.")]


@app.command()
def memory(
    model: Models = None,
    shape: Shapes = None,
    lengths: Lengths = "1k,4k,16k",
    rows: Row = 1,
    dtype: Dtype = "float32",
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """Memory against length, each point measured in a fresh process, beside its prediction."""
    from ..bench.memory import memory as measure

    wanted = counts(lengths)
    options: dict[str, Any] = {
        "dtype": dtype,
        "state_dtype": state_dtype,
        "device": device,
        "backend": backend,
    }

    def points() -> Iterator[dict[str, Any]]:
        for name, is_shape in targets(model, shape):
            yield from measure(_model(name, is_shape, options), name, wanted, rows, **options)

    show(points(), as_json, MEMORY)


@app.command()
def speed(
    model: Models = None,
    shape: Shapes = None,
    prompt: Prompt = 512,
    new: New = 20,
    rows: Rows = "1",
    against: Against = None,
    rounds: Rounds = 3,
    check: Check = False,
    threads: Threads = None,
    dtype: Dtype = "float32",
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> int:
    """Time to first token, time per token and throughput, against peers on the same weights."""
    import torch

    from ..bench.speed import Disagreement
    from ..bench.speed import speed as measure
    from .output import say

    if threads is not None:
        torch.set_num_threads(threads)
    options: dict[str, Any] = {
        "dtype": dtype,
        "state_dtype": state_dtype,
        "device": device,
        "backend": backend,
    }
    batch, peers = counts(rows), names(against)

    def points() -> Iterator[dict[str, Any]]:
        for name, is_shape in targets(model, shape):
            built = _model(name, is_shape, options)
            yield from measure(
                built, name, prompt=prompt, new=new, rows=batch, against=peers, rounds=rounds, check=check
            )

    try:
        show(points(), as_json, SPEED, f"prompt {prompt}, new {new}, medians of {rounds} rounds in turn")
    except Disagreement as error:
        say(f"constate: {error}")
        return 1
    return 0


def _model(name: str, is_shape: bool, options: dict[str, Any]) -> Model:
    """The model to measure: loaded, or a named shape drawn at random."""
    from ..bench.shapes import random_model
    from ..loading import load

    return random_model(name, **options) if is_shape else load(name, **options)

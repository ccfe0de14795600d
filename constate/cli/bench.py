"""`constate bench`: memory and speed, each measured number beside what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    Backend,
    BlockSize,
    CacheWay,
    Device,
    Dtype,
    Json,
    Models,
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
    *("bytes_per_token", "bandwidth_fraction", "flops_fraction", "prefill_ratio", "decode_ratio"),
    *("tokens_per_call", "between_commits_s", "decoding", "dtype"),
)

Lengths = Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of prompt a row, such as 1k,16k.")]
Row = Annotated[int, typer.Option(parser=count, metavar="N", help="Sequences at once.")]
Rows = Annotated[str, typer.Option(metavar="N,N,...", help="Sequences at once.")]
Prompt = Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens of prompt a row.")]
New = Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens written after it.")]
Rounds = Annotated[int, typer.Option(parser=count, metavar="N", help="Turns that each engine takes.")]
Against = Annotated[
    str | None,
    typer.Option(metavar="PEER,PEER", help="Peers with the same weights: transformers, llama.cpp."),
]
Formats = Annotated[
    str | None,
    typer.Option(
        metavar="F,F",
        help="Measure each of float32, bfloat16, int8 in turn, in place of --dtype and --weights; peers run "
        "what they run fastest (transformers float32, llama.cpp F32 or, beside int8, Q8_0).",
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Compare logits and greedy tokens before timing.")]


@app.command()
def memory(
    model: Models = None,
    shape: Shapes = None,
    lengths: Lengths = "1k,4k,16k",
    rows: Row = 1,
    dtype: Dtype = "float32",
    weights: Weights = None,
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
        "weights": weights,
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
    import torch

    from ..bench.decoding import one_by_one
    from ..bench.speed import Disagreement
    from ..bench.speed import speed as measure
    from ..diffusion_lm.plan import Plan
    from .output import say

    if threads is not None:
        torch.set_num_threads(threads)
    shared: dict[str, Any] = {"state_dtype": state_dtype, "device": device, "backend": backend}
    stored = [_stored(name) for name in names(formats)] or [{"dtype": dtype, "weights": weights}]
    batch, peers, wanted = counts(rows), names(against), targets(model, shape)
    planned = given(policy=policy, steps=steps, block=block, cache=cache, refresh=refresh)
    plan = Plan(**planned) if planned else None
    timed: dict[str, Any] = {"prompt": prompt, "new": new, "rows": batch, "rounds": rounds, "against": peers}

    def left_out(peer: str, error: ValueError) -> None:
        say(f"constate: {peer} is left out: {error}")

    def points() -> Iterator[dict[str, Any]]:
        for name, is_shape in wanted:
            for how in stored:
                built, exact = _model(name, is_shape, {**shared, **how}), how == _stored("float32")
                plain = {**shared, **_stored("float32")}
                # Beside others a plan is for those that heed one; `decoding` says which. A lone model
                # refuses it.
                heeds = len(wanted) == 1 or not one_by_one(built)
                yield from measure(
                    built,
                    name,
                    **timed,
                    check=check and (exact or not formats),
                    plan=plan if heeds else None,
                    source=None if exact or not peers else _model(name, is_shape, plain),
                    refused=left_out if len(wanted) > 1 else None,
                )

    try:
        show(points(), as_json, SPEED, f"prompt {prompt}, new {new}, medians of {rounds} rounds in turn")
    except Disagreement as error:
        say(f"constate: {error}")
        return 1
    return 0


def _stored(name: str) -> dict[str, str | None]:
    """What `load` takes for a format's name."""
    return {"dtype": "float32", "weights": "int8"} if name == "int8" else {"dtype": name, "weights": None}


def _model(name: str, is_shape: bool, options: dict[str, Any]) -> Model:
    """The model to measure: loaded, or a named shape drawn at random."""
    from ..bench.shapes import random_model
    from ..loading import load

    return random_model(name, **options) if is_shape else load(name, **options)

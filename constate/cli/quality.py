"""`constate quality`: how well models predict, by probe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from .options import (
    Backend,
    BlockSize,
    CacheWay,
    Confidence,
    Device,
    Dtype,
    Json,
    Models,
    Refresh,
    StateDtype,
    Weights,
    count,
    given,
    targets,
)
from .output import show

PROBES = ("bpb", "unmasking")
SCORES = ("model", "setting", "score", "chance", "n", "params", "state_bytes", "dtype")
FRONTIER = ("model", "setting", "score", "generated_bpb", "distinct_4", "model_calls", "tokens_per_call")
UNMASKING = "tiny/mdlm"

Probe = Annotated[
    str,
    typer.Argument(
        help="bpb: bits per byte of a text. unmasking: what fewer model calls cost a masked diffusion model."
    ),
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


def quality(
    probe: Probe,
    model: Models = None,
    text: Text = None,
    rows: Rows = None,
    new: New = None,
    block: BlockSize = None,
    confidence: Confidence = None,
    cache: CacheWay = None,
    refresh: Refresh = None,
    dtype: Dtype = "float32",
    weights: Weights = None,
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """Score models on a probe: bits per byte of a text, or the frontier of unmasking."""
    if probe not in PROBES:
        raise ValueError(f"probe {probe!r} is not known; known are {', '.join(PROBES)}")
    asked = given(rows=rows, new=new, block=block, confidence=confidence, cache=cache, refresh=refresh)
    if asked and probe != "unmasking":
        raise ValueError(f"--{next(iter(asked))} is for the probe unmasking; this one is {probe}")
    from ..loading import load

    options: dict[str, Any] = {
        "dtype": dtype,
        "weights": weights,
        "state_dtype": state_dtype,
        "device": device,
        "backend": backend,
    }
    if probe == "unmasking":
        from ..bench.quality.unmasking import JUDGE, unmasking

        def frontier() -> Iterator[dict[str, Any]]:
            judge = load(JUDGE, **options)
            for name in model or [UNMASKING]:
                yield from unmasking(load(name, **options), name, judge, text=text, **asked)

        show(frontier(), as_json, FRONTIER, "score: infill accuracy; the seconds and calls are for the texts")
        return
    from ..bench.quality.bpb import bpb

    show((bpb(load(name, **options), name, text) for name, _ in targets(model, None)), as_json, SCORES)

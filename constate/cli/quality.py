"""`constate quality`: how well models predict, by probe."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Backend, Device, Dtype, Json, Models, StateDtype, targets
from .output import show

PROBES = ("bpb",)

Probe = Annotated[str, typer.Argument(help=f"One of: {', '.join(PROBES)} (bits per byte).")]
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
    dtype: Dtype = "float32",
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """Score models on a probe; `bpb` is bits per byte of a text, the fewer the better."""
    if probe not in PROBES:
        raise ValueError(f"probe {probe!r} is not known; known are {', '.join(PROBES)}")
    from ..bench.quality.bpb import bpb
    from ..loading import load

    options = {"dtype": dtype, "state_dtype": state_dtype, "device": device, "backend": backend}
    rows = (bpb(load(name, **options), name, text) for name, _ in targets(model, None))
    show(rows, as_json, ("model", "setting", "score", "chance", "n", "params", "state_bytes"))

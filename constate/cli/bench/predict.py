"""`constate bench predict`: a model on paper, from its config.json alone."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..options import Device, Json, count, counts, names
from ..output import say, show
from .common import Rows

PREDICT = (
    *("model", "hardware", "phase", "rows", "context", "params", "weight_bytes", "kv_bytes", "state_bytes"),
    *(
        "conv_bytes",
        "total_bytes",
        "fits",
        "latency_s",
        "tokens_per_s",
        "ttft_s",
        "bound",
        "limit",
        "intensity",
    ),
)

Configs = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG ...",
        help="A published model's name (llama-2-13b, mamba-2.8b, ...), a config.json, its folder, tiny/NAME, "
        "or a hub id.",
        show_default=False,
    ),
]
Machines = Annotated[
    str,
    typer.Option(
        metavar="NAME,NAME,...",
        help="a100, h100, h200, b200, rtx4090, rtx5090, ddr5-12ch, or this: the machine at hand, measured.",
    ),
]
Contexts = Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of each row, such as 1k,16k.")]
Phase = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="decode, prefill, verify; of a masked diffusion model denoise."),
]
Verify = Annotated[int, typer.Option(parser=count, metavar="K", help="Drafted tokens that a pass verifies.")]
Block = Annotated[
    int | None,
    typer.Option(
        parser=count, metavar="N", help="Places of a denoise step over a cache; else the whole row."
    ),
]
Gain = Annotated[float, typer.Option(help="Tokens a row gains by a pass that verifies or denoises.")]
Dtype = Annotated[str, typer.Option(help="Of weights, keys and values: bf16, fp16, fp32.")]
StateDtype = Annotated[str, typer.Option(help="Of recurrent state: fp32, bf16, fp16.")]
Weights = Annotated[str | None, typer.Option(help="Quantised matrices: int8, fp8, int4.")]
Convention = Annotated[
    str, typer.Option(help="model, or lecture: every parameter is read at each step, embedding included.")
]
Copies = Annotated[
    int, typer.Option(parser=count, metavar="M", help="Machines with a copy of the model each.")
]
Against = Annotated[
    str | None,
    typer.Option(metavar="CONFIG", help="At which length this one costs as much, its cache growing."),
]


def predict(
    config: Configs,
    hardware: Machines = "h100",
    rows: Rows = "1",
    context: Contexts = "4k",
    phase: Phase = None,
    verify: Verify = 4,
    block: Block = None,
    tokens_per_call: Gain = 1.0,
    dtype: Dtype = "bf16",
    state_dtype: StateDtype = "float32",
    weights: Weights = None,
    convention: Convention = "model",
    copies: Copies = 1,
    against: Against = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """What a model needs and how fast it can be at best, on paper: no weights are read and nothing runs."""
    from ...bench import predict as paper
    from ...bench.predict.rows import Asked

    stored: dict[str, Any] = {
        "dtype": dtype,
        "state_dtype": state_dtype,
        "weights": weights,
        "convention": convention,
    }
    models = [(name, paper.paper(paper.config(name), **stored)) for name in config]
    other = None if against is None else paper.paper(paper.config(against), **stored)
    machines = [paper.hardware(name, device) for name in names(hardware) or [hardware]]
    shown: dict[str, Any] = {"verify": verify, "block": block, "tokens_per_call": tokens_per_call}

    def points() -> Any:
        for name, model in models:
            wanted = names(phase) or ["decode" if model.causal else "denoise"]
            asked = [
                Asked(each, b, s, copies, **shown)
                for each in wanted
                for s in counts(context)
                for b in counts(rows)
            ]
            if model.positions is not None and max(a.past + a.new for a in asked) > model.positions:
                say(f"constate: {name} was made for {model.positions:,} positions; longer rows are marked")
            yield from paper.predict(model, name, machines, asked, other)

    title = f"at best, {dtype}, {weights + ' matrices, ' if weights else ''}convention {convention}"
    show(points(), as_json, PREDICT, title)

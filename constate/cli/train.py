"""`constate train`: a tiny checkpoint of any pattern of mixers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Threads, count
from .output import emit, say

Recipe = Annotated[
    str,
    typer.Argument(help="hybrid, mdlm ...; or mixers, one a layer, with commas between; or a .json file."),
]
Text = Annotated[Path | None, typer.Option("--text", metavar="FILE", help="UTF-8, in place of the novels.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the checkpoint goes.")]
Steps = Annotated[int | None, typer.Option(parser=count, metavar="N", help="In place of the recipe's.")]


def train(
    recipe: Recipe,
    out: Out,
    text: Text = None,
    steps: Steps = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Train a tiny model, on the shipped novels or on a text of yours. The same call resumes."""
    from ..training import train as run

    for row in run(recipe, out, text=text, steps=steps, threads=threads):
        if as_json:
            emit(row)
            continue
        held = f"  held out {row['held_out_bpb']:.3f}" if "held_out_bpb" in row else ""
        if "held_out_bpb_bound" in row:
            held = f"  held out at most {row['held_out_bpb_bound']:.3f}"
        line = f"step {row['step']:>6,}  tokens {row['tokens']:>10,}  loss {row['loss']:.3f}"
        print(f"{line}  bits per byte {row['bpb']:.3f}{held}", flush=True)
    say(f'done: constate generate --model {out} "She"')

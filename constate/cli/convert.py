"""`constate convert`: pickled, foreign and our own checkpoints to folders that others read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options import Json
from .output import say, show


def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="IN", help="A .bin, .pth, .pt or .gguf file, a folder, or a model's name."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder.")],
    to: Annotated[
        str | None,
        typer.Option(help="hf: fail unless one of our own models has a published form to be written in."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as safetensors under published names; pickles are read without running code."""
    from ..loading import convert as run

    done = run(source, out, to)
    if done.model_type == "composed":
        say(f"{source} is no published architecture and stays composed; --to hf says why")
    if not (Path(out).expanduser() / "tokenizer.json").is_file():
        say(f"{source} has no tokenizer.json beside it; to read or write text, copy the model's into {out}")
    show([{**asdict(done), "out": out}], as_json, ("model_type", "dialect", "tensors", "bytes", "out"))

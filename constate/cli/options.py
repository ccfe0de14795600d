"""The options that commands share, and how counts and lists are spelled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

DEFAULT_MODEL = "tiny/hybrid"
UNITS = {"": 1, "k": 1024, "m": 1024**2}


def count(text: str | int) -> int:
    """A whole number; `1k` is 1,024 and `1m` 1,048,576. Raises BadParameter."""
    found = re.fullmatch(r"(\d+)([km]?)", str(text).strip().lower())
    if not found:
        raise typer.BadParameter(
            f"{text!r} is no count: a whole number such as 64 or 8k (k is 1,024) is wanted"
        )
    return int(found[1]) * UNITS[found[2]]


def counts(text: str) -> list[int]:
    """Counts with commas between them."""
    return [count(part) for part in text.split(",")]


def names(text: str | None) -> list[str]:
    """Names with commas between them; none for no text."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


Json = Annotated[bool, typer.Option("--json", help="Print JSON alone, one object a line.")]
Model = Annotated[
    str,
    typer.Option("--model", metavar="NAME", help="tiny/NAME, a folder, a .gguf file, smollm2, or a hub id."),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="tiny/NAME, a folder, a .gguf file, smollm2, or a hub id; repeat for several.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="A published shape with random weights: mamba-130m, mamba2-130m, llama-135m.",
    ),
]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16.")]
StateDtype = Annotated[str, typer.Option(help="Of recurrent state: float32, bfloat16, float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
Backend = Annotated[str, typer.Option(help="auto, reference, torch, native, triton.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; as PyTorch picks them by default.")]


def targets(models: Sequence[str] | None, shapes: Sequence[str] | None) -> list[tuple[str, bool]]:
    """What to measure: (name, whether it is a shape), in the order models, shapes."""
    found = [(name, False) for name in models or ()] + [(name, True) for name in shapes or ()]
    return found or [(DEFAULT_MODEL, False)]

"""The options that commands share, and how counts and lists are spelled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

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


def nbytes(text: str | int) -> int:
    """A size in bytes: `2GiB` is 2 x 1,024^3 of them, `80GB` 80 x 1,000^3. Raises BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?)b|b?)", str(text).strip().lower())
    if not found:
        raise typer.BadParameter(f"{text!r} is no size: a number and MiB, GiB, MB, GB or none is wanted")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** (" kmgt".index(found[2]) if found[2] else 0))


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
        help="A shape with random weights: mamba-130m, mamba2-130m, llama-135m, llada-130m, a medium size of "
        "a hybrid such as jamba-medium, or hybrids for all ten of those.",
    ),
]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16.")]
Weights = Annotated[
    str | None, typer.Option(help="int8: matrices in 8 bits, activations float32; gates stay exact.")
]
StateDtype = Annotated[str, typer.Option(help="Of recurrent state: float32, bfloat16, float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
Backend = Annotated[
    str,
    typer.Option(
        help="auto, reference, torch, native, triton; on a GPU also fla, mamba_ssm, causal_conv1d, if here."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; as PyTorch picks them by default.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Keep each point here as it is measured; what FILE has is not redone."
    ),
]
Executor = Annotated[
    str, typer.Option(help="Where the work runs: local, or ray, a cluster (a local one where none is found).")
]

# Of masked diffusion models; what each means is told in diffusion_lm/plan.py.
Policy = Annotated[
    str | None,
    typer.Option(
        help="Masked diffusion: which places are unmasked first. confidence, margin, entropy, random, "
        "ancestral, threshold, entropy_bound, remask."
    ),
]
Steps = Annotated[
    int | None, typer.Option(parser=count, metavar="N", help="Model calls for the output; one a token.")
]
BlockSize = Annotated[
    int | None, typer.Option("--block", parser=count, metavar="N", help="Places filled at a time, in turn.")
]
Threshold = Annotated[
    float | None, typer.Option(help="Policy threshold: unmask what is at least this probable.")
]
Bound = Annotated[
    float | None, typer.Option("--entropy-bound", help="Policy entropy_bound: nats unmasked together.")
]
Confidence = Annotated[
    str | None, typer.Option(help="clean, or tempered: certainty measured after temperature, top-k, top-p.")
]
Blur = Annotated[
    float | None, typer.Option("--order-noise", help="Noise on the order of confidence, margin, entropy.")
]
CacheWay = Annotated[
    str | None,
    typer.Option("--cache", help="none; exact (block models); approximate: prefix, dual, delayed."),
]
Refresh = Annotated[
    int | None, typer.Option(parser=count, metavar="N", help="Approximate caches: made anew every N calls.")
]
Guidance = Annotated[float | None, typer.Option(help="Classifier-free guidance; 0: none.")]
Ends = Annotated[
    str | None, typer.Option("--eos", help="End-of-text tokens: any, late (unmasked last) or never.")
]
Least = Annotated[
    int | None, typer.Option("--min-new-tokens", parser=count, metavar="N", help="No end of text before.")
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def targets(models: Sequence[str] | None, shapes: Sequence[str] | None) -> list[tuple[str, bool]]:
    """What to measure: (name, whether it is a shape), in the order models, shapes; the shape "hybrids" is one
    of each hybrid."""
    from ..bench.hybrids import HYBRIDS

    found = [(name, False) for name in models or ()]
    for name in shapes or ():
        found += [(each, True) for each in (HYBRIDS if name == "hybrids" else (name,))]
    return found or [(DEFAULT_MODEL, False)]

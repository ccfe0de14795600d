"""`constate doctor`: which backends live here, and whether each op is right on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Device, Json
from .output import show

Compile = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="TARGET",
        help="What the Triton kernels become on a GPU that need not be here: sm_80, sm_90, sm_100, gfx942.",
    ),
]
Everything = Annotated[
    bool, typer.Option("--all", help="With --compile: every dtype and head size, not bfloat16 at 64 and 128.")
]


def doctor(
    device: Device = "cpu", compile_for: Compile = None, everything: Everything = False, as_json: Json = False
) -> int:
    """Run every op of every backend beside the reference. Exit status 1 if one ran and was wrong, or, with
    --compile, if a kernel does not compile."""
    from ..bench import doctor as examine

    if compile_for is None:
        if everything:
            raise typer.BadParameter("--all says how much --compile TARGET compiles: it was given alone")
        rows = show(examine.doctor(device), as_json, ("op", "backend", "ok", "max_error", "reason"))
        return int(any(row["ok"] is False for row in rows))
    columns = ("op", "kernel", "target", "dtype", "head", "note", "registers", "spill_bytes", "shared_bytes")
    rows = show(examine.compiled(compile_for, everything), as_json, (*columns, "tensor_core"))
    return int(any("error" in row for row in rows))

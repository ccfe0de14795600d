"""`constate bench gpu`: one GPU measured in five minutes, or quickly in a minute and a half."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .options import Json, names

Quick = Annotated[bool, typer.Option("--quick", help="90 s: correctness, one length, one number of rows.")]
Dry = Annotated[
    bool, typer.Option("--dry-run", help="Tiny sizes on the CPU, Triton in its interpreter: does it run?")
]
Place = Annotated[str, typer.Option(help="cuda, cuda:1 ...; with --dry-run cpu.")]
Backends = Annotated[
    str, typer.Option("--backend", metavar="B,B", help="The first is checked and timed, others checked.")
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="PEER,PEER", help="fla, mamba_ssm, causal_conv1d; all that are installed by default."
    ),
]
Sanitize = Annotated[
    bool, typer.Option("--sanitize", help="Every op once more under NVIDIA's compute-sanitizer (minutes).")
]
Seconds = Annotated[int | None, typer.Option(min=1, help="Time that it may take, sanitizer apart.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes that check at once, 12 or fewer by default; one alone keeps the time."
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON here too.")]
MOST = 12  # processes: compiling is what takes their time


def gpu(
    quick: Quick = False,
    dry_run: Dry = False,
    device: Place = "cuda",
    backend: Backends = "triton",
    against: Against = None,
    sanitize: Sanitize = False,
    seconds: Seconds = None,
    workers: Workers = None,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Every op and family against the CPU's reference, then times beside others, on one GPU."""
    from ..bench.gpu import plan, report, run
    from .output import emit, say, table

    sizes = plan.DRY if dry_run else plan.QUICK if quick else plan.FULL
    record = run.measure(
        sizes if seconds is None else replace(sizes, seconds=seconds),
        device="cpu" if dry_run else device,
        backends=names(backend),
        peers=run.PEERS if against is None else names(against),
        workers=workers or max(1, min(MOST, (os.cpu_count() or 1) - 2)),
        sanitize=sanitize,
        told=say,
    )
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if as_json:
        emit(record)
    else:
        for title, columns, rows in report.tables(record):
            table(rows, columns, title)
    for fault in (faults := report.wrong(record)):
        say(f"constate: {fault}")
    if record["left_out"]:
        say(f"constate: time ran out before {len(record['left_out'])} questions")
    return int(bool(faults))

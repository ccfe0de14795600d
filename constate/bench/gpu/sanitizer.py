"""compute-sanitizer over every op's kernels: reads and writes out of bounds, and races in shared memory.

Knows where NVIDIA puts the tool and what it prints; the questions are the checks' own, at one small size.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from ...kernels.dispatch import FILES

TOOLS = ("memcheck", "racecheck")
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
PATIENCE = 300  # seconds a tool: a kernel runs tens of times as long under it
# Every tensor an allocation of its own, so that a step past its end is a step into nothing.
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sanitized(device: str, backend: str, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A row a tool: `tool ok errors seconds reason`; `ok` is None where the tool did not run."""
    program = shutil.which("compute-sanitizer") or next((p for p in PLACES if Path(p).exists()), None)
    for tool in TOOLS:
        if program is None:
            yield _row(tool, None, None, 0.0, "compute-sanitizer is not on the PATH")
            continue
        began = monotonic()
        command = [program, "--tool", tool, sys.executable, "-m", "constate.bench.gpu.worker", device]
        asked = "".join(json.dumps(_item(op, backend)) + "\n" for op in FILES)
        try:
            done = subprocess.run(
                command,
                input=asked,
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE,
                env=os.environ | environment | ALONE,
            )
        except subprocess.TimeoutExpired:
            yield _row(tool, None, None, monotonic() - began, f"no end in {PATIENCE} s")
            continue
        text = done.stdout + done.stderr
        counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
        if not counts:
            last = " ".join(text.split()[-40:])
            yield _row(tool, None, None, monotonic() - began, f"status {done.returncode}: {last}")
            continue
        errors = sum(map(int, counts))
        why = "; ".join(re.findall(r"========= ((?:Invalid|Error|Race|Hazard)[^\n]*)", text)[:5])
        yield _row(tool, not errors, errors, monotonic() - began, why or "no complaint")


def _item(op: str, backend: str) -> dict[str, Any]:
    return {"kind": "op", "op": op, "backend": backend, "dk": 64, "dv": 64, "dtype": "bfloat16"}


def _row(tool: str, ok: bool | None, errors: int | None, seconds: float, reason: str) -> dict[str, Any]:
    return {"tool": tool, "ok": ok, "errors": errors, "seconds": seconds, "reason": reason}

"""Memory against length: what a model holds on paper beside what the process really took.

Each point runs in a process of its own (`python -m constate.bench.peak`), because memory that an earlier
point touched is never quite given back. Knows the model's price and how to read a child's answer.

The method. The child loads the model, reads and writes a little (threads, buffers), hands free memory back
to the system and notes its resident size; it resets the kernel's high-water mark (/proc/self/clear_refs),
reads a prompt of `length` tokens in pieces as generation does, writes `NEW` tokens, and notes the mark.
`measured_peak_bytes` is the rise plus the weights, which makes it comparable with `predicted_bytes`,
weights and everything the cache holds; what lies between the two is activations and workspace. glibc is
told to return every large block at once (ALLOCATOR), so that what is counted is memory in use and not what
an allocator keeps for later. What remains of chance, a few pages of a small model, goes with the median of
RUNS processes. On CUDA the allocator's own high-water mark is
read in the same places. Where the mark cannot be reset it is the peak since the process began that counts,
and `method` says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.model import Model
from .decoding import one_by_one

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",  # not one a thread, of which each keeps a little
}
RUNS = 3  # processes a point
NEW = 4  # tokens written after the prompt: enough to pass through the step ops


def memory(
    model: Model, name: str, lengths: Sequence[int], rows: int = 1, **load: str | None
) -> Iterator[dict[str, Any]]:
    """A row for each length, with the keys of `bench memory`, each measured in a fresh process.

    `name` and `load` (device, dtype, weights, backend, state_dtype) are what `model` was loaded with: the
    child loads it again, or draws a named shape at random. Raises ValueError for a length or rows below 1,
    and with the child's last line where it failed (memory that did not suffice, say).
    """
    if not one_by_one(model):
        raise ValueError(
            f"{name} decides its tokens in any order, and what it holds depends on its plan more than on the "
            "length: memory against length is measured for models that write one token after another"
        )
    if min(rows, *lengths) < 1:
        raise ValueError(f"lengths {list(lengths)}, rows {rows}: at least 1 each")
    for length in lengths:
        told = {"name": name, "length": length, "rows": rows, "new": NEW, "load": load}
        yield {
            "model": name,
            "length": length,
            "rows": rows,
            **predict(model, length, rows),
            **sorted((_child(told) for _ in range(RUNS)), key=lambda run: run["measured_peak_bytes"])[
                RUNS // 2
            ],
            "backend": model.ops.backend,
            "dtype": model.weight_dtype,
        }


def predict(model: Model, length: int, rows: int) -> dict[str, int]:
    """Bytes of weights and of what `rows` rows hold once the prompt is read and NEW tokens are written."""
    held = model.cost(1, length + NEW - 1, rows).held
    parts = {
        "weight_bytes": model.weight_bytes,
        "kv_bytes": held.get("kv", 0),
        "state_bytes": held.get("state", 0),
        "conv_bytes": held.get("conv", 0),
    }
    return {**parts, "predicted_bytes": sum(parts.values())}


def _child(told: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "constate.bench.peak", json.dumps(told)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ALLOCATOR)
    if child.returncode:
        said = child.stderr.strip().splitlines()
        why = said[-1] if said else f"ended by signal {-child.returncode}"
        raise ValueError(f"{told['name']} at {told['length']} tokens: {why}")
    return json.loads(child.stdout)

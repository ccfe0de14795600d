"""One point of `bench memory`, in a process of its own: the peak above the loaded model.

Reads what to measure as JSON from its one argument and prints JSON. Knows how this system counts memory;
the method is told in memory.py.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from ..core.decode import PIECE
from ..loading import load
from .engines import Ours
from .shapes import SHAPES, random_model

WARM = 8 * PIECE + 1  # tokens of warm-up: full pieces and a short one, until the C library's heap has settled
STATUS, MARK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Resident:
    """This process's resident memory, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        _trim()
        self.method = "VmHWM, reset"
        try:
            MARK.write_text("5")  # the peak begins anew
            self.before = _status("VmRSS")
        except OSError:
            self.method = "ru_maxrss, never reset"
            self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def rise(self) -> int:
        if self.method.startswith("VmHWM"):
            return _status("VmHWM") - self.before
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.before


class Allocated:
    """A CUDA device's memory in tensors, in bytes."""

    method = "torch.cuda.max_memory_allocated"

    def __init__(self, device: str) -> None:
        self.device = device
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.before = torch.cuda.memory_allocated(device)

    def rise(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.before


def measure(name: str, length: int, rows: int, new: int, load_options: dict[str, Any]) -> dict[str, Any]:
    """`measured_peak_bytes` and what it is made of, for a prompt of `length` tokens a row."""
    model = random_model(name, **load_options) if name in SHAPES else load(name, **load_options)
    device = str(model.device)
    tokens = (torch.arange(rows * length, device=device) * 7919 % model.vocab).view(rows, length)
    with torch.inference_mode():
        warm = torch.arange(rows * WARM, device=device) % model.vocab
        write(Ours(model, new), warm.view(rows, WARM), 2)
        meter = Allocated(device) if device.startswith("cuda") else Resident()
        write(Ours(model, new), tokens, new)
        rise = meter.rise()
    return {
        "measured_peak_bytes": model.weight_bytes + rise,
        "peak_above_model_bytes": rise,
        "method": meter.method,
    }


def write(engine: Ours, tokens: torch.Tensor, new: int) -> None:
    """Read the prompt, then write `new` tokens greedily; the state goes when this ends."""
    ids = engine.prefill(tokens).argmax(-1)
    for _ in range(new):
        ids = engine.step(ids).argmax(-1)


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def _trim() -> None:
    """Hand freed memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    try:
        print(json.dumps(measure(given["name"], given["length"], given["rows"], given["new"], given["load"])))
    except (ValueError, MemoryError) as error:
        raise SystemExit(" ".join(str(error).split()) or "memory did not suffice") from None

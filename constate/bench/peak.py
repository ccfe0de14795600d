"""One point of `bench memory`, in a process of its own: what the model takes above what it is.

Knows how this system counts memory and how generation calls a model; the method is told in memory.py.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..core.decode import PIECE, Request
from ..core.model import Model
from ..diffusion_lm.denoiser import denoiser
from ..diffusion_lm.plan import Plan
from ..loading import load
from ..spans import Spans
from .decoding import one_by_one
from .shapes import SHAPES, random_model

NEW = 4  # tokens written after the prompt: enough to pass through the step ops
PLACES = 32  # to be filled by a model that fills them in any order, unless it has blocks of its own
WARM = 2 * PIECE + 1  # tokens of warm-up: full pieces and a short one
STATUS, MARK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Point:
    """What to measure: `rows` prompts of `length` tokens, read `way` "pieces" or "one-shot" by the model
    that `load` (the options of constate.load) makes of `name`. The first `filled` tokens of each are not
    computed: their places in the cache are filled with numbers instead."""

    name: str
    length: int
    rows: int = 1
    way: str = "pieces"
    filled: int = 0
    threads: int | None = None
    load: dict[str, Any] = field(default_factory=dict)


class Resident:
    """This process's resident memory, in bytes. Begins with the peak forgotten."""

    method = "VmHWM, reset"

    def __init__(self) -> None:
        tidy()
        try:
            MARK.write_text("5")
            self.before = _status("VmRSS")
        except OSError:
            self.method = "ru_maxrss, never reset"
            self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def held(self) -> int:
        """Above the start, once freed memory has gone back to the system."""
        tidy()
        return _status("VmRSS") - self.before

    def peak(self) -> int:
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
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.before = torch.cuda.memory_allocated(device)

    def held(self) -> int:
        gc.collect()
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device) - self.before

    def peak(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.before

    def reserved(self) -> int:
        """The peak of what PyTorch took from the device, for tensors or for later."""
        return torch.cuda.max_memory_reserved(self.device) - self.before


def measure(point: Point) -> dict[str, Any]:
    """Bytes above the loaded model: `peak`, `held` (what stays of it while the sequences live: their state,
    history, keys and values), on CUDA also `reserved`, and the `method` of counting."""
    if point.threads is not None:
        torch.set_num_threads(point.threads)
    name, options = point.name, point.load
    model = random_model(name, **options) if name in SHAPES else load(name, **options)
    device, reader = str(model.device), _causal if one_by_one(model) else _denoising
    with torch.inference_mode():
        _run(reader(model, replace(point, length=min(point.length, WARM), filled=0)), int)
        run = reader(model, point)
        meter = Allocated(device) if device.startswith("cuda") else Resident()
        held = _run(run, meter.held)
        told = {"peak": meter.peak(), "held": held, "method": meter.method}
    told |= {"threads": torch.get_num_threads(), "backend": model.ops.backend}
    return told | ({"reserved": meter.reserved()} if isinstance(meter, Allocated) else {})


def _run(run: Callable[[], Iterator[None]], look: Callable[[], int]) -> int:
    """Read and write; what `look` sees while the sequences are still held."""
    return [look() for _ in run()][-1]


def _causal(model: Model, point: Point) -> Callable[[], Iterator[None]]:
    """The prompt and NEW tokens, as generation reads and writes them."""
    length, rows, device = point.length, point.rows, model.device
    each = PIECE if point.way == "pieces" else length

    def run() -> Iterator[None]:
        cache = model.init_cache(rows, length + NEW)
        if point.filled:
            for _, leaf, of in cache.leaves():
                if of.grows or of.ring:
                    leaf[:, : of.held(leaf, point.filled)] = 0.01
            cache.advance([point.filled] * rows)
        logits = torch.empty(0)
        for start in range(point.filled, length, each):
            new = min(each, length - start)
            tokens = torch.arange(start, start + rows * new, device=device) * 7919 % model.vocab
            logits = model.forward(tokens, Spans.of([new] * rows, device), cache, at="last")
        for _ in range(NEW):
            logits = model.step(logits.argmax(-1), cache)
        yield

    return run


def _denoising(model: Model, point: Point) -> Callable[[], Iterator[None]]:
    """The prompt, and then its last places, through the model's own decoder: one call where it keeps nothing
    between calls, else one after which its cache is there and one that reads it."""
    decode, about = model.architecture, denoiser(model)
    assert decode is not None
    new = min(about.block or PLACES, point.length)
    ids = (torch.arange(point.rows * (point.length - new)) * 7919 % model.vocab).view(point.rows, -1)
    ids[ids == about.mask_id] = 0 if about.mask_id else 1
    calls = min(2, new) if about.exact_cache else 1
    requests = [Request(tuple(row), new, plan=Plan(steps=calls)) for row in ids.tolist()]

    def run() -> Iterator[None]:
        seen = 0
        for commit in decode.decode(model, requests, lambda row, tokens: None):
            if commit.calls > seen:
                seen = commit.calls
                yield

    return run


def tidy() -> None:
    """Hand freed memory back to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024

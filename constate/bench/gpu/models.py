"""Whole models on the device: tokens read a second, time a written token, with and without a CUDA graph.

Knows how a model is stepped and what it must move; knows no op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...core.decode import PIECE
from ...core.model import Model
from ...spans import Spans
from ..shapes import random_model
from .clock import Clock
from .families import FAMILIES

PAST = 256  # tokens that the timed steps have behind them
STEPS = 16  # steps timed one after the other, as decoding takes them


def model(
    name: str,
    rows: Sequence[int],
    lengths: Sequence[int],
    backend: str,
    dtype: str,
    clock: Clock,
    small: bool,
) -> list[dict[str, Any]]:
    """A row for each number of rows (decoding, the graph on and off) and each length (one prompt read)."""
    shape = FAMILIES[name] if small else name
    built = random_model(shape, device=clock.device, dtype=dtype, backend=backend)
    past, steps = (4, 2) if small else (PAST, STEPS)
    found = []
    with torch.no_grad():
        for count in rows:
            found += [decode(built, count, past, steps, clock, graph) for graph in (True, False)]
        found += [read(built, length, clock) for length in lengths]
    return [{"model": name, "backend": built.ops.backend, "dtype": dtype, **row} for row in found]


def decode(model: Model, rows: int, past: int, steps: int, clock: Clock, graph: bool) -> dict[str, Any]:
    """Seconds a step after `past` tokens, of `steps` in a row; greedy, so that a step waits for the one
    before; recorded as a graph where `graph` asks and the backend can, `graph_reason` says why not.
    `bytes_per_s` is what `Model.cost` says a step must move over that."""
    own = model.ops
    try:
        model.ops = own if graph else replace(own, tape=None)
        cache = model.init_cache(rows, past + 1 + (2 + clock.repeats) * steps)
        prompt = torch.arange(rows * past, device=clock.device) * 7919 % model.vocab
        spans = Spans.of([past] * rows, clock.device)
        ids = model.forward(prompt, spans, cache, at="last").argmax(-1)

        def several() -> None:
            nonlocal ids
            for _ in range(steps):
                ids = model.step(ids, cache).argmax(-1)

        peak, timing = clock.peak(several), clock.runs(several)
        recording = cache.recording
    finally:
        model.ops = own
    seconds, traffic = timing / steps, model.cost(1, past + steps, rows).traffic
    reason = "this backend records no step" if recording is None else recording.reason
    return {
        "phase": "decode",
        "rows": rows,
        "past": past,
        "recorded": recording is not None,
        "graph": recording is not None and reason is None,
        "graph_reason": reason if graph else "asked for without",
        "seconds": seconds,
        "tokens_per_s": rows / seconds,
        "nbytes": traffic,
        "bytes_per_s": traffic / seconds,
        "peak_bytes": peak,
        "state_bytes": cache.nbytes(),
    }


def read(model: Model, length: int, clock: Clock) -> dict[str, Any]:
    """Seconds to read one prompt from nothing, in pieces as generation reads it."""
    prompt = torch.arange(length, device=clock.device) * 7919 % model.vocab

    def whole() -> None:
        cache = model.init_cache(1, length)
        for piece in prompt.split(PIECE):
            model.forward(piece, Spans.of([len(piece)], clock.device), cache, at="last")

    whole()
    peak, seconds = clock.peak(whole), clock.runs(whole)
    flops = model.cost(length, 0, 1).total_flops
    return {
        "phase": "read",
        "rows": 1,
        "length": length,
        "seconds": seconds,
        "tokens_per_s": length / seconds,
        "flops": flops,
        "flops_per_s": flops / seconds,
        "peak_bytes": peak,
    }

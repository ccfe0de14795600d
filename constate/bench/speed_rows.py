"""A row of `bench speed`: from the seconds of an engine's turns to percentiles, ratios, rates and fractions.

Arithmetic alone; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any

from ..core.model import Model
from .engine import Engine, Run
from .machine import Machine
from .peers import Missing

KEYS = (
    *("model", "engine", "rows", "prompt", "new", "ttft_s", "itl_s", "itl_p90_s", "itl_p99_s"),
    *("prefill_tokens_per_s", "decode_tokens_per_s", "bytes_per_token", "flops_per_token"),
    *("bandwidth_fraction", "flops_fraction", "machine_bandwidth", "machine_flops"),
    *("prefill_ratio", "prefill_ratio_low", "prefill_ratio_high"),
    *("decode_ratio", "decode_ratio_low", "decode_ratio_high", "tokens_equal", "logits_differ"),
    *("backend", "dtype", "state_dtype", "device", "threads", "graph", "warmup", "rounds", "steps_timed"),
    *("model_calls", "tokens_per_call", "between_commits_s", "decoding", "cache_differs"),
    *("flags", "error", "install"),
)


def row(**known: Any) -> dict[str, Any]:
    """A row of `bench speed`: what is not known is None, and `flags` empty."""
    assert known.keys() <= set(KEYS), known.keys() - set(KEYS)
    return {**dict.fromkeys(KEYS), "flags": [], **known}


def timed_row(
    engine: Engine, runs: Sequence[Run], ours: Sequence[Run], told: Mapping[str, Any], machine: Machine
) -> dict[str, Any]:
    steps = [seconds for run in runs for seconds in run.steps]
    single = len(steps) == told["new"] * len(runs)  # else it tells only what they take together
    ttft, itl = median(run.ttft for run in runs), median(steps)
    ratios: dict[str, float] = {}
    for what, took in (("prefill", lambda run: run.ttft), ("decode", lambda run: median(run.steps))):
        each = [took(run) / took(mine) for run, mine in zip(runs, ours, strict=True)]
        ratios |= {
            f"{what}_ratio": median(each),
            f"{what}_ratio_low": min(each),
            f"{what}_ratio_high": max(each),
        }
    return row(
        **told,
        engine=engine.name,
        ttft_s=ttft,
        itl_s=itl,
        itl_p90_s=percentile(steps, 0.90) if single else None,
        itl_p99_s=percentile(steps, 0.99) if single else None,
        **rates(engine.priced, ttft, itl, told["rows"], told["prompt"], told["new"], machine),
        machine_bandwidth=machine.bandwidth,
        machine_flops=machine.flops,
        **ratios,
        backend=engine.backend,
        dtype=engine.dtype,
        state_dtype=engine.state_dtype,
        graph=engine.graph,
        warmup=1,
        steps_timed=len(steps),
        model_calls=told["new"],
        tokens_per_call=1.0,
        between_commits_s=itl,
    )


def absent_row(missing: Missing, told: Mapping[str, Any]) -> dict[str, Any]:
    return row(**told, engine=missing.name, error=missing.error, install=missing.install)


def percentile(values: Sequence[float], share: float) -> float:
    """The least of them that is no less than `share` of all (nearest rank)."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def rates(
    model: Model, ttft: float, itl: float, rows: int, prompt: int, new: int, machine: Machine
) -> Mapping[str, Any]:
    """Times as rates, and as fractions of what the machine can do."""
    step = model.cost(1, prompt + new // 2, rows)
    return {
        "prefill_tokens_per_s": rows * prompt / ttft,
        "decode_tokens_per_s": rows / itl,
        "bytes_per_token": step.traffic // rows,
        "flops_per_token": step.total_flops // rows,
        "bandwidth_fraction": step.traffic / itl / machine.bandwidth,
        "flops_fraction": model.cost(prompt, 0, rows).total_flops / ttft / machine.flops,
    }

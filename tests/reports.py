"""Records made by hand, of machines that nobody has: what a comparison is tested on without measuring.

Three models of round sizes. Every number that a report computes from them can be worked out on paper.
"""

from collections.abc import Mapping
from typing import Any

from constate.bench.compare.evidence import gather, quality
from constate.bench.compare.standing import Standing, standings
from constate.bench.compare.workload import Workload
from constate.bench.results import Record

NEW = 4  # tokens that the memory bench writes after a prompt
WEIGHTS, WORK = 4_000_000, 1_000_000
# bytes a sequence keeps whatever its length, bytes a token, bits a byte, milliseconds a token
MODELS: Mapping[str, tuple[int, int, float, float]] = {
    "attention": (0, 4_000, 1.64, 2.0),
    "mixed": (60_000, 1_000, 1.61, 1.0),
    "recurrent": (400_000, 0, 1.62, 0.5),
}
CPU = {"cpu": "Abacus 9000", "cores": 2, "memory_bytes": 16 * 2**30, "gpu": None, "system": "Linux 6"}
GPU = {**CPU, "cpu": "Abacus 9001", "gpu": "Sliderule X", "gpu_memory_bytes": 80 * 2**30, "driver": "1.2"}
VERSIONS = {"constate": "0.1.0", "torch": "2.13.0", "triton": None}


def memory(model: str, length: int, rows: int = 1, peak: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """A row of `bench memory`; the measured peak is `peak` times the predicted one."""
    state, token, _, _ = MODELS[model]
    kv = token * (length + NEW) * rows
    held = WEIGHTS + kv + state * rows
    measured = None if peak is None else round(peak * (held + WORK))
    return {
        "model": model,
        "length": length,
        "rows": rows,
        "prefill": "pieces",
        "weight_bytes": WEIGHTS,
        "kv_bytes": kv,
        "state_bytes": state * rows,
        "conv_bytes": 0,
        "growth_bytes_per_token": token,
        "predicted_bytes": held,
        "predicted_peak_bytes": held + WORK,
        "measured_peak_bytes": measured,
        "measured_held_bytes": held,
        "reserved_peak_bytes": measured,
        "dtype": "float32",
        "flags": [] if peak == 1.0 else ["the sum is off"],
        **more,
    }


def speed(model: str, prompt: int, rows: int = 1, **more: Any) -> dict[str, Any]:
    """A row of `bench speed`: 10 microseconds a token of prompt, and each further row costs a tenth more."""
    step = MODELS[model][3] * (1 + 0.1 * (rows - 1)) / 1e3
    return {
        "model": model,
        "engine": "constate",
        "rows": rows,
        "prompt": prompt,
        "new": 16,
        "ttft_s": prompt * rows * 1e-5,
        "itl_s": step,
        "itl_p90_s": step * 1.2,
        "decode_tokens_per_s": rows / step,
        "dtype": "float32",
        "backend": "native",
        **more,
    }


def score(model: str, **more: Any) -> dict[str, Any]:
    bits = MODELS[model][2]
    return {"probe": "bpb", "model": model, "score": bits, "low": None, "high": None, "bound": False, **more}


def record(bench: str, row: Mapping[str, Any], machine: Mapping[str, Any] = CPU, **more: Any) -> Record:
    """One point with its one row; settings are what tells it from others."""
    row = {**row, "device": "cuda" if machine is GPU else "cpu"} if bench != "quality" else row
    named = ("model", "length", "prompt", "rows", "dtype", "engine", "prefill", "device")
    settings = {key: row[key] for key in named if key in row} | {"new": NEW}
    taken = {"taken": "2026-01-31T12:00:00+00:00", **more}
    return Record(bench, settings, [row], machine, VERSIONS, "0123456789ab", **taken)


def measured(machine: Mapping[str, Any] = CPU) -> list[Record]:
    """What `constate compare` would measure for 2 prompts of 1,000 tokens and 280 new ones."""
    found = []
    for model in MODELS:
        found += [record("memory", memory(model, n), machine) for n in (256, 1024, 4096, 65536)]
        found += [record("memory", memory(model, 1280 - NEW, 2), machine)]
        found += [record("speed", speed(model, prompt), machine) for prompt in (256, 1000, 4096)]
        found += [record("speed", speed(model, 1000, rows), machine) for rows in (2, 8)]
        found += [record("quality", score(model), machine)]
    return found


ASKED = Workload(prompt=1000, new=280, concurrency=2, memory_limit=20_000_000)


def standing(records: list[Record], workload: Workload = ASKED) -> dict[str, Standing]:
    (one,) = gather(records)
    return {s.series: s for s in standings(one, quality(records), workload)}

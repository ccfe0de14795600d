"""The rows of `constate bench predict`: a model, a machine and a phase, each with its bytes and its times.

A phase is one pass over tokens of all rows:
- decode: a token a row, after `context`.
- prefill: `context` tokens a row, from nothing.
- verify: k drafted tokens and the one before them, after `context`. A recurrent state cannot be cut back to
  what was accepted, so one snapshot a token is written beside reading it: k + 2 times its bytes move.
- denoise: a step of a masked diffusion model, with logits at every place: over `block` places after a cache
  of `context` tokens, which is exact for models that see block by block and approximate for others; or
  without `block` over the whole row of `context` places, which keeps nothing.

Knows what is printed; computes by the other files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...diffusion_lm.denoiser import Masked
from .hardware import Hardware
from .limits import ceiling, crossover, largest_context, largest_rows, weight_balance
from .paper import Paper, Work
from .roofline import bound

PHASES = ("decode", "prefill", "verify", "denoise")


@dataclass(frozen=True)
class Asked:
    """What is predicted: `rows` at once on each of `copies` machines with a copy of the model each. `verify`
    counts drafted tokens, `block` the places of a denoise step (None: the whole row), and
    `tokens_per_call` how many tokens a row gains in a pass of those two phases."""

    phase: str
    rows: int
    context: int
    copies: int = 1
    verify: int = 4
    block: int | None = None
    tokens_per_call: float = 1.0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r} is not known; known are {', '.join(PHASES)}")
        least = {"rows": 1, "copies": 1, "verify": 1, "context": 0 if self.phase == "decode" else 1}
        small = [f"{name} {getattr(self, name)}" for name, n in least.items() if getattr(self, name) < n]
        small += [f"block {self.block}"] if self.block is not None and self.block < 1 else []
        if small:
            raise ValueError(f"{', '.join(small)}: at least 1 is wanted, and 0 of a decode step's context")
        most = self.new if self.phase == "verify" else 2**31
        if not 0 < self.tokens_per_call <= most:
            raise ValueError(
                f"tokens per call {self.tokens_per_call}: more than 0 and at most {most:,} a pass"
            )

    @property
    def new(self) -> int:
        """Tokens of each row in the pass."""
        whole = self.context if self.block is None else self.block
        return {"decode": 1, "prefill": self.context, "verify": self.verify + 1, "denoise": whole}[self.phase]

    @property
    def past(self) -> int:
        cached = self.phase in ("decode", "verify") or (self.phase == "denoise" and self.block is not None)
        return self.context if cached else 0


def predict(
    model: Paper,
    name: str,
    machines: Sequence[Hardware],
    asked: Sequence[Asked],
    against: Paper | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each machine and each thing asked. `against`: a model whose cache grows, for the lengths at
    which it costs as much as this one. Raises ValueError for a phase that the model does not have."""
    for machine in machines:
        for each in asked:
            yield _row(model, name, machine, each, against)


def step(model: Paper, asked: Asked) -> Work:
    """The pass that is asked for. Raises ValueError for one that this model never makes."""
    if model.causal == (asked.phase == "denoise"):
        kind = "writes one token after another" if model.causal else "decides its tokens in any order"
        raise ValueError(f"phase {asked.phase!r}: this model {kind}, so {_has(model)} can be asked of it")
    work = model.work(asked.new, asked.past, asked.rows, every=asked.phase in ("verify", "denoise"))
    if asked.phase == "verify":
        snapshots = (asked.verify + 2) / 2  # for what work counts: one reading and one writing
        more = {kind: n * snapshots for kind, n in work.moved.items() if kind != "kv"}
        return replace(work, moved={**work.moved, **more})
    if asked.phase == "denoise" and asked.block is None:  # keys and values come and go within the pass
        return replace(work, moved={**work.moved, "kv": 0})
    return work


def _has(model: Paper) -> str:
    return ", ".join(PHASES[:3]) if model.causal else "denoise"


def _row(model: Paper, name: str, machine: Hardware, asked: Asked, against: Paper | None) -> dict[str, Any]:
    work = step(model, asked)
    spent = bound(work, machine, model.dtype)
    rows, context = asked.rows, asked.context
    keeps = asked.phase != "denoise" or asked.block is not None
    held = model.held(context) if keeps else dict.fromkeys(("kv", "state", "conv"), 0)
    total = model.weight_bytes + rows * sum(held.values())
    gained = {"decode": 1.0, "prefill": float(context)}.get(asked.phase, asked.tokens_per_call)
    room = machine.memory_bytes
    after = _after(model, asked, machine)
    return {
        "model": name,
        "hardware": machine.name,
        "phase": asked.phase,
        "rows": rows,
        "context": context,
        "new": asked.new,
        "beyond_positions": model.positions is not None and asked.past + asked.new > model.positions,
        "copies": asked.copies,
        "cache": _cache(model, asked),
        "convention": "lecture" if model.lecture else "model",
        "dtype": model.dtype,
        "state_dtype": model.state_dtype,
        "weights": model.weights or model.dtype,
        "params": model.params,
        "active_params": model.active_params,
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": model.held(1)["kv"],
        "growth_bytes_per_token": model.held(context + 1)["kv"] - model.held(context)["kv"],
        "kv_bytes": rows * held["kv"],
        "state_bytes": rows * held["state"],
        "conv_bytes": rows * held["conv"],
        "total_bytes": total,
        "memory_bytes": room,
        "fits": None if room is None else total <= room,
        "largest_rows": None if room is None or not keeps else largest_rows(model, context, room),
        "largest_context": None if room is None or not keeps else largest_context(model, rows, room),
        "latency_s": spent.seconds,
        "decode_latency_s": after["decode"],
        "tokens_per_s": asked.copies * rows * gained / spent.seconds,
        "ttft_s": after["prefill"],
        "bound": spent.by,
        "limit": spent.limit,
        "compute_s": spent.compute,
        "memory_s": spent.memory,
        "intensity": work.intensity,
        "ridge": machine.ridge(model.dtype),
        "flops": work.flops,
        "moved_bytes": round(work.nbytes),
        "experts_touched": model.experts_touched(rows * asked.new),
        "balance_rows": weight_balance(model, context) if model.causal else None,
        "ceiling_tokens_per_s": asked.copies * ceiling(model, context, machine) if model.causal else None,
        "crossover_traffic_tokens": against and crossover(model, against),
        "crossover_memory_tokens": against and crossover(model, against, traffic=False),
    }


def _cache(model: Paper, asked: Asked) -> str | None:
    """Whether what a denoise step reads of the context is what it would compute anew."""
    config = model.model.config
    if asked.phase != "denoise" or asked.block is None or not isinstance(config, Masked):
        return None
    return "exact" if config.asked(0).exact_cache else "approximate"


def _after(model: Paper, asked: Asked, machine: Hardware) -> dict[str, float | None]:
    """Seconds of a decode step and of reading the prompt, whatever the phase. A denoiser has no decode step,
    and reads a prompt only where it keeps it."""

    def seconds(phase: str) -> float:
        return bound(step(model, replace(asked, phase=phase)), machine, model.dtype).seconds

    if model.causal:
        return {"decode": seconds("decode"), "prefill": seconds("prefill") if asked.context else None}
    whole = replace(asked, block=None)
    read = 0.0 if asked.block is None else bound(step(model, whole), machine, model.dtype).seconds
    return {"decode": None, "prefill": read + bound(step(model, asked), machine, model.dtype).seconds}

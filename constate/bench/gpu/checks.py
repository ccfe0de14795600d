"""Whether what runs on the device computes what the CPU's reference computes: every op, every family.

Knows the doctor's hostile calls and bounds, and what the laws call equal; knows no clock.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...core.model import Model
from ...core.state import zip_leaves
from ...kernels import reference
from ...kernels.dispatch import select
from ...spans import Spans
from .. import doctor
from ..decoding import one_by_one
from ..shapes import random_model
from .families import FAMILIES

ROUNDED = 1e-2  # of the largest entry: what inputs and outputs of 16 bits may make of a result
LENGTHS = (33, 0, 70, 1)
STEPS = 4  # the first warms a graph up, the second captures it, and then it is replayed
ACTIVATIONS = frozenset({"q", "k", "v", "x", "z", "beta", "gate", "weight", "bias"})
MORE = {"selective": frozenset({"dt", "b", "c"}), "dplr_delta": frozenset({"a", "b"})}


def op(op: str, backend: str, device: str, dk: int, dv: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A row for each way to call the op, or none where this backend has no form of it. Inputs are of `dtype`,
    and so are those that the reference reads; decays and states are float32."""
    chosen = select(backend, device)
    if chosen.choices[op].backend != backend:
        return []
    rows = []
    for variant, case in variants(op, doctor.cases("cpu", dk, dv)[op]):
        given = _cast(op, case, dtype)
        with torch.no_grad():
            want = given.run(getattr(reference, op))
            got = [x.cpu() for x in _moved(given, device).run(getattr(chosen, op))]
        bounds = (doctor.OUTPUT, doctor.STATE) if dtype == torch.float32 else (ROUNDED, ROUNDED)
        ok, worst = _compare(got, want, *bounds)
        rows.append({"op": op, "variant": variant, "dk": dk, "dv": dv, "ok": ok, "max_error": worst})
    return rows


def variants(op: str, case: doctor.Case) -> list[tuple[str, doctor.Case]]:
    """The doctor's call and its like: where that has a decay a channel, also one a head and none."""
    first = replace(case, other=None)
    found = [("", first)] + ([("by channel", case.other)] if case.other is not None else [])
    if op.startswith("gated_linear"):
        q, k, v, g, *rest = case.args
        found = [("by channel", first)]
        found += [("by head", replace(first, args=(q, k, v, g[..., 0], *rest)))]
        found += [("no decay", replace(first, args=(q, k, v, None, *rest)))]
    if op == "attention":
        found += [("all", replace(first, options={}))]
    return found


def family(name: str, backend: str, device: str) -> list[dict[str, Any]]:
    """One row: a packed forward and a few steps in float32 beside the CPU's plain PyTorch, by logits and
    states; and how far bfloat16 weights take the logits away, by norm (told, not judged)."""
    here = random_model(FAMILIES[name], backend="torch")
    there = random_model(FAMILIES[name], device=device, backend=backend)
    ids = torch.arange(sum(LENGTHS)) * 7919 % here.vocab
    want, got = _read(here, ids), _read(there, ids)
    ok, worst = _compare([x.cpu() for x in got], want, doctor.OUTPUT, doctor.STATE)
    found = {"family": name, "backend": backend, "ok": ok, "max_error": worst, "bfloat16_error": None}
    if device != "cpu":  # Triton's interpreter rounds bfloat16 in a way of its own
        low = random_model(FAMILIES[name], device=device, backend=backend, dtype="bfloat16")
        off = float((_read(low, ids)[0].cpu() - want[0]).norm() / want[0].norm())
        found["bfloat16_error"] = off if isfinite(off) else None
    return [found]


def _read(model: Model, ids: Tensor) -> list[Tensor]:
    """Logits of a packed forward, of each step after it, then every tensor of the states."""
    device = str(model.device)
    spans, ids = Spans.of(LENGTHS, device), ids.to(device)
    with torch.no_grad():
        if not one_by_one(model):
            return [model(ids, spans)]
        cache = model.init_cache(len(LENGTHS), max(LENGTHS) + STEPS)
        outputs = [model(ids, spans, cache)]
        outputs += [model.step(ids[i : i + len(LENGTHS)], cache) for i in range(STEPS)]
    states = [tensors[0] for _, tensors, leaf in zip_leaves([cache]) if leaf.kind is not None]
    return [torch.cat(outputs), *states]


def _compare(got: list[Tensor], want: list[Tensor], output: float, state: float) -> tuple[bool, float | None]:
    """Whether all is within bounds, and the largest error in units of its tensor's largest entry (of at
    least 1 for the output, which comes first)."""
    worst, ok = 0.0, True
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        error = doctor.difference(mine, theirs, least=0.0 if i else 1.0)
        worst, ok = max(worst, error), ok and error <= (state if i else output)
    return ok, worst if isfinite(worst) else None


def _cast(op: str, case: doctor.Case, dtype: torch.dtype) -> doctor.Case:
    """The call with those arguments in `dtype` that mixers hand over in the model's."""
    names = ACTIVATIONS | MORE.get(op.rpartition("_")[0], frozenset())

    def cast(name: str, x: Any) -> Any:
        return x.to(dtype) if name in names and isinstance(x, Tensor) and x.is_floating_point() else x

    args = tuple(map(cast, signature(getattr(reference, op)).parameters, case.args))
    return replace(case, args=args, options={name: cast(name, x) for name, x in case.options.items()})


def _moved(case: doctor.Case, device: str) -> doctor.Case:
    def move(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor | Spans) else x

    args = tuple(move(x) for x in case.args)
    return replace(case, args=args, options={k: move(x) for k, x in case.options.items()})

"""Whether the kernels that are here compute what the specification says, on this very machine.

Every op of every backend runs once on a small hostile input beside `kernels.reference`. Knows the ops'
signatures and bounds; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.dispatch import FILES, Availability, available, select
from ..kernels.packages import PACKAGES
from ..spans import Spans

LENGTHS = (1, 0, 70, 17)  # one token, none, past a tile's edge, within one
ROWS, HK, H, DK, DV = len(LENGTHS), 2, 4, 24, 16
CHANNELS, STATES, WIDTH = 24, 8, 4
OUTPUT, STATE = 1e-4, 5e-5  # bounds: of max(1, largest output), of the largest entry of a state


@dataclass(frozen=True)
class Case:
    """One call of an op, and where it has another form, a call of that; the tensors among the arguments are
    copied before each run."""

    args: tuple[Any, ...]
    options: Mapping[str, Any]
    other: Case | None = None

    def run(self, op: Callable[..., Any]) -> list[Tensor]:
        """What the op returns, then its tensor arguments as it left them: in that way a state updated in
        place counts as a result, and so does an input that should have been left alone."""
        args = [a.clone() if isinstance(a, Tensor) else a for a in self.args]
        returned = op(*args, **self.options)
        outputs = list(returned) if isinstance(returned, tuple) else [returned]
        outputs += [a for a in args if isinstance(a, Tensor)]
        return outputs if self.other is None else outputs + self.other.run(op)


def doctor(device: str = "cpu") -> Iterator[dict[str, Any]]:
    """A row for every op and backend: `op backend ok max_error reason`; of an installed package, for the ops
    that it serves.

    `max_error` is the largest difference from the reference, in units of the largest entry (of at least 1
    for an output). `ok` is None for a backend, or an op of it, that cannot run here; `reason` says so.
    `max_error` is None where there is no finite one.
    """
    with torch.no_grad():
        rows = available(device)
        made = cases(device) if any(row.here for row in rows) else {}  # on a device that is not here, none
        wanted = {op: case.run(getattr(reference, op)) for op, case in made.items()}
        for row in rows:
            for op in PACKAGES.get(row.backend, FILES):
                found = {"ok": None, "max_error": None, "reason": row.reason}
                if row.here:
                    found = _check(op, row, made[op], wanted[op], device)
                yield {"op": op, "backend": row.backend, **found}


def compiled(target: str, everything: bool = False) -> Iterator[dict[str, Any]]:
    """What the Triton kernels become on `target`, a GPU that need not be here: see kernels.triton.compile.

    Those that run in bfloat16 at heads of 64 and 128, or with `everything` all that are declared. Raises
    ValueError for an unknown target, or where Triton is not installed.
    """
    if find_spec("triton") is None:
        raise ValueError("Triton is not installed, and it is what compiles the kernels: pip install triton")
    from ..kernels.triton.compile import table

    return table([target], everything)


def _check(op: str, row: Availability, case: Case, want: list[Tensor], device: str) -> dict[str, Any]:
    try:
        chosen = select(row.backend, device)
        if (choice := chosen.choices[op]).backend != row.backend:
            return {"ok": None, "max_error": None, "reason": f"{choice.backend} serves it: {choice.reason}"}
        got = case.run(getattr(chosen, op))
    except Exception as error:  # whatever breaks on this machine is the finding
        return {"ok": False, "max_error": None, "reason": f"{type(error).__name__}: {error}"}
    return {**compare(got, want), "reason": row.reason}


def compare(got: list[Tensor], want: list[Tensor]) -> dict[str, Any]:
    """`ok` and `max_error` of results against the reference's; the first result is the output."""
    worst, ok = 0.0, True
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        output = i == 0
        error = difference(mine, theirs, least=1.0 if output else 0.0)
        worst, ok = max(worst, error), ok and error <= (OUTPUT if output else STATE)
    return {"ok": ok, "max_error": worst if isfinite(worst) else None}


def cases(device: str, dk: int = DK, dv: int = DV) -> dict[str, Case]:
    """A hostile call for each op: decays from none to total within one tile, an empty span, grouped heads,
    states that are not zero. `dk` and `dv` are the widths of a head's keys and values."""
    source = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(device)

    def decays(*shape: int) -> Tensor:
        values = torch.tensor([0.0, 0.0, -1e-6, -0.1, -0.5, -5.0, -50.0, -1e4, -torch.inf])
        return values[torch.randint(0, len(values), shape, generator=source)].to(device)

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    spans, n = Spans.of(LENGTHS, device), sum(LENGTHS)
    context = Spans.of((m + 9 for m in LENGTHS), device)
    beta = torch.rand(n, H, generator=source).to(device)
    rate = -normal(CHANNELS, STATES).exp()
    parts = {"d": normal(CHANNELS), "dt_bias": normal(CHANNELS) - 2}
    taps = (normal(CHANNELS, WIDTH), normal(CHANNELS))
    state, hidden = normal(ROWS, H, dk, dv), normal(ROWS, CHANNELS, STATES)
    history = normal(ROWS, WIDTH - 1, CHANNELS)
    held = torch.tensor([3, 1, 30, 12], device=device)
    q, k, v = normal(n, HK, dk), unit(normal(n, HK, dk)), normal(n, H, dv)
    x, dt, z = normal(n, CHANNELS), normal(n, CHANNELS), normal(n, CHANNELS)
    b, c, log_a = normal(n, STATES), normal(n, STATES), decays(n, CHANNELS)
    one = slice(0, ROWS)
    linear, delta = (q, k, v, decays(n, H, dk)), (q, k, v, decays(n, H), beta)
    channels = (*linear, beta)  # the delta rule with a decay a channel
    kappa = unit(normal(n, H, dk))
    low_rank = (*linear, -kappa, kappa * torch.rand(n, H, dk, generator=source).to(device))
    selective = (x, dt, rate, b, c)
    scale = {"scale": dk**-0.5}
    keys, values = normal(context.total, HK, dk), normal(context.total, HK, dv)
    buffers = (normal(ROWS, 32, HK, dk), normal(ROWS, 32, HK, dv))
    narrow, wide = normal(n, 83), normal(37, 83)  # neither a whole number of groups nor of tiles
    scales, bias = wide.abs()[:, :2] / 50, normal(37)
    whole = (wide * 40).round().clamp(-127, 127).to(torch.int8)
    return {
        "gated_linear_scan": Case((*linear, state, spans), scale),
        "gated_linear_step": Case((*(t[one] for t in linear), state), scale),
        "gated_delta_scan": Case((*delta, state, spans), scale, Case((*channels, state, spans), scale)),
        "gated_delta_step": Case(
            (*(t[one] for t in delta), state), scale, Case((*(t[one] for t in channels), state), scale)
        ),
        "dplr_delta_scan": Case((*low_rank, state, spans), scale),
        "dplr_delta_step": Case((*(t[one] for t in low_rank), state), scale),
        "selective_scan": Case((*selective, hidden, spans), {**parts, "z": z}),
        "selective_step": Case((x[one], dt[one], rate, b[one], c[one], hidden), {**parts, "z": z[one]}),
        "linear_recurrence_scan": Case((x, log_a, hidden[..., 0], spans), {}),
        "linear_recurrence_step": Case((x[one], log_a[one], hidden[..., 0]), {}),
        "short_conv": Case((x, *taps, history, spans), {}),
        "short_conv_step": Case((x[one], *taps, history), {}),
        "attention": Case((normal(n, H, dk), keys, values, spans, context), {"window": 11}),
        "attention_step": Case((normal(ROWS, H, dk), *buffers, held, 30), {}),
        "linear": Case((narrow, whole, bias, scales), {}),
        "rms_norm": Case((x, taps[1], 1e-5), {"gate": z, "groups": 3, "gate_first": True}),
    }


def difference(mine: Tensor, theirs: Tensor, least: float) -> float:
    """Largest difference over the largest entry of `theirs`, or over `least` where that is larger."""
    if mine.shape != theirs.shape:
        return float("inf")
    if torch.equal(mine, theirs):  # inputs left alone, which may hold -inf
        return 0.0
    error = (mine.double() - theirs.double()).abs().max().item()
    size = max(least, theirs.double().abs().max().item())
    return error / size if error < float("inf") else float("inf")  # a NaN fails the comparison too

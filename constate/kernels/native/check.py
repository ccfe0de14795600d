"""Whether the library that was just loaded computes what the specification says: a tiny case of each op.

A processor that is told wrongly what it can do, a compiler with a fault, a library of another version show
here and not in somebody's text. Knows the ops that have a C form, and their bounds; takes some milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...spans import Spans
from .. import reference

LENGTHS = (6, 0, 1, 2)  # a whole block of tokens and some more, none, one, two
HK, H, DK, DV, WIDTH = 1, 2, 5, 35, 3  # not a whole number of vectors of any size
BOUND = 1e-4  # of max(1, the largest entry)


def check() -> str | None:
    """None, or what is wrong."""
    with torch.no_grad():
        for op, file, args, options in _cases():
            wanted = _run(getattr(reference, op), args, options)
            found = _run(getattr(import_module(f".{file}", __package__), op), args, options)
            for mine, theirs in zip(found, wanted, strict=True):
                error = (mine - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
                if not error <= BOUND:  # a NaN is not
                    return f"{op} is off by {error:.1e} in a self-test: the C kernels are not used"
    return None


def _run(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """What it returns, and the last tensor of its arguments, which a step updates."""
    args = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
    returned = function(*args, **options)
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    return [*outputs, [x for x in args if isinstance(x, Tensor)][-1]]


def _cases() -> list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """Ops, the files they are in, and arguments."""
    source, spans = torch.Generator().manual_seed(0), Spans.of(LENGTHS)
    n, rows = spans.total, spans.rows

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    def decays(*shape: int) -> Tensor:
        values = torch.tensor([0.0, -0.1, -1.0, -torch.inf])
        return values[torch.randint(0, len(values), shape, generator=source)]

    q, k, v = normal(n, HK, DK), normalize(normal(n, HK, DK), dim=-1), normal(n, H, DV)
    kappa, beta = normalize(normal(n, H, DK), dim=-1), torch.rand(n, H, generator=source)
    low_rank = (-kappa, kappa * beta[..., None])
    x, dt, z, b, c = normal(n, DV), normal(n, DV), normal(n, DV), normal(n, DK), normal(n, DK)
    rate, d, bias, taps = -normal(DV, DK).exp(), normal(DV), normal(DV), normal(DV, WIDTH)
    matrix, hidden, history = normal(rows, H, DK, DV), normal(rows, DV, DK), normal(rows, WIDTH - 1, DV)
    tokens: dict[str, tuple[str, tuple[Any, ...], Tensor, dict[str, Any]]] = {
        "gated_linear": ("scan", (q, k, v, decays(n, H, DK)), matrix, {"scale": 0.5}),
        "gated_delta": ("scan", (q, k, v, decays(n, H), beta), matrix, {"scale": 0.5}),
        "dplr_delta": ("scan", (q, k, v, decays(n, H, DK), *low_rank), matrix, {"scale": 0.5}),
        "selective": ("scan", (x, dt, rate, b, c), hidden, {"d": d, "z": z, "dt_bias": bias}),
        "linear_recurrence": ("scan", (x, decays(n, DV)), normal(rows, DV), {}),
        "short_conv": ("", (x, taps, bias), history, {}),
    }
    found: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []
    for file, (form, args, state, options) in tokens.items():
        found.append((f"{file}_{form}" if form else file, file, (*args, state, spans), options))
        one = [y[:rows] if isinstance(y, Tensor) and y.shape[0] == n else y for y in args]
        gate = {name: y[:rows] if isinstance(y, Tensor) and y.ndim == 2 else y for name, y in options.items()}
        found.append((f"{file}_step", file, (*one, state), gate))
    keys, held = normal(rows, 9, HK, DK), torch.tensor([9, 1, 5, 4])
    found.append(
        ("attention_step", "attention", (normal(rows, H, DK), keys, normal(*keys.shape), held, 9), {})
    )
    found.append(("rms_norm", "norms", (x, d, 1e-6), {"gate": z}))
    weight, whole = normal(DK, DV), torch.randint(-127, 128, (DK, DV), generator=source, dtype=torch.int8)
    for many in (x, x.repeat(3, 1)):  # few rows and many go two ways
        found.append(("linear", "linear", (many, weight), {}))
        found.append(("linear", "linear", (many, weight.bfloat16()), {}))
        found.append(("linear", "linear", (many, whole), {"scales": normal(DK, 1)}))
    return found

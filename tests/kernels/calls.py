"""One call of any op with hostile arguments, the layouts that they may have in memory, and what is the same.

Knows the ops' signatures; knows no backend. What is right is the reference's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from constate.kernels.dispatch import select
from constate.spans import Spans
from tests.kernels import hostile

LINEAR = ("linear", "linear, by channel", "linear, no decay")
RECURRENT_OPS = (*LINEAR, "delta", "selective")
SCANS = (*RECURRENT_OPS, "conv", "attention", "attention, window")
EVERY = (*SCANS, "delta, by channel", "low rank", "recurrence")


def scan(
    kind: str,
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (8, 12),
    seed: int = 0,
) -> tuple[str, dict[str, Any]]:
    """The name of an op and its arguments by name, for packed rows of these lengths."""
    (hk, h), (dk, dv), spans = heads, dims, Spans.of(lengths)
    n, rows, source = spans.total, spans.rows, hostile.generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    qkv = {"q": normal(n, hk, dk), "k": normalize(normal(n, hk, dk), dim=-1), "v": normal(n, h, dv)}
    state = {"initial": normal(rows, h, dk, dv), "spans": spans}
    match kind:
        case "linear" | "linear, by channel" | "linear, no decay":
            shape = {"linear": (n, h), "linear, by channel": (n, h, dk)}.get(kind)
            decay = None if shape is None else hostile.log_decays(*shape, seed=seed)
            return "gated_linear_scan", {**qkv, "log_decay": decay, **state, "scale": dk**-0.5}
        case "delta" | "delta, by channel":
            beta = 2 * torch.rand(n, h, generator=source)
            decay = hostile.log_decays(n, h, *([dk] if "channel" in kind else []), seed=seed)
            return "gated_delta_scan", {**qkv, "log_decay": decay, "beta": beta, **state, "scale": dk**-0.5}
        case "low rank":
            kappa, rate = normalize(normal(n, h, dk), dim=-1), torch.rand(n, h, dk, generator=source)
            decay = hostile.log_decays(n, h, dk, seed=seed)
            pair = {"a": -kappa, "b": kappa * rate}
            return "dplr_delta_scan", {**qkv, "log_decay": decay, **pair, **state, "scale": dk**-0.5}
        case "recurrence":
            fed = {"x": normal(n, dv), "log_a": hostile.log_decays(n, dv, seed=seed)}
            return "linear_recurrence_scan", {**fed, "initial": normal(rows, dv), "spans": spans}
        case "selective":
            token = {name: normal(n, dv) for name in ("x", "dt", "z")}
            matrix = {"a": -normal(dv, dk).exp(), "b": normal(n, dk), "c": normal(n, dk)}
            weights = {"d": normal(dv), "dt_bias": normal(dv)}
            first = {"initial": normal(rows, dv, dk), "spans": spans}
            return "selective_scan", {**token, **matrix, **weights, **first}
        case "conv":
            taps = {"x": normal(n, dv), "weight": normal(dv, 4), "bias": normal(dv)}
            return "short_conv", {**taps, "initial": normal(rows, 3, dv), "spans": spans}
        case _:
            context = Spans.of(m + 3 for m in lengths)
            held = {"k": normal(context.total, hk, dk), "v": normal(context.total, hk, dv)}
            window = 5 if "window" in kind else None
            where = {"spans": spans, "context": context, "window": window}
            return "attention", {"q": normal(n, h, dk), **held, **where}


def step(kind: str, rows: int, **sizes: Any) -> tuple[str, dict[str, Any]]:
    """The same for one token a row."""
    op, given = scan(kind, [1] * rows, **sizes)
    del given["spans"]
    if op == "attention":
        del given["context"], given["window"]
        keys, values = (given[name].unflatten(0, (rows, 4)) for name in "kv")
        lengths = torch.tensor([1 + r % 4 for r in range(rows)])
        return "attention_step", {**given, "k": keys, "v": values, "lengths": lengths, "longest": 4}
    held = "history" if op == "short_conv" else "state"
    given[held] = given.pop("initial")
    return f"{op.removesuffix('_scan')}_step", given


def run(backend: str, op: str, given: dict[str, Any]) -> list[Tensor]:
    """What the op returns, and the state that it may have left behind."""
    held = [name for name in ("state", "history") if name in given]
    returned = getattr(select(backend, "cpu"), op)(**given)
    return [*(returned if isinstance(returned, tuple) else (returned,)), *(given[name] for name in held)]


def copied(given: dict[str, Any], change: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[str, Any]:
    return {name: change(x) if isinstance(x, Tensor) else x for name, x in given.items()}


def same(got: Sequence[Tensor], want: Sequence[Tensor], what: str, bound: float = 1e-5) -> None:
    """Within `bound` of max(1, largest entry), result by result; NaN and infinity are never right."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}, result {i}"
        assert bool(torch.isfinite(a).all()), f"{what}, result {i} is not finite"
        if b.numel():
            worst = float((a.double() - b.double()).abs().max())
            assert worst <= bound * max(1.0, float(b.abs().max())), f"{what}, result {i}: off by {worst:.1e}"


def guarded(x: Tensor) -> Tensor:
    """The same values inside a larger buffer that is NaN (or a wild integer) all round."""
    wide = x.new_full([n + 6 for n in x.shape], torch.nan if x.is_floating_point() else 10**9)
    inside = wide[tuple(slice(3, 3 + n) for n in x.shape)]
    return inside.copy_(x)


def between(x: Tensor) -> Tensor:
    """The same values in every second place of a larger buffer that is NaN elsewhere."""
    wide = x.new_full([2 * n + 1 for n in x.shape], torch.nan if x.is_floating_point() else 10**9)
    inside = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    return inside.copy_(x)


def behind(x: Tensor) -> Tensor:
    """The same values, contiguous, with NaN straight before the first and straight after the last."""
    wide = x.new_full([x.numel() + 128], torch.nan if x.is_floating_point() else 10**9)
    return wide[64 : 64 + x.numel()].view(x.shape).copy_(x)


def columns(x: Tensor) -> Tensor:
    """The same values with the last axis outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.ndim > 1 else x.clone()


def crossed(x: Tensor) -> Tensor:
    """The same values with the first two axes swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x.clone()


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch hands out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(3).isnan().all()) and bool(torch.ones(2).new_empty(3).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)

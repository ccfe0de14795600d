"""flash-linear-attention's kernels behind our ops' signatures (0.6.0, https://github.com/fla-org).

Knows how that package lays out its tensors, (batch, time, heads, dim), and which of its functions computes
what. 16-bit inputs take its chunked kernels, whose products are of 16 bits; float32 ones its kernels that
walk token by token, since the chunked ones round to tf32 or refuse float32. The chunked ones take differences
of float32 sums: a log-decay below -1e4 is taken as that.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import dplr_delta, gated_delta, gated_linear, linear_recurrence
from .entry import graded, on_gpu, over_rows, spread

FLOOR = -1e4


def gated_linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `reference.gated_linear_scan`; simple_gla for a decay a head or none, gla for one a channel."""
    given = (q, k, v, log_decay, initial)
    on_gpu("fla", q=q, k=k, v=v, log_decay=log_decay, initial=initial)
    if graded(*given):
        return gated_linear.gated_linear_scan(*given, spans, scale=scale, checked=checked)
    _, h = shapes.heads(q, k, v)
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay)
    vector = shapes.log_decay(log_decay, v.shape[0], h, q.shape[2], checked=checked)
    state = shapes.state("initial", initial, (spans.rows, h, q.shape[2], v.shape[2]), v)
    tokens, walk = {"q": spread(q, h), "k": spread(k, h), "v": v}, v.dtype == torch.float32
    if log_decay is not None:
        tokens["gk" if vector and walk else "g"] = _decay(log_decay, walk)
    return over_rows(_function("gla" if vector else "simple_gla", walk), tokens, state, spans, scale=scale)


def gated_linear_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, *, scale: float = 1.0
) -> Tensor:
    """One token a row; `state` in place, by a copy of what the package returns."""
    on_gpu("fla", q=q, k=k, v=v, log_decay=log_decay, state=state)
    if graded(q, k, v, log_decay, state):
        return gated_linear.gated_linear_step(q, k, v, log_decay, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    vector = shapes.log_decay(log_decay, v.shape[0], h, q.shape[2])
    shapes.step_state(state, (v.shape[0], h, q.shape[2], v.shape[2]))
    tokens = {"q": spread(q, h), "k": spread(k, h), "v": v}
    if log_decay is not None:
        tokens["gk" if vector else "g"] = log_decay.float()
    return _step(_function("gla" if vector else "simple_gla", True), tokens, state, scale=scale)


def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `reference.gated_delta_scan`; gated_delta_rule for a decay a head or none, kda for one a channel."""
    given = (q, k, v, log_decay, beta, initial)
    on_gpu("fla", q=q, k=k, v=v, log_decay=log_decay, beta=beta, initial=initial)
    if graded(*given):
        return gated_delta.gated_delta_scan(*given, spans, scale=scale, checked=checked)
    _, h = shapes.heads(q, k, v)
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    vector = shapes.log_decay(log_decay, v.shape[0], h, q.shape[2], checked=checked)
    shapes.exactly("beta", beta, v.shape[0], h)
    state = shapes.state("initial", initial, (spans.rows, h, q.shape[2], v.shape[2]), v)
    tokens, walk = _delta(q, k, v, log_decay, beta), v.dtype == torch.float32
    tokens["g"] = _decay(tokens["g"], walk)
    return over_rows(
        _function("kda" if vector else "gated_delta_rule", walk), tokens, state, spans, scale=scale
    )


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token a row; `state` in place, by a copy of what the package returns."""
    on_gpu("fla", q=q, k=k, v=v, log_decay=log_decay, beta=beta, state=state)
    if graded(q, k, v, log_decay, beta, state):
        return gated_delta.gated_delta_step(q, k, v, log_decay, beta, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    vector = shapes.log_decay(log_decay, v.shape[0], h, q.shape[2])
    shapes.exactly("beta", beta, v.shape[0], h)
    shapes.step_state(state, (v.shape[0], h, q.shape[2], v.shape[2]))
    function = _function("kda" if vector else "gated_delta_rule", True)
    return _step(function, _delta(q, k, v, log_decay, beta), state, scale=scale)


def dplr_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    scale: float = 1.0,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `reference.dplr_delta_scan`, by dplr_delta_rule."""
    given = (q, k, v, log_decay, a, b, initial)
    on_gpu("fla", q=q, k=k, v=v, log_decay=log_decay, a=a, b=b, initial=initial)
    if graded(*given):
        return dplr_delta.dplr_delta_scan(*given, spans, scale=scale, checked=checked)
    _, h = shapes.heads(q, k, v)
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, a=a, b=b)
    shapes.log_decay(log_decay, v.shape[0], h, q.shape[2], checked=checked)
    state = shapes.state("initial", initial, (spans.rows, h, q.shape[2], v.shape[2]), v)
    tokens, walk = _low_rank(q, k, v, log_decay, a, b), v.dtype == torch.float32
    tokens["gk"] = _decay(tokens["gk"], walk)
    return over_rows(_function("dplr_delta_rule", walk), tokens, state, spans, scale=scale)


def dplr_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token a row; `state` in place, by a copy of what the package returns."""
    on_gpu("fla", q=q, k=k, v=v, log_decay=log_decay, a=a, b=b, state=state)
    if graded(q, k, v, log_decay, a, b, state):
        return dplr_delta.dplr_delta_step(q, k, v, log_decay, a, b, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    shapes.log_decay(log_decay, v.shape[0], h, q.shape[2])
    shapes.step_state(state, (v.shape[0], h, q.shape[2], v.shape[2]))
    return _step(_function("dplr_delta_rule", True), _low_rank(q, k, v, log_decay, a, b), state, scale=scale)


def linear_recurrence_scan(
    x: Tensor, log_a: Tensor, initial: Tensor | None, spans: Spans, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """As `reference.linear_recurrence_scan`, by hgrn's recurrence."""
    on_gpu("fla", x=x, log_a=log_a, initial=initial)
    if graded(x, log_a, initial):
        return linear_recurrence.linear_recurrence_scan(x, log_a, initial, spans, checked=checked)
    shapes.tokens(spans, x=x, log_a=log_a)
    channels = shapes.recurrence(x, log_a, spans.total, checked=checked)
    state = shapes.state("initial", initial, (spans.rows, channels), x)
    return over_rows(_function("hgrn", True), {"x": x, "g": log_a}, state, spans)


def linear_recurrence_step(x: Tensor, log_a: Tensor, state: Tensor) -> Tensor:
    """One token a row; `state` in place, by a copy of what the package returns."""
    on_gpu("fla", x=x, log_a=log_a, state=state)
    if graded(x, log_a, state):
        return linear_recurrence.linear_recurrence_step(x, log_a, state)
    shapes.step_state(state, (x.shape[0], shapes.recurrence(x, log_a, x.shape[0])))
    return _step(_function("hgrn", True), {"x": x, "g": log_a}, state)


def _function(kind: str, walk: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The package's function of this kind: token by token, or in chunks."""
    place = {"dplr_delta_rule": "generalized_delta_rule"}.get(kind, kind)
    module = import_module(f"fla.ops.{place}")
    return getattr(module, f"fused_recurrent_{kind}" if walk else f"chunk_{kind}")


def _decay(g: Tensor, walk: bool) -> Tensor:
    return g.float() if walk else g.float().clamp(min=FLOOR)


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor) -> dict[str, Tensor]:
    """Its delta rules share key heads themselves."""
    decay = beta.new_zeros(beta.shape, dtype=torch.float32) if g is None else g.float()
    return {"q": q, "k": k, "v": v, "g": decay, "beta": beta}


def _low_rank(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Its rule has a decay a channel alone, and every head its own keys."""
    h, dk = v.shape[1], q.shape[2]
    shape = (*v.shape[:2], dk)
    shapes.exactly("a", a, *shape)
    shapes.exactly("b", b, *shape)
    decay = torch.zeros((), device=v.device) if g is None else g.float()
    decay = decay[..., None] if decay.ndim == 2 else decay
    return {
        "q": spread(q, h),
        "k": spread(k, h),
        "v": v,
        "a": a,
        "b": b,
        "gk": decay.expand(shape).contiguous(),
    }


def _step(function: Callable[..., Any], tokens: dict[str, Tensor], state: Tensor, **options: Any) -> Tensor:
    one = {name: x.unsqueeze(1) for name, x in tokens.items()}
    o, final = function(**one, initial_state=state, output_final_state=True, **options)
    state.copy_(final)
    return o.squeeze(1)

"""The selective scan (Mamba-1): each channel of each state place decays alone, and no matrix product helps.

Knows the op `delta = softplus(dt + dt_bias);  h = exp(delta a) h + delta b x;  o = (h c + d x) silu(z)` on
packed spans (Gu & Dao 2023, "Mamba", algorithm 2), and its step. Knows nothing of the model around it.
The walk through time, forward and back, is selective_walk's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ...spans import Spans
from .. import shapes
from .selective_walk import Scan
from .singles import route


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor | None,
    spans: Spans,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence over packed tokens; differentiable in every tensor, `initial` included.

    x, dt, z (n, channels), dt before its softplus; a (channels, s), negative; b, c (n, s); d, dt_bias
    (channels,); initial (rows, channels, s) or None (zeros). Any float dtype; computed in float32. Returns o
    (n, channels) in x's dtype and final (rows, channels, s) float32; an empty span hands its initial row on.
    Raises ValueError for shapes and, where `checked`, for a positive a.
    """
    channels, s = shapes.selective(x, dt, a, b, c, spans, d=d, z=z, dt_bias=dt_bias, checked=checked)
    state = shapes.state("initial", initial, (spans.rows, channels, s), x)
    if x.shape[0] == 0:
        return torch.zeros_like(x), state.clone()
    a = a.float()

    def scan(tensors: Sequence[Any], initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        x, delta, b, c = tensors
        keep = torch.is_grad_enabled() and any(y.requires_grad for y in (x, delta, a, b, c, initial))
        return Scan.apply(x, delta, a, b, c, initial, spans, keep)

    def one(tensors: Sequence[Any], initial: Tensor) -> tuple[Tensor, Tensor]:
        x, delta, b, c = tensors
        decay, column, row = _update(x, delta, a, b)
        final = torch.addcmul(initial * decay, column, row)
        return _read(final, c), final

    delta = _delta(dt, dt_bias)
    o, final = route((x.float(), delta, b.float(), c.float()), state, spans, scan=scan, one=one)
    return _leave(o, x, d, z), final


def selective_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    """One token a row: x, dt, z (rows, channels); b, c (rows, s); a, d, dt_bias as in the scan.

    Updates `state` (rows, channels, s) float32 in place, strided or not; returns o (rows, channels).
    """
    shapes.selective(x, dt, a, b, c, Spans.ones(x.shape[0]), d=d, z=z, dt_bias=dt_bias)
    shapes.step_state(state, (x.shape[0], *a.shape))
    decay, column, row = _update(x.float(), _delta(dt, dt_bias), a.float(), b.float())
    state.mul_(decay).addcmul_(column, row)
    return _leave(_read(state, c.float()), x, d, z)


def _delta(dt: Tensor, bias: Tensor | None) -> Tensor:
    return softplus(dt.float() if bias is None else dt.float() + bias.float())


def _leave(o: Tensor, x: Tensor, d: Tensor | None, z: Tensor | None) -> Tensor:
    """The skip and the gate, which read no state."""
    if d is not None:
        o = torch.addcmul(o, x.float(), d.float())
    if z is not None:
        o = o * silu(z.float())
    return o.to(x.dtype)


def _update(x: Tensor, delta: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row: the state's decay (rows, channels, s), and what is added to it as two factors."""
    return (delta[..., None] * a).exp(), (delta * x)[..., None], b[:, None]


def _read(state: Tensor, c: Tensor) -> Tensor:
    return (state @ c[..., None]).squeeze(-1)

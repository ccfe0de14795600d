"""mamba-ssm's kernels behind our ops' signatures (2.3.2, https://github.com/state-spaces/mamba).

Knows how that package lays out its tensors, (batch, channels, time). Its scan takes no initial state, and
rows of one length alone: other calls are served by the chunked form. Its step is the whole op.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import selective
from .entry import graded, on_gpu


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
    """As `reference.selective_scan`."""
    on_gpu("mamba_ssm", x=x, dt=dt, a=a, b=b, c=c, initial=initial, d=d, z=z, dt_bias=dt_bias)
    more = {"d": d, "z": z, "dt_bias": dt_bias}
    elsewhere = initial is not None or not spans.uniform or not spans.longest
    if elsewhere or graded(x, dt, a, b, c, d, z, dt_bias):
        return selective.selective_scan(x, dt, a, b, c, initial, spans, checked=checked, **more)
    shapes.selective(x, dt, a, b, c, spans, checked=checked, **more)

    def lined(y: Tensor | None) -> Tensor | None:
        return None if y is None else y.to(x.dtype).unflatten(0, (spans.rows, -1)).transpose(1, 2)

    skip, bias = (None if w is None else w.float().contiguous() for w in (d, dt_bias))
    scan = import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    token = (lined(x), lined(dt), a.float().contiguous(), lined(b), lined(c))
    o, final = scan(*token, skip, lined(z), bias, delta_softplus=True, return_last_state=True)
    return o.transpose(1, 2).flatten(0, 1).to(x.dtype), final.float()


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
    """One token a row; state (rows, channels, s) in place."""
    on_gpu("mamba_ssm", x=x, dt=dt, a=a, b=b, c=c, state=state, d=d, z=z, dt_bias=dt_bias)
    given = (x, dt, a, b, c, state)
    if graded(*given, d, z, dt_bias):
        return selective.selective_step(*given, d=d, z=z, dt_bias=dt_bias)
    rows = Spans.ones(x.shape[0], x.device)
    channels, s = shapes.selective(x, dt, a, b, c, rows, d=d, z=z, dt_bias=dt_bias)
    shapes.step_state(state, (x.shape[0], channels, s))
    none = torch.zeros(channels, device=x.device)  # without a skip or a bias its launcher fails
    step = import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    skip, bias = (none if w is None else w for w in (d, dt_bias))
    return step(state, x, dt, a, b, c, D=skip, z=z, dt_bias=bias, dt_softplus=True).to(x.dtype)

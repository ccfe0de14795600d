"""The selective scan in C: see selective.c for the walk, reference for the op.

Knows the record of its kernel. What autograd asks for goes to the chunked form.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import selective as chunked
from .call import fields, graded, in_place, packed, run, stride

WIDEST = 256
"""More states than these go to the chunked form."""


class Selective(ctypes.Structure):
    _fields_ = fields(
        "x dt a b c d z dt_bias state o offsets",
        "rows channels states x_stride dt_stride b_stride c_stride z_stride o_stride",
    )


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
    """Mamba's recurrence over packed tokens.

    x, dt, z (n, channels), dt before its softplus; a (channels, s), negative; b, c (n, s); d, dt_bias
    (channels,); initial (rows, channels, s) or None (zeros). Any float dtype; computed in float32. Returns o
    (n, channels) in x's dtype and final (rows, channels, s) float32; an empty span hands its initial row on.
    Raises ValueError for shapes and, where `checked`, for a positive a.
    """
    if _elsewhere(a, (x, dt, a, b, c, initial, d, z, dt_bias)):
        more = {"d": d, "z": z, "dt_bias": dt_bias, "checked": checked}
        return chunked.selective_scan(x, dt, a, b, c, initial, spans, **more)
    channels, s = shapes.selective(x, dt, a, b, c, spans, d=d, z=z, dt_bias=dt_bias, checked=checked)
    state = shapes.state("initial", initial, (spans.rows, channels, s), x)
    final = state.clone(memory_format=torch.contiguous_format)
    return _run(x, dt, a, b, c, final, spans.cu, d, z, dt_bias), final


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
    if _elsewhere(a, (x, dt, a, b, c, state, d, z, dt_bias)):
        return chunked.selective_step(x, dt, a, b, c, state, d=d, z=z, dt_bias=dt_bias)
    shapes.selective(x, dt, a, b, c, Spans.ones(x.shape[0]), d=d, z=z, dt_bias=dt_bias)
    shapes.step_state(state, (x.shape[0], *a.shape))
    with in_place(state) as held:
        return _run(x, dt, a, b, c, held, torch.arange(x.shape[0] + 1), d, z, dt_bias)


def _elsewhere(a: Tensor, tensors: tuple[Tensor | None, ...]) -> bool:
    return graded(tensors) or (a.ndim == 2 and a.shape[1] > WIDEST)


def _run(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    offsets: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
) -> Tensor:
    tokens = {"x": x, "dt": dt, "b": b, "c": c, "z": z}
    tokens = {name: None if y is None else packed(y) for name, y in tokens.items()}
    channels = {"a": a, "d": d, "dt_bias": dt_bias}
    o = torch.empty(x.shape)
    run(
        "selective",
        Selective,
        **tokens,
        **{name: None if y is None else y.float().contiguous() for name, y in channels.items()},
        **{f"{name}_stride": stride(y) for name, y in tokens.items()},
        state=state,
        o=o,
        offsets=offsets,
        rows=state.shape[0],
        channels=a.shape[0],
        states=a.shape[1],
        o_stride=o.stride(0),
    )
    return o.to(x.dtype)

"""The diagonal plus low rank delta rule (RWKV-7) as Triton kernels: the op's entrance, and its launches.

Tiles are prepared side by side (gated_delta_vector, with a second query and a second key to a token), then
walked with the state in registers (gated_delta_walk), in one pass or two. Knows when to leave a call to the
chunked form: where autograd asks, keys wider than 256, dtypes beyond float32, bfloat16 and float16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import dplr_delta as chunked
from . import gated_delta_vector
from .gated_delta_parts import Cut, classes, every_way, sizes
from .gated_delta_step import step
from .gated_delta_walk import walk, walks_apart
from .launch import Compiled, on_device, served


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
    """Reads with a what the state holds, decays it, writes that at b and v at k.

    q, k (n, hk, dk); v (n, h, dv); a, b (n, h, dk); log_decay (n, h, dk), natural log, <= 0, or (n, h), or
    None (no decay); initial (rows, h, dk, dv) or None (zeros). Value head j reads key head j // (h // hk).
    Strides of any kind. Products are of v's dtype, sums and states float32. Returns o (n, h, dv) in v's dtype
    and final (rows, h, dk, dv) float32; an empty span hands its initial row on. Raises ValueError for shapes
    and devices and, where `checked`, for a positive log_decay.
    """
    if q.ndim == 3 and not served(q.shape[2], (q, k, v, log_decay, a, b, initial)):
        return chunked.dplr_delta_scan(q, k, v, log_decay, a, b, initial, spans, scale=scale, checked=checked)
    _, h = shapes.heads(q, k, v)
    (n, _, dv), dk = v.shape, q.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, a=a, b=b)
    shapes.log_decay(log_decay, n, h, dk, checked=checked)
    shapes.exactly("a", a, n, h, dk)
    shapes.exactly("b", b, n, h, dk)
    if initial is not None:
        shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    on_device(v, q=q, k=k, log_decay=log_decay, a=a, b=b, initial=initial)
    by = sizes(dk, v.dtype, "lowrank")
    tiles = spans.to(v.device).tiles(by.size)
    apart = walks_apart(spans.rows, h, dv, tiles.most, by, v.device)
    return _scan(
        q, k, v, log_decay, a, b, initial, tiles.spans.cu, tiles.first, tiles.row, tiles.start, scale, apart
    )


@torch.library.custom_op("constate::triton_dplr_delta_scan", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    cu: Tensor,
    tile_first: Tensor,
    tile_row: Tensor,
    tile_start: Tensor,
    scale: float,
    apart: bool,
) -> tuple[Tensor, Tensor]:
    by, cut = sizes(k.shape[2], v.dtype, "lowrank"), Cut(cu, tile_first, tile_row, tile_start)
    if log_decay is None:  # one number for all
        log_decay = a.new_zeros(1, dtype=torch.float32).expand(a.shape)
    elif log_decay.ndim == 2:
        log_decay = log_decay[..., None].expand(a.shape)
    prepared = gated_delta_vector.prepare(q, k, v, log_decay, cut, by, a=a, b=b)
    return walk(prepared, initial, cut, scale, by, apart=apart)


@_scan.register_fake
def _(q, k, v, log_decay, a, b, initial, cu, tile_first, tile_row, tile_start, scale, apart):
    rows, (_, h, dv) = cu.shape[0] - 1, v.shape
    return v.new_empty(v.shape), v.new_empty(rows, h, q.shape[2], dv, dtype=torch.float32)


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
    """One token a row: q, k (rows, hk, dk); v (rows, h, dv); a, b (rows, h, dk); log_decay as in the scan.

    Updates `state` (rows, h, dk, dv) float32 in place, strided or not; returns o (rows, h, dv) in v's dtype.
    """
    if q.ndim == 3 and not served(q.shape[2], (q, k, v, log_decay, a, b, state)):
        return chunked.dplr_delta_step(q, k, v, log_decay, a, b, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    rows, dk = q.shape[0], q.shape[2]
    shapes.log_decay(log_decay, rows, h, dk)
    shapes.exactly("a", a, rows, h, dk)
    shapes.exactly("b", b, rows, h, dk)
    shapes.step_state(state, (rows, h, dk, v.shape[2]))
    on_device(v, q=q, k=k, log_decay=log_decay, a=a, b=b, state=state)
    return _step(q, k, v, log_decay, a, b, state, scale)


@torch.library.custom_op("constate::triton_dplr_delta_step", mutates_args={"state"})
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    scale: float,
) -> Tensor:
    o = v.new_empty(v.shape)
    step(q, k, v, log_decay, state, o, scale, a=a, b=b)()
    return o


@_step.register_fake
def _(q, k, v, log_decay, a, b, state, scale):
    return v.new_empty(v.shape)


def compiled() -> Iterator[Compiled]:
    """Every kernel at every class of head sizes: in one pass, in two, and a step."""
    for about, (n, h, _, dk, dv), dtype in classes():
        q, k, v, g, a, b = (torch.empty(n, h, d, dtype=dtype) for d in (dk, dk, dv, dk, dk, dk))
        given, state = (q, k, v, g.float(), a.float(), b.float()), (h, dk, dv)
        yield from every_way(dplr_delta_scan, dplr_delta_step, given, state, "", **about)

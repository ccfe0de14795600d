"""The gated delta rule as Triton kernels: the op's entrance, which kernels serve a call, and their launches.

Tiles are prepared side by side (gated_delta_tiles for a decay a head, gated_delta_vector for one a channel),
then walked with the state in registers (gated_delta_walk), in one pass or, where too few programs would walk,
with the outputs made by a third kernel for all tiles side by side. Knows sizes and when to leave a call to
the chunked form: where autograd asks, keys wider than 256, dtypes beyond float32, bfloat16 and float16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from ..chunked import gated_delta as chunked
from . import gated_delta_tiles, gated_delta_vector
from .gated_delta_parts import Cut, classes, every_way, sizes
from .gated_delta_step import step
from .gated_delta_walk import walk, walks_apart
from .launch import Compiled, on_device, served


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
    """Decays, erases what k holds, then writes v there.

    q, k (n, hk, dk); v (n, h, dv); log_decay (n, h), or (n, h, dk) on the key axis, natural log, <= 0, or
    None (DeltaNet); beta (n, h); initial (rows, h, dk, dv) or None (zeros). Value head j reads key head
    j // (h // hk). Strides of any kind. Products are of v's dtype, sums and states float32. Returns o
    (n, h, dv) in v's dtype and final (rows, h, dk, dv) float32; an empty span hands its initial row on.
    Raises ValueError for shapes and devices and, where `checked`, for a positive log_decay.
    """
    if q.ndim == 3 and not served(q.shape[2], (q, k, v, log_decay, beta, initial)):
        return chunked.gated_delta_scan(
            q, k, v, log_decay, beta, initial, spans, scale=scale, checked=checked
        )
    _, h = shapes.heads(q, k, v)
    (n, _, dv), dk = v.shape, q.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    shapes.exactly("beta", beta, n, h)
    vector = shapes.log_decay(log_decay, n, h, dk, checked=checked)
    if initial is not None:
        shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    on_device(v, q=q, k=k, log_decay=log_decay, beta=beta, initial=initial)
    by = sizes(dk, v.dtype, "channel" if vector else "head")
    tiles = spans.to(v.device).tiles(by.size)
    apart = walks_apart(spans.rows, h, dv, tiles.most, by, v.device)
    return _scan(
        q, k, v, log_decay, beta, initial, tiles.spans.cu, tiles.first, tiles.row, tiles.start, scale, apart
    )


@torch.library.custom_op("constate::triton_gated_delta_scan", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    initial: Tensor | None,
    cu: Tensor,
    tile_first: Tensor,
    tile_row: Tensor,
    tile_start: Tensor,
    scale: float,
    apart: bool,
) -> tuple[Tensor, Tensor]:
    cut = Cut(cu, tile_first, tile_row, tile_start)
    if log_decay is not None and log_decay.ndim == 3:
        by = sizes(k.shape[2], v.dtype, "channel")
        prepared = gated_delta_vector.prepare(q, k, v, log_decay, cut, by, beta=beta)
    else:
        by = sizes(k.shape[2], v.dtype, "head")
        prepared = gated_delta_tiles.prepare(q, k, v, log_decay, beta, cut, by)
    return walk(prepared, initial, cut, scale, by, apart=apart)


@_scan.register_fake
def _(q, k, v, log_decay, beta, initial, cu, tile_first, tile_row, tile_start, scale, apart):
    rows, (_, h, dv) = cu.shape[0] - 1, v.shape
    return v.new_empty(v.shape), v.new_empty(rows, h, q.shape[2], dv, dtype=torch.float32)


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
    """One token a row: q, k (b, hk, dk); v (b, h, dv); log_decay (b, h) or (b, h, dk) or None; beta (b, h).

    Updates `state` (b, h, dk, dv) float32 in place, strided or not, and returns o (b, h, dv) in v's dtype.
    """
    if q.ndim == 3 and not served(q.shape[2], (q, k, v, log_decay, beta, state)):
        return chunked.gated_delta_step(q, k, v, log_decay, beta, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    rows, dk = q.shape[0], q.shape[2]
    shapes.exactly("beta", beta, rows, h)
    shapes.log_decay(log_decay, rows, h, dk)
    shapes.step_state(state, (rows, h, dk, v.shape[2]))
    on_device(v, q=q, k=k, log_decay=log_decay, beta=beta, state=state)
    return _step(q, k, v, log_decay, beta, state, scale)


@torch.library.custom_op("constate::triton_gated_delta_step", mutates_args={"state"})
def _step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, state: Tensor, scale: float
) -> Tensor:
    o = v.new_empty(v.shape)
    step(q, k, v, log_decay, state, o, scale, beta=beta)()
    return o


@_step.register_fake
def _(q, k, v, log_decay, beta, state, scale):
    return v.new_empty(v.shape)


def compiled() -> Iterator[Compiled]:
    """Every kernel at every class of head sizes: in one pass, in two, and a step."""
    for about, (n, h, hk, dk, dv), dtype in classes():
        q, k, v = (torch.empty(n, heads, d, dtype=dtype) for heads, d in ((hk, dk), (hk, dk), (h, dv)))
        beta = torch.empty(n, h)
        decays = ("a decay a head", torch.empty(n, h)), ("a decay a channel", torch.empty(n, h, dk))
        for note, decay in (*decays, ("no decay", None)) if about["default"] else decays:
            given, state = (q, k, v, decay, beta), (h, dk, dv)
            yield from every_way(gated_delta_scan, gated_delta_step, given, state, note, **about)

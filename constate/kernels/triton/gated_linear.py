"""The gated linear recurrence as Triton kernels: the op's entrance, and which kernels serve a call.

Forward: tiles are prepared side by side where every channel decays by itself (gated_linear_tiles), then
walked with the state in registers (gated_linear_walk): row by row, or where too few programs would walk, in
stretches of rows. Step: gated_linear_step. Knows sizes, and when to leave a call to the chunked form: where
autograd asks, keys wider than 256, dtypes beyond float32, bfloat16 and float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...spans import Spans, SpanTiles
from .. import shapes
from ..chunked import gated_linear as chunked
from .gated_linear_pass import NONE, SCALAR
from .gated_linear_step import step
from .gated_linear_tiles import prepare
from .gated_linear_walk import Decays, Pieces, Sizes, walk
from .launch import Compiled, as_launched, multiprocessors, on_device, power, served

LEAST = 4
"""Tiles of a stretch: fewer would cost more in states than they give in programs."""


def sizes(dk: int, dtype: torch.dtype) -> Sizes:
    """By the class of a head's width and the dtype's alone, never by lengths."""
    width = power(dk)
    if dtype == torch.float32:
        return Sizes(16, 32, 32, 4, 4 if width <= 128 else 8)
    if width <= 128:
        return Sizes(64, 32, 64, 8, 4 if width <= 64 else 8)
    return Sizes(32, 32, 32, 4, 8)


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
    """Packed q, k (n, hk, dk) and v (n, h, dv) through S <- exp(g) S + k v^T; o = scale S^T q.

    log_decay (n, h), or (n, h, dk) on the key axis, natural log, <= 0, or None for no decay; initial (rows,
    h, dk, dv) or None for zeros. Strides of any kind. Value head j reads key head j // (h // hk). Products
    are of the inputs' dtype, float32 where they disagree; sums and states float32. Returns o (n, h, dv) in
    v's dtype and final (rows, h, dk, dv) float32; an empty span hands its initial row on. Raises ValueError
    for shapes and devices that disagree and, checked, for a positive log-decay.
    """
    if q.ndim == 3 and not served(q.shape[2], (q, k, v, log_decay, initial)):
        return chunked.gated_linear_scan(q, k, v, log_decay, initial, spans, scale=scale, checked=checked)
    _, h = shapes.heads(q, k, v)
    (n, _, dv), dk = v.shape, q.shape[2]
    shapes.tokens(spans, q=q, k=k, v=v, log_decay=log_decay)
    vector = shapes.log_decay(log_decay, n, h, dk, checked=checked)
    if initial is not None:
        initial = shapes.state("initial", initial, (spans.rows, h, dk, dv), v)
    on_device(v, q=q, k=k, log_decay=log_decay, initial=initial)
    spans = spans.to(v.device)
    by = sizes(dk, _kind(q, k, v))
    tiles = _cut(spans.tiles(by.size) if vector else None)
    pieces = stretches(spans, h * -(-dv // by.bv), by.size)
    length = 0 if pieces is None else pieces.size
    return _scan(q, k, v, log_decay, initial, spans.cu, *tiles, *_cut(pieces), length, scale)


def stretches(spans: Spans, programs: int, tile: int) -> SpanTiles | None:
    """Rows cut so that about four programs wait for each multiprocessor, where a row is walked by so many
    `programs`; None where the rows themselves are as many, or too short to be cut."""
    wanted = 4 * multiprocessors(spans.device)
    if spans.rows * programs * 2 >= wanted:
        return None
    size = -(-spans.total * programs // wanted)
    size = max(LEAST, -(-size // tile)) * tile
    return None if size >= spans.longest else spans.tiles(size)


def _cut(tiles: SpanTiles | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if tiles is None else (tiles.first, tiles.row, tiles.start)


def _kind(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """What products are made of."""
    return v.dtype if q.dtype == k.dtype == v.dtype else torch.float32


@torch.library.custom_op("constate::triton_gated_linear_scan", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    cu: Tensor,
    tile_first: Tensor | None,
    tile_row: Tensor | None,
    tile_start: Tensor | None,
    piece_first: Tensor | None,
    piece_row: Tensor | None,
    piece_start: Tensor | None,
    length: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Tiles are given where the decay is a vector; pieces, of `length` tokens, where rows are cut."""
    kind = _kind(q, k, v)
    by, decays = sizes(k.shape[2], kind), Decays(NONE if log_decay is None else SCALAR, log_decay)
    if log_decay is not None and tile_first is not None and tile_row is not None and tile_start is not None:
        q, k, decays = prepare(q, k, log_decay, cu, tile_first, tile_row, tile_start, kind, by)
    pieces = None
    if piece_first is not None and piece_row is not None and piece_start is not None:
        pieces = Pieces(piece_first, piece_row, piece_start, length)
    return walk(q, k, v, decays, initial, cu, pieces, scale, by)


@_scan.register_fake
def _(q, k, v, log_decay, initial, cu, *cut):
    (_, h, dv), rows = v.shape, cu.shape[0] - 1
    return v.new_empty(v.shape), v.new_empty(rows, h, q.shape[2], dv, dtype=torch.float32)


def gated_linear_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, *, scale: float = 1.0
) -> Tensor:
    """One token a row: q, k (rows, hk, dk), v (rows, h, dv), log_decay (rows, h) or (rows, h, dk) or None.

    `state` (rows, h, dk, dv) float32, of any strides, is updated in place; returns o (rows, h, dv).
    """
    if q.ndim == 3 and not served(q.shape[2], (q, k, v, log_decay, state)):
        return chunked.gated_linear_step(q, k, v, log_decay, state, scale=scale)
    _, h = shapes.heads(q, k, v)
    rows, dk = q.shape[0], q.shape[2]
    shapes.log_decay(log_decay, rows, h, dk)
    shapes.step_state(state, (rows, h, dk, v.shape[2]))
    on_device(v, q=q, k=k, log_decay=log_decay, state=state)
    return _step(q, k, v, log_decay, state, scale)


@torch.library.custom_op("constate::triton_gated_linear_step", mutates_args={"state"})
def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, scale: float) -> Tensor:
    o = v.new_empty(v.shape)
    step(q, k, v, log_decay, state, o, scale)()
    return o


@_step.register_fake
def _(q, k, v, log_decay, state, scale):
    return v.new_empty(v.shape)


def compiled() -> Iterator[Compiled]:
    """Every kernel at every class of head sizes: in one pass, in stretches, and a step."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float16, "fp16")):
        more = ((128, 64), (100, 100)) if name == "bf16" else ()
        for dk, dv in ((64, 64), (128, 128), (256, 256), *more):
            about = {"head": dk, "dtype": name, "default": name == "bf16" and dk == dv and dk in (64, 128)}
            n, h, hk = 4096, 16, 4
            q, k, v = (torch.empty(n, heads, d, dtype=dtype) for heads, d in ((hk, dk), (hk, dk), (h, dv)))
            for decay in (None, torch.empty(n, h), torch.empty(n, h, dk)):
                note = ("no decay", "", "a decay a head", "a decay a channel")[
                    0 if decay is None else decay.ndim
                ]
                for lengths, way in (((n,), "in stretches"), ((32,) * 128, "in one pass")):
                    spans = Spans.of(lengths)
                    initial = torch.empty(spans.rows, h, dk, dv)
                    call = partial(gated_linear_scan, q, k, v, decay, initial, spans)
                    yield from as_launched("gated_linear_scan", call, **about, note=f"{note}, {way}")
                g = None if decay is None else decay[:32]
                call = partial(gated_linear_step, q[:32], k[:32], v[:32], g, torch.empty(32, h, dk, dv))
                yield from as_launched("gated_linear_step", call, **about, note=note)

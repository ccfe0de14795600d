"""The gated linear scan with a decay for every key channel, in tiles: gated linear attention, HGRN-2.

Within a tile token j weighs sum_d q_id k_jd exp(g_{j+1,d} + ... + g_id) for token i (Yang et al. 2023,
section 4). The pairs are built as a tree: blocks of 1, 2, 4 ... tokens are joined two and two, and the
pairs between the halves are one matrix product, since their decay factors at the border. Every factor is
a product of decays, so nothing overflows, a decay of 0 is an ordinary number, and no tensor holds a
channel for every pair. Knows only the tiles: checks and spans of one token are gated_linear's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...spans import Spans
from .segments import Chain, Segment, segments
from .tiles import Tiles

TILE = 32


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """`gated_linear_scan` for g (n, h, dk) and at least one token."""
    assert g is not None
    (_, h, dv), dk = v.shape, q.shape[2]
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, g, initial))
    tiles = Tiles.of(spans, TILE)
    chain = Chain(tiles, initial)
    parts = segments(tiles, tiles.size * h * max(tiles.size, dk, dv), whole=graded)
    if graded:
        (part,) = parts
        out = part.join(_segment(part, chain, q, k, v, g, scale), v.dtype)
    else:
        out = v.new_empty(v.shape)
        for part in parts:
            part.write(out, _segment(part, chain, q, k, v, g, scale))
    return out, chain.final()


def _segment(part: Segment, chain: Chain, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    """o (tiles, size, h, dv) float32 of a segment's tiles; the chain moves past them."""
    query = part.cut(q).float().transpose(1, 2) * scale  # (tiles, h, size, dk)
    key = part.cut(k).float().transpose(1, 2)
    if q.shape[1] != v.shape[1]:  # every value head decays the keys of its group in its own way
        query, key = (x.repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (query, key))
    value = part.cut(v).float().transpose(1, 2)
    pairs, query, key, total = _tree(query, key, part.cut(g).float().transpose(1, 2).exp())
    first = chain.walk(part.sizes, total.mT, key.mT @ value)
    return (pairs @ value + query @ first).transpose(1, 2)


def _tree(query: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From (tiles, h, size, dk), size a power of two, the four things that a tile needs.

    The pairs' weights (tiles, h, size, size), 0 for j > i; queries times the decays from the tile's
    start; keys times the decays to its end; the tile's whole decay (tiles, h, 1, dk).
    """
    pairs = (query * key).sum(-1)[..., None, None]
    return join(pairs, (query * decay)[..., None, :], key[..., None, :], decay[..., None, :])


def join(pairs: Tensor, query: Tensor, key: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Joins blocks of one token, two and two, to tiles: from (tiles, h, blocks, block, dk) with as many
    queries and keys to a block as wanted, and their pairs (tiles, h, blocks, block, block)."""
    # What reaches a query from its block's start, a key at its block's end, and the block's whole decay.
    while query.shape[2] > 1:
        (query, later), (earlier, key) = _halves(query), _halves(key)
        (before, after), (upper, lower) = _halves(whole), _halves(pairs)
        across = later @ earlier.mT if later.shape[3] > 1 else (later * earlier).sum(-1, keepdim=True)
        upper = torch.cat([upper, torch.zeros_like(upper)], -1)
        pairs = torch.cat([upper, torch.cat([across, lower], -1)], -2)
        query = torch.cat([query, later * before], 3)
        key = torch.cat([earlier * after, key], 3)
        whole = before * after
    return pairs[:, :, 0], query[:, :, 0], key[:, :, 0], whole[:, :, 0]


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Even and odd blocks of (tiles, h, blocks, ...)."""
    even, odd = x.unflatten(2, (-1, 2)).unbind(3)
    return even, odd

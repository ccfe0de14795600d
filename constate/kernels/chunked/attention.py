"""Softmax attention over packed rows through PyTorch's scaled_dot_product_attention.

A row's queries are the last places of its context, so that the mask is aligned at the bottom right.
PyTorch's `is_causal` is aligned at the top left and is used only where both are equally long; elsewhere
queries run in blocks of bounded size, each with its own mask over the keys that it can see: a window's
cost is linear in tokens. On a CPU the fused kernel, which keeps no score of a query and a key, wants keys and
values of one width: the narrower are filled up. Knows no cache: `attention_step` sees plain buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ...spans import Spans
from .. import shapes

BLOCK, MASK = 256, 1 << 22
"""Queries of a masked block, fewer where its mask, queries times the keys they can see, passes MASK places:
PyTorch keeps a mask twice, once as float32, which over a long context would dwarf the keys."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    context: Spans,
    *,
    window: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    block: int = 1,
) -> Tensor:
    """softmax(scale q k^T) v within each row: q (n, h, dk) packed by `spans`, k (m, hk, dk) and v (m, hk, dv)
    by `context`, which counts the new tokens too.

    Row r's queries are the last spans.lengths[r] places of its context. Causal: each sees its own place
    and those before, with `window` only its own and the window - 1 before, and with `block` the rest of its
    block too, blocks of so many places being counted from the context's start. Not causal: the whole row.
    `scale` is dk ** -0.5 by default. Returns o (n, h, dv) in q's dtype. Query head j reads key head
    j // (h // hk). Raises ValueError for shapes or lengths that disagree.
    """
    shapes.attention(q, k, v, spans, context, window, causal, block)
    if spans.total == 0:
        return q.new_zeros((0, q.shape[1], v.shape[2]))
    if spans.uniform and context.uniform:
        # (rows, heads, tokens, dim)
        q, k, v = (x.unflatten(0, (spans.rows, -1)).transpose(1, 2) for x in (q, k, v))
        return _rows(q, k, v, window, scale, causal, block).transpose(1, 2).flatten(0, 1)
    outputs = []
    for new, held in zip(spans.slices(), context.slices(), strict=True):
        if new.stop > new.start:
            query, key, value = (x.transpose(0, 1)[None] for x in (q[new], k[held], v[held]))
            outputs.append(_rows(query, key, value, window, scale, causal, block)[0].transpose(0, 1))
    return torch.cat(outputs)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float | None,
    causal: bool,
    sight: int,
) -> Tensor:
    """Rows of equal lengths: q (rows, h, t, dk), k and v (rows, hk, m, dim), m >= t >= 1; `sight` is the
    attention's block."""
    count, held = q.shape[2], k.shape[2]
    first_block_ends = ((held - count) // sight + 1) * sight
    if not causal or (first_block_ends >= held and (window is None or window >= held)):
        return _attend(q, k, v, scale=scale)  # every query sees every key
    if count == held and sight == 1 and (window is None or window >= held):
        return _attend(q, k, v, scale=scale, is_causal=True)
    outputs = []
    width = held if window is None else min(held, window + BLOCK)
    block = max(1, min(BLOCK, MASK // width))
    for start in range(0, count, block):
        stop = min(start + block, count)
        place = torch.arange(start, stop, device=q.device)[:, None] + held - count
        first = 0 if window is None else max(0, held - count + start - window + 1)
        place = (place // sight + 1) * sight - 1  # the last place that each sees
        last = min(held, ((held - count + stop - 1) // sight + 1) * sight)
        key = torch.arange(first, last, device=q.device)
        seen = key <= place if window is None else (key <= place) & (key > place - window)
        keys, values = k[:, :, first:last], v[:, :, first:last]
        outputs.append(_attend(q[:, :, start:stop], keys, values, scale=scale, attn_mask=seen))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    dk, dv, (h, count) = q.shape[3], v.shape[3], q.shape[1:3]
    if dk != dv and not q.is_cuda and h * count > k.shape[1] * max(dk, dv):
        # The scores, which PyTorch would keep, are more than what is added here; zeros change no sum.
        scale, wide = dk**-0.5 if scale is None else scale, max(dk, dv)
        q, k, v = (x if x.shape[3] == wide else pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
    group = h // k.shape[1]
    if group > 1 and q.is_cuda and (attn_mask is not None or dk != dv or q.dtype == torch.float32):
        # The one fused kernel for these wants a key head for each query head; else every score would be kept.
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    o = scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
    )
    return o if o.shape[3] == dv else o[..., :dv]


def attention_step(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int, *, scale: float | None = None
) -> Tensor:
    """One query a row over the first lengths[r] places of its buffer; their order does not matter.

    q (rows, h, dk); k (rows, capacity, hk, dk) and v (rows, capacity, hk, dv) already hold the new token;
    lengths (rows,) int64 on q's device, `longest` their maximum on the host. Returns o (rows, h, dv).
    A shorter row's places up to `longest` are masked but read: any finite number may lie there, no NaN.
    """
    shapes.attention_step(q, k, v, lengths, longest)
    keys, values = k[:, :longest].transpose(1, 2), v[:, :longest].transpose(1, 2)
    mask = None
    if q.shape[0] > 1:
        mask = (torch.arange(longest, device=q.device) < lengths[:, None])[:, None, None]
    # A group's query heads stand in for queries: nothing is causal here, and no key is repeated.
    grouped = q.unflatten(1, (k.shape[2], -1))
    return _attend(grouped, keys, values, scale=scale, attn_mask=mask).flatten(1, 2)

"""What a denoiser predicts for every place of a text that is partly masked, in one forward.

A model that sees both sides reads the masked rows and that is all. A block-causal one must see each
block's noise beside the clean blocks before it: it reads the clean rows and the masked ones together, as
two streams (Arriola et al., 2503.09573, section 3.1), attention alone telling them apart. Knows no loss,
no schedule and no cache; gradients flow.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..core.model import Model
from ..kernels.dispatch import Op
from ..spans import Spans
from .denoiser import denoiser

PLACES = 256  # queries that share one mask


def predict(model: Model, clean: Tensor, noisy: Tensor, spans: Spans, at: Tensor) -> Tensor:
    """Logits (k, vocab) of what stands at the packed places `at` (k,): clean and noisy (n,) are ids packed
    by `spans`, alike but for the places that are masked in `noisy`.

    Block b of a block-causal model is predicted from its own noisy places and the clean blocks before it.
    A shift is seen to: row i of the result is about place at[i]. The mask id is never what stands there.
    """
    about = denoiser(model)
    behind = (spans.position[at] > 0).long() if about.shift else 0  # a row's place 0 keeps its own
    if about.block is None:
        logits = model(noisy, spans, at=at - behind)
    else:
        # A block's first place is predicted by the last of the block before, which was clean then.
        opens = about.shift & (spans.position[at] % about.block == 0) & (spans.position[at] > 0)
        both = Spans.of((*spans.lengths, *spans.lengths), spans.device)
        asked = copy(model)  # the same weights, asked with another attention
        asked.ops = replace(model.ops, attention=_streams(model.ops.attention))
        source = at - behind + torch.where(opens, 0, spans.total)
        logits = asked(torch.cat([clean, noisy]), both, at=source)
    return logits.index_fill(1, torch.tensor([about.mask_id], device=clean.device), -math.inf)


def _streams(attention: Op) -> Op:
    """The attention of both streams: the first half of the rows is clean, the second half the same masked."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, context: Spans, **sight: Any) -> Tensor:
        half = Spans.of(spans.lengths[: spans.rows // 2], spans.device)
        clean, noisy = zip(*(x.chunk(2) for x in (q, k, v)), strict=True)
        o = attention(*clean, half, half, **sight)
        rows = [slice(0, half.total)] if half.uniform else half.slices()
        several = half.rows if half.uniform else 1  # all at once where they are equally long
        parts = []
        for at in rows:
            # (rows, heads, tokens, dim)
            views = [x[at].unflatten(0, (several, -1)).transpose(1, 2) for x in (*noisy, *clean[1:])]
            parts.append(_noisy(*views, block=sight["block"]).transpose(1, 2).flatten(0, 1))
        return torch.cat([o, *parts])

    return attend


def _noisy(q: Tensor, k: Tensor, v: Tensor, clean_k: Tensor, clean_v: Tensor, block: int) -> Tensor:
    """Each noisy block over itself and the clean blocks before it, PLACES of queries or more at a time, cut
    between blocks."""
    length, outputs = q.shape[2], []
    size = -(-PLACES // block) * block
    for start in range(0, length, size):
        stop = min(start + size, length)
        own = torch.arange(start, stop, device=q.device) // block
        before = torch.arange(stop, device=q.device) // block
        seen = torch.cat([before < own[:, None], own == own[:, None]], 1)
        keys = torch.cat([clean_k[:, :, :stop], k[:, :, start:stop]], 2)
        values = torch.cat([clean_v[:, :, :stop], v[:, :, start:stop]], 2)
        grouped = q.shape[1] != k.shape[1]
        outputs.append(
            scaled_dot_product_attention(q[:, :, start:stop], keys, values, seen, enable_gqa=grouped)
        )
    return torch.cat(outputs, 2) if outputs else q

"""What the recurrences of (rows, h, dk, dv) states share on the way to their C forms: who goes, and as what.

Knows the fields that their records have in common, and which calls stay with PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...spans import Spans
from .. import shapes
from .call import graded, packed, stride

WIDEST = 1024
"""Keys wider than this go to the chunked form: the columns that a thread walks would not fit its cache."""


def elsewhere(q: Tensor, *more: Tensor | None) -> bool:
    """Whether the chunked form serves this call: autograd is asked for, or a head's keys are too wide."""
    return graded((q, *more)) or (q.ndim == 3 and q.shape[2] > WIDEST)


def states(q: Tensor, v: Tensor, initial: Tensor | None, spans: Spans) -> Tensor:
    """A copy of the initial states, (rows, h, dk, dv) float32, for a scan to turn into the final ones."""
    shape = (spans.rows, v.shape[1], q.shape[2], v.shape[2])
    return shapes.state("initial", initial, shape, v).clone(memory_format=torch.contiguous_format)


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    offsets: Tensor,
    scale: float,
) -> dict[str, Any]:
    """The fields that all these records have; `o` is made here."""
    q, k, v = packed(q), packed(k), packed(v)
    g = None if log_decay is None else packed(log_decay)
    n, h, dv = v.shape
    return {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": g,
        "state": state,
        "o": torch.empty(n, h, dv),
        "offsets": offsets,
        "rows": state.shape[0],
        "hk": k.shape[1],
        "h": h,
        "dk": k.shape[2],
        "dv": dv,
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
        "decay_stride": stride(g),
        "o_stride": h * dv,
        "decay_kind": 0 if g is None else g.ndim - 1,
        "scale": scale,
    }

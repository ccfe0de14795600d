"""What a call takes beside weights and cache, on paper: activations and workspace at their peak.

An estimate by one rule for all mixers, to some 10% on a CPU for most of them; a row of `bench memory` says
where it is further off. The residual stream and its norm are held throughout. A branch adds what its
projections make and twice the width that its last one reads (a gate's product, and what it is made of); a
convolution's output is one more copy of its channels, and the scan of a matrix-valued state lays its
operands out once more. In a narrower dtype a CPU makes a product in float32, of a float32 copy of its input,
before it rounds it, and such a scan works in float32 throughout. Attention to more than the call's own tokens
adds a mask, kept as bool and in that dtype, and several rows' keys and values are packed end to end. Knows
modules' sizes; runs nothing.
"""

from __future__ import annotations

import torch
from torch import nn

from ..core.mixer import Mixer
from ..core.model import Model
from ..core.short_conv import ShortConv
from ..core.state import State
from ..kernels.chunked.attention import BLOCK, MASK


def workspace(model: Model, new: int, context: int, rows: int, device: str = "cpu") -> int:
    """Bytes at the peak of a call with `new` tokens in each of `rows` rows, which see `context` places,
    themselves included. `model` may be an outline, of what runs on `device`."""
    d, size = model.embed.embedding_dim, model.dtype.itemsize
    branches = (_branch(mixer, d, new, context, rows, device) for mixer in model.mixers())
    logits = 4 * rows * model.head.out_features
    return rows * new * 2 * d * size + max(max(branches, default=0), logits)


def _branch(mixer: Mixer, d: int, new: int, context: int, rows: int, device: str) -> int:
    with torch.device("meta"):
        state = mixer.init_state(1, 1)
    token = _token(mixer, state, d, device)
    kept = [t for _, t, of in state.leaves() if of.kind == "kv" and of.grows]
    ring = [t.shape[1] for _, t, of in state.leaves() if of.ring]
    nbytes = rows * new * token
    if kept or ring:
        seen = min(context, ring[0] + BLOCK) if ring else context
        if ring or seen > new or (getattr(mixer, "block", None) or 1) > 1:
            nbytes += (1 + mixer.dtype.itemsize) * min(min(BLOCK, new) * seen, MASK)
        if rows > 1:
            nbytes += rows * seen * sum(t[0, 0].nbytes for t in kept)
    return nbytes


def _token(mixer: Mixer, state: State, d: int, device: str) -> int:
    """Bytes a token that the branch holds at its largest."""
    linears, size = [m for m in mixer.modules() if isinstance(m, nn.Linear)], mixer.dtype.itemsize
    leaving = next((m for m in reversed(linears) if m.out_features == d), None)
    made = sum(m.out_features for m in linears if m is not leaving)
    convolved = sum(m.weight.shape[0] for m in mixer.modules() if isinstance(m, ShortConv))
    laid = convolved if any(of.kind == "state" and t.ndim == 4 for _, t, of in state.leaves()) else 0
    nbytes = size * (made + (2 * leaving.in_features if leaving else 0) + convolved + laid)
    if size == 4 or not device.startswith("cpu"):
        return nbytes
    return nbytes + 4 * made + (4 - size) * laid if laid else max(nbytes, (size + 4) * made + 4 * d)

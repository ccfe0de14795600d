"""Drift: what a state in 16 bits costs, by how much has been read.

One text, two caches of one model: one keeps its recurrent state in float32, the other in less, and both are
stepped token by token, as decoding does, so that the state is rounded at every token. Rounding errors that
add up would show as a distance that grows. The convolutions' history and keys and values are the same in
both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cache import Cache
from ...core.model import Model
from .reading import book, first_id, fits, windows
from .row import row

LENGTH = 16384
NARROW = ("bfloat16", "float16")
EDGES = (0, 256, 1024, 4096)  # stretches of places end here, then at each fourfold


def drift(
    model: Model, name: str, text: str | None = None, *, length: int = LENGTH, dtypes: Sequence[str] = NARROW
) -> Iterator[dict[str, Any]]:
    """A row for each dtype and stretch of places: `score` bits a byte with that state, `exact_score` with a
    float32 one, `logits_off` the mean over tokens of |difference| / |logits|, in Euclidean length.

    Raises ValueError for a model without a recurrent state, and for a text shorter than `length` tokens.
    """
    read = book(model, name, text)
    fits(model, name, length)
    if not model.cost().held.get("state", 0):
        raise ValueError(f"{name} holds no recurrent state, and so none that could drift")
    tokens, unit = windows(read, length, 1)[0], len(read.ids) / read.nbytes / math.log(2)
    edges = [e for e in EDGES if e < length]
    while 4 * edges[-1] < length and edges[-1]:
        edges.append(4 * edges[-1])
    costs = {"float32": torch.zeros(length)} | {dtype: torch.zeros(length) for dtype in dtypes}
    off = {dtype: torch.zeros(length) for dtype in dtypes}
    for t, said in enumerate(_said(model, tokens, ("float32", *dtypes))):
        exact = said["float32"]
        for dtype, logits in said.items():
            costs[dtype][t] = F.cross_entropy(logits, tokens[t : t + 1].to(logits.device))
            if dtype != "float32":
                off[dtype][t] = (logits - exact).norm() / exact.norm()
    for dtype in dtypes:
        for low, high in zip(edges, [*edges[1:], length], strict=True):
            found = row(
                "drift",
                model,
                name,
                setting=f"{dtype} state, {read.name}, tokens {low} to {high - 1}",
                score=float(costs[dtype][low:high].double().mean()) * unit,
                chance=math.log(model.vocab) * unit,
                n=high - low,
                tokens=length,
                text=read.name,
            )
            exact = float(costs["float32"][low:high].double().mean()) * unit
            yield found | {
                "state_dtype": dtype,
                "last": high - 1,
                "exact_score": exact,
                "logits_off": float(off[dtype][low:high].double().mean()),
            }


@torch.no_grad()
def _said(model: Model, tokens: Tensor, dtypes: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The logits (1, vocab) before each token, by the dtype of the state."""
    caches: dict[str, Cache] = {}
    before = model.state_dtype
    try:
        for dtype in dtypes:
            model.state_dtype = getattr(torch, dtype)
            caches[dtype] = model.init_cache(1, len(tokens))
        heard = tokens.new_tensor([first_id(model)]).to(model.device)
        for token in tokens.to(model.device).split(1):
            said = {}
            for dtype, cache in caches.items():
                model.state_dtype = getattr(torch, dtype)
                said[dtype] = model.step(heard, cache).float()
            yield said
            heard = token
    finally:
        model.state_dtype = before

"""Held-out bits per byte. Knows a model's forward and nothing of how the model was made."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.model import Model
from ..spans import Spans
from .text import END_ID

WINDOW = 1024  # tokens: what the tiny models were trained on at most
ROWS = 4  # windows scored together: a bound on memory alone


def bits_per_byte(
    model: Model, tokens: Tensor, nbytes: int, *, window: int = WINDOW, every: int = 1, start: int = END_ID
) -> float:
    """Mean code length of a text under the model, in bits for each of its bytes.

    tokens (n,) int64 of a text of `nbytes` bytes, without marks. The text is cut into consecutive windows
    and each is read from an empty state, its first input being the token before it (`start`, the end mark,
    before the very first): so every token is scored exactly once, with up to `window` tokens of context.
    `every=k` reads only each k-th window, as an estimate. Raises ValueError for an empty text.
    """
    if tokens.ndim != 1 or not len(tokens) or nbytes < 1:
        raise ValueError(f"bits_per_byte: tokens {tuple(tokens.shape)} of {nbytes} bytes: a text is wanted")
    nats = torch.cat(list(costs(model, tokens, window=window, every=every, start=start)))
    return nats.double().mean().item() * len(tokens) / nbytes / math.log(2)


@torch.no_grad()
def costs(
    model: Model, tokens: Tensor, *, window: int = WINDOW, every: int = 1, start: int = END_ID
) -> Iterator[Tensor]:
    """What each token of the windows that are read costs, in nats: (t,) float32 on the CPU, in order."""
    inputs = torch.cat([tokens.new_tensor([start]), tokens[:-1]])
    cuts = range(0, len(tokens), window * every)
    for group in (cuts[i : i + ROWS] for i in range(0, len(cuts), ROWS)):
        heard = torch.cat([inputs[i : i + window] for i in group])
        wanted = torch.cat([tokens[i : i + window] for i in group])
        spans = Spans.of((min(window, len(tokens) - i) for i in group), tokens.device)
        yield F.cross_entropy(model(heard, spans), wanted, reduction="none").cpu()

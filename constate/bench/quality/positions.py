"""Two probes of the use of context: the loss by place in the window, and on a second reading.

If what was read long ago helps, later places cost less; where the loss stops falling is where a model stops
remembering. A passage that is read twice costs next to nothing the second time to whom remembers it. Both
are without a free parameter, and both tell models apart that one mean over a text does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...core.model import Model
from ...training.text import Text
from .intervals import times
from .reading import book, costs, first_id, fits, windows
from .row import row

WINDOW, WINDOWS = 1024, 64
PASSAGE, PASSAGES = 256, 64
TOGETHER = 8  # rows of a forward


def positions(
    model: Model, name: str, text: str | None = None, *, length: int = WINDOW, most: int = WINDOWS
) -> Iterator[dict[str, Any]]:
    """A row for each stretch of places: `score` bits a byte there, of `n` tokens; the stretches double.

    At most `most` windows of `length` tokens, each from an empty state. `low` to `high`: the 95%
    interval over windows. Raises ValueError for a text shorter than a window, and for one longer than the
    model's positions.
    """
    read = book(model, name, text)
    fits(model, name, length)
    nats = _costs(model, windows(read, length, most))
    edges = [0, *(2**i for i in range(4, math.ceil(math.log2(length)))), length]
    for low, high in pairwise(edges):
        setting = f"{read.name}, places {low} to {high - 1} of windows of {length}"
        yield _row("positions", model, name, read, setting, nats[:, low:high], high) | {
            "first": low,
            "last": high - 1,
        }


def repeat(
    model: Model, name: str, text: str | None = None, *, length: int = PASSAGE, most: int = PASSAGES
) -> dict[str, Any]:
    """One row: `score` bits a byte of passages of `length` tokens on their second reading, right after the
    first, which cost `first_reading`."""
    read = book(model, name, text)
    fits(model, name, 2 * length)
    once = windows(read, length, most)
    nats = _costs(model, torch.cat([once, once], dim=1))
    setting = f"{read.name}, passages of {length} tokens read again"
    found = _row("repeat", model, name, read, setting, nats[:, length:], 2 * length)
    return found | {"first_reading": _bits(nats[:, :length], read)}


def _costs(model: Model, rows: Tensor) -> Tensor:
    start = first_id(model)
    groups = (rows[i : i + TOGETHER] for i in range(0, len(rows), TOGETHER))
    return torch.cat([torch.cat(list(costs(model, list(group), start=start)), dim=1) for group in groups])


def _row(
    probe: str, model: Model, name: str, read: Text, setting: str, nats: Tensor, last: int
) -> dict[str, Any]:
    each = nats.mean(1).double() * _bits_a_nat(read)
    half = times(len(each)) * float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else None
    score = _bits(nats, read)
    return row(
        probe,
        model,
        name,
        setting=setting,
        score=score,
        chance=math.log(model.vocab) * _bits_a_nat(read),
        n=nats.numel(),
        low=None if half is None else score - half,
        high=None if half is None else score + half,
        tokens=last,
        text=read.name,
    )


def _bits(nats: Tensor, read: Text) -> float:
    return float(nats.double().mean()) * _bits_a_nat(read)


def _bits_a_nat(read: Text) -> float:
    """Nats a token to bits a byte, by the text's mean length of a token."""
    return len(read.ids) / read.nbytes / math.log(2)

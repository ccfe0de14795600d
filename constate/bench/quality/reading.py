"""Reading a text once, from front to back, through the state: what each token cost.

The text is cut into pieces and the cache carries everything from one to the next, so that memory does not
grow with the text where the model's state does not. Knows a model's forward and texts as ids; no probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.model import Model
from ...diffusion_lm.denoiser import Masked
from ...spans import Spans
from ...training.text import Text
from ..predict.published import positions
from .texts import read

PIECE = 512  # tokens of a forward: a bound on memory alone


def book(model: Model, name: str, text: str | None) -> Text:
    """A text by its name (see texts.read) in the model's ids. Raises ValueError for a model that has no
    tokenizer, or that does not read from left to right."""
    if model.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, and this probe is about a text: add tokenizer.json")
    if isinstance(model.config, Masked):
        raise ValueError(
            f"{name} is a masked diffusion model, whose tokens have no order to cost one by one: "
            "probe bpb gives its bound"
        )
    title, content = read(text)
    ids = model.tokenizer.encode(content, add_special_tokens=False).ids
    return Text(title, torch.tensor(ids), len(content.encode()))


def costs(model: Model, rows: Sequence[Tensor], *, start: int, piece: int = PIECE) -> Iterator[Tensor]:
    """What tokens cost, in nats: pieces (rows, up to `piece`) that lie end to end along the rows.

    rows: ids (t,) each, all equally long, on the CPU. The first token is read behind `start`.
    """
    length = len(rows[0])
    cache = model.init_cache(len(rows), length)
    last = torch.full((len(rows), 1), start, dtype=torch.int64, device=model.device)
    for at in range(0, length, piece):
        wanted = torch.stack([row[at : at + piece] for row in rows]).to(model.device)
        heard, last = torch.cat([last, wanted[:, :-1]], dim=1), wanted[:, -1:]
        spans = Spans.of([heard.shape[1]] * len(rows), model.device)
        logits = model.forward(heard.flatten(), spans, cache)
        nats = F.cross_entropy(logits.float(), wanted.flatten(), reduction="none")
        yield nats.view(len(rows), -1).cpu()


def first_id(model: Model) -> int:
    """What stands before a text: the end mark, or id 0 where there is none."""
    return min(model.eos_ids, default=0)


def windows(text: Text, length: int, most: int) -> Tensor:
    """At most `most` stretches of `length` tokens, spread evenly over the text, none overlapping:
    (rows, length). Raises ValueError for a text shorter than one."""
    whole = len(text.ids) // length
    if not whole:
        raise ValueError(f"{text.name} has {len(text.ids):,} tokens; a window of {length:,} is wanted")
    rows = min(whole, most)
    return torch.stack([text.ids[r * whole // rows * length :][:length] for r in range(rows)])


def fits(model: Model, name: str, length: int) -> None:
    """Raises ValueError where `length` is beyond the positions that the model was made for: what it makes of
    places that it has never met is no measure of its quality."""
    places = positions(vars(model.config))
    if places is not None and length > places:
        raise ValueError(
            f"{name} was made for {places:,} positions, and {length:,} are read at once: a score beyond them "
            "is no measure of its quality"
        )

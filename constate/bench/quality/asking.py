"""Asking a model a probe's questions: a share of right answers with its interval. Knows forwards and ids;
neither how episodes are made nor how a model was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.model import Model
from ...diffusion_lm.denoiser import Masked
from ...spans import Spans
from .intervals import share
from .probes.episodes import Episodes, Probe, chance, generator
from .row import row

EPISODES = 256
PACKED = 16384  # tokens of a forward: a bound on memory alone
FROM = 1_000_000  # the first seed of episodes that are scored; a training's lie below


def ask(
    model: Model, name: str, probe: Probe, *, seed: int = 0, episodes: int = EPISODES, tail: float = 1.0
) -> dict[str, Any]:
    """One row: `score` is the share of right answers of `n`, `low` to `high` its 95% interval.

    A model that was trained on the probe reads the probe's own ids; a checkpoint with a tokenizer reads ids
    of its vocabulary that were drawn for them by `seed`, which also draws the episodes. The model chooses
    among the probe's answers, so that `chance` is one over their number. `tail` scores the last such part
    of each episode's answers alone. Raises ValueError for a vocabulary that cannot hold the probe, and for a
    model that does not read from left to right: it would see the answers.
    """
    if isinstance(model.config, Masked):
        raise ValueError(
            f"{name} is a masked diffusion model, which sees what follows: probe {probe.name} asks what "
            "comes next"
        )
    ids = vocabulary(model, name, probe, seed)
    right, asked = [], []
    # Few rows at a time, of whatever length they are.
    one = probe.draw(1, FROM + seed).tokens.shape[1]
    rows = max(1, min(episodes, PACKED // one))
    for first in range(0, episodes, rows):
        drawn = probe.draw(min(rows, episodes - first), FROM + seed * episodes + first)
        hits, here = answered(model, drawn, probe.answers, ids, tail)
        right.append(hits)
        asked.append(here)
    score, low, high = share(torch.cat(right), torch.cat(asked))
    return row(
        probe.name,
        model,
        name,
        seed=seed,
        setting=probe.setting if tail == 1.0 else f"{probe.setting}, the last {tail:.0%} of answers",
        score=score,
        chance=chance(probe),
        n=int(torch.cat(asked).sum()),
        low=low,
        high=high,
        tokens=one,
    )


@torch.no_grad()
def answered(
    model: Model, episodes: Episodes, answers: range, ids: Tensor, tail: float = 1.0
) -> tuple[Tensor, Tensor]:
    """How many answers of each episode are right and how many were asked, (rows,) int64 both.

    `ids` (probe's ids,) maps the probe's to the model's.
    """
    rows, length = episodes.tokens.shape
    heard = ids[episodes.tokens].flatten()
    logits = model(heard, Spans.of([length] * rows, heard.device))
    asked = last_part(episodes.asked, tail)
    chosen = logits.view(rows, length, -1)[asked.to(heard.device)][:, ids[answers.start : answers.stop]]
    said = chosen.argmax(-1).cpu() + answers.start
    hits = torch.zeros_like(asked, dtype=torch.int64)
    hits[asked] = (said == episodes.wanted[asked]).long()
    return hits.sum(1), asked.sum(1)


def last_part(asked: Tensor, tail: float) -> Tensor:
    """The last `tail` of each row's True entries, at least one where there is one."""
    count = asked.sum(1, keepdim=True)
    skipped = count - (count * tail).ceil().long().clamp_min(1)
    return asked & (asked.cumsum(1) > skipped)


def vocabulary(model: Model, name: str, probe: Probe, seed: int) -> Tensor:
    """The model's id for each of the probe's, (probe's ids,) int64 on the model's device."""
    special = set(model.eos_ids) | set(_special(model))
    usable = [i for i in range(model.vocab) if i not in special] if model.tokenizer else range(model.vocab)
    if probe.ids > len(usable):
        raise ValueError(
            f"probe {probe.name} ({probe.setting}) uses {probe.ids} ids and {name} has {len(usable)} that "
            "are no marks: a smaller vocab is wanted"
        )
    if model.tokenizer is None:
        return torch.arange(probe.ids, device=model.device)
    order = torch.randperm(len(usable), generator=generator(FROM + seed))[: probe.ids]
    return torch.tensor(usable)[order].to(model.device)


def _special(model: Model) -> Iterator[int]:
    if model.tokenizer is not None:
        added = model.tokenizer.get_added_tokens_decoder()
        yield from (i for i, token in added.items() if token.special)

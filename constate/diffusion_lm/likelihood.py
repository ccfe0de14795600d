"""How likely a denoiser finds a text: a bound from above on its code length, by Monte Carlo.

-log p(x) <= E_k [n / k x cross-entropy summed over k masked places], k drawn evenly from 1 to n and the
masked places evenly among the n (Nie et al., 2502.09992, equation 14; Ou et al., 2406.03736): the value of
the continuous-time bound of any noise schedule, with less spread than drawing a time. Of a block-causal
model the bound is a sum over blocks, each given the clean ones before (Arriola et al., 2503.09573). Knows
texts as ids; everything that it returns is a bound and is to be called one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.model import Model
from ..spans import Spans
from .denoiser import denoiser
from .schedules import Schedule
from .streams import predict

PLACES, LOGITS = 4096, 1 << 27  # in one forward: bounds on memory alone
SAMPLES = 4
"""Draws: two from each of two halves of 1 to n. That leaves the mean alone and takes most of its spread,
since the more is masked, the worse the rest is predicted; from the two of a half follows the error."""


@dataclass(frozen=True)
class Bound:
    """An upper bound on a code length, as the mean over draws, and the standard error of that mean."""

    value: float
    error: float


def groups(spans: Spans, block: int | None) -> Tensor:
    """The group of each place, (n,) from 0: its row, or its block of its row. What is masked in one says
    nothing about the others."""
    if block is None:
        return spans.row
    per_row = torch.tensor([-(-n // block) for n in spans.lengths], device=spans.device)
    first = per_row.cumsum(0) - per_row
    return first[spans.row] + spans.position // block


@torch.no_grad()
def nelbo(
    model: Model,
    rows: Sequence[Tensor],
    given: Sequence[int],
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    schedule: Schedule | None = None,
) -> list[Bound]:
    """For each row a bound on -log p(its other tokens | its first given[r]), in nats.

    rows: ids (n,) of one text each, on the model's device. Row r draws `samples` times, an even number,
    from seed + r, whatever its neighbours are: counts of masks, or with a `schedule` its times, as published
    scores often do, which spreads more. Raises ValueError for a row with nothing left to score and,
    in a shifted model, for one with nothing given: its place 0 has nothing before it.
    """
    about = denoiser(model)
    if samples < 2 or samples % 2:
        raise ValueError(f"samples={samples}: draws come in pairs, from which the standard error follows")
    for r, (row, start) in enumerate(zip(rows, given, strict=True)):
        if not int(about.shift) <= start < len(row):
            raise ValueError(
                f"row {r} has {len(row)} tokens and {start} are given: at least one is to be left to score, "
                "and a shifted model wants at least one given"
            )
    weights = [
        draw(len(row), start, about.block, samples, seed + r, schedule)
        for r, (row, start) in enumerate(zip(rows, given, strict=True))
    ]
    totals = torch.zeros(len(rows), samples, dtype=torch.float64)
    most = min(PLACES, LOGITS // model.head.out_features)
    for chunk in _chunks([len(row) for row in rows for _ in range(samples)], most):
        jobs = [divmod(i, samples) for i in chunk]
        clean = torch.cat([rows[r] for r, _ in jobs])
        weight = torch.cat([weights[r][j] for r, j in jobs]).to(clean.device)
        spans = Spans.of((len(rows[r]) for r, _ in jobs), clean.device)
        at = weight.nonzero().flatten()
        noisy = clean.index_fill(0, at, about.mask_id)
        nats = F.cross_entropy(predict(model, clean, noisy, spans, at), clean[at], reduction="none")
        sums = torch.zeros(spans.rows, dtype=torch.float64, device=clean.device)
        sums.index_add_(0, spans.row[at], nats.double() * weight[at])
        for (r, j), value in zip(jobs, sums.tolist(), strict=True):
            totals[r, j] = value
    # A mean of `samples / 2` parts, each the mean of two alike draws.
    halves = (totals[:, ::2] - totals[:, 1::2]) / 2
    errors = halves.square().sum(1).sqrt() / (samples / 2)
    return [Bound(v, e) for v, e in zip(totals.mean(1).tolist(), errors.tolist(), strict=True)]


def bits_per_byte(
    model: Model,
    tokens: Tensor,
    nbytes: int,
    *,
    window: int,
    start: int,
    every: int = 1,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Bound:
    """A bound on the mean code length of a text in bits for each of its bytes, and its standard error.

    tokens (n,) int64 of a text of `nbytes` bytes. Cut into windows as autoregressive models are scored, each
    given the token before it (`start` before the very first) and nothing else. `every=k` reads only each
    k-th window, as an estimate. Raises ValueError for an empty text.
    """
    if tokens.ndim != 1 or not len(tokens) or nbytes < 1:
        raise ValueError(f"bits_per_byte: tokens {tuple(tokens.shape)} of {nbytes} bytes: a text is wanted")
    heard = torch.cat([tokens.new_tensor([start]), tokens])
    rows = [heard[i : i + window + 1] for i in range(0, len(tokens), window * every)]
    bounds = nelbo(model, rows, [1] * len(rows), samples=samples, seed=seed)
    scale = len(tokens) / sum(len(row) - 1 for row in rows) / nbytes / math.log(2)
    error = math.sqrt(sum(b.error**2 for b in bounds))
    return Bound(scale * sum(b.value for b in bounds), scale * error)


def draw(
    n: int, given: int, block: int | None, samples: int, seed: int, schedule: Schedule | None = None
) -> Tensor:
    """What each of n places weighs in each draw, (samples, n) float32: n_g / k where it is one of the k
    masked places of its group of n_g, else 0. With a `schedule` each group has a time instead, at which it
    says how likely a place is masked and what it weighs. The first `given` places are never masked. In draws
    2 s and 2 s + 1 each group has its k, or time, from the same of samples / 2 equal parts of all."""
    g = torch.Generator().manual_seed(seed)
    group = groups(Spans.of([n]), block)[given:]
    group = group - group[0]
    sizes = group.bincount()
    first = sizes.cumsum(0) - sizes
    part = torch.rand(samples // 2, len(sizes), generator=g).argsort(0).repeat_interleave(2, 0)
    share = (part + torch.rand(part.shape, generator=g)) / (samples // 2)
    count = 1 + (share * sizes).long().clamp(max=sizes - 1)
    weights = torch.zeros(samples, n)
    if schedule is not None:
        time = 1 - share.double()[:, group]  # in (0, 1]
        masked = torch.rand(time.shape, generator=g) < schedule.masked(time)
        weights[:, given:] = torch.where(masked, schedule.weight(time), 0.0)
        return weights
    for j in range(samples):
        order = (group + torch.rand(n - given, generator=g, dtype=torch.float64)).argsort()
        rank = torch.empty_like(order)
        rank[order] = torch.arange(n - given)
        masked = rank - first[group] < count[j][group]
        weights[j, given:] = torch.where(masked, sizes[group] / count[j][group], 0.0)
    return weights


def _chunks(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indices in order, in chunks of `most` places together; a longer row is alone."""
    chunks: list[list[int]] = []
    room = 0
    for i, n in enumerate(lengths):
        if not chunks or n > room:
            chunks.append([])
            room = most
        chunks[-1].append(i)
        room -= n
    return chunks

"""What is predicted in one forward of two streams, against one forward a block; gradients too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from constate.core.model import Model
from constate.diffusion_lm import streams
from constate.diffusion_lm.denoiser import denoiser
from constate.diffusion_lm.streams import predict
from constate.spans import Spans
from tests.denoisers import DENOISERS, MASK, make
from tests.referee import same_logits


def texts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Clean ids, and the same with about half of the places masked."""
    g = torch.Generator().manual_seed(sum(lengths))
    clean = torch.randint(0, MASK, (sum(lengths),), generator=g)
    return clean, torch.where(torch.rand(len(clean), generator=g) < 0.5, MASK, clean)


def one_by_one(model: Model, clean: Tensor, noisy: Tensor) -> Tensor:
    """One row: each block after the clean ones before it; place i from the logits at i - 1 if shifted."""
    about, n = denoiser(model), len(clean)
    rows = []
    for start in range(0, n, about.block or n):
        stop = min(start + (about.block or n), n)
        logits = model(torch.cat([clean[:start], noisy[start:stop]]), Spans.of([stop]))
        rows += [logits[max(i - 1, 0) if about.shift else i] for i in range(start, stop)]
    logits = torch.stack(rows)
    logits[:, MASK] = -math.inf
    return logits


@pytest.mark.parametrize("lengths", [(1,), (13,), (5, 0, 12, 1), (9, 9)])
@pytest.mark.parametrize("name", DENOISERS)
def test_every_place_as_if_its_block_were_next(name: str, lengths: tuple[int, ...]) -> None:
    model, spans = make(name), Spans.of(lengths)
    clean, noisy = texts(lengths)
    rows = [one_by_one(model, clean[part], noisy[part]) for part in spans.slices() if part.stop > part.start]
    got = predict(model, clean, noisy, spans, torch.arange(spans.total))
    keep = [i for i in range(MASK + 1) if i != MASK]
    assert bool((got[:, MASK] == -math.inf).all())
    same_logits(got[:, keep], torch.cat(rows)[:, keep])
    at = (noisy == MASK).nonzero().flatten()
    same_logits(predict(model, clean, noisy, spans, at)[:, keep], torch.cat(rows)[at][:, keep], "some places")


@pytest.mark.parametrize("name", ["blocks", "blocks, shifted", "bd3lm"])
def test_queries_that_share_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spans = make(name), Spans.of([17, 17])
    clean, noisy = texts(spans.lengths)
    want = predict(model, clean, noisy, spans, torch.arange(34))
    monkeypatch.setattr(streams, "PLACES", 6)
    got = predict(model, clean, noisy, spans, torch.arange(34))
    same_logits(got[:, :MASK], want[:, :MASK])


@pytest.mark.parametrize("name", ["blocks, shifted", "bd3lm", "both sides, shifted"])
def test_the_gradient_is_that_of_one_by_one(name: str) -> None:
    lengths = (9, 4)
    clean, noisy = texts(lengths)
    spans, gradients = Spans.of(lengths), []
    weights = torch.randn(len(clean), MASK)
    for way in ("streams", "one by one"):
        model = make(name).requires_grad_(True)
        if way == "streams":
            logits = predict(model, clean, noisy, spans, torch.arange(len(clean)))
        else:
            logits = torch.cat([one_by_one(model, clean[part], noisy[part]) for part in spans.slices()])
        (logits[:, :MASK] * weights).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for n, want in gradients[1].items():
        assert float((gradients[0][n] - want).abs().max()) <= 2e-4 * max(1.0, float(want.abs().max())), n
